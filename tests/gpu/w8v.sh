#!/usr/bin/env bash
# Attention in vLLM on a GPU host: its classes beside each other, eager and in graphs, with replay,
# after a cached beginning and with DSpark; FlashMLA's prefill with padded heads. vLLM must be
# unpacked (stage.py's common/env.sh sourced). With two GPUs the engines share both.
#   OUT=DIR [COMMIT=ID] [LIMIT=250] bash tests/gpu/w8v.sh
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
began=$SECONDS
LIMIT=${LIMIT:-250}
left() { echo $((LIMIT - (SECONDS - began))); }
export PYTHONUNBUFFERED=1 PYTHONPATH="overlay:tests${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT/logs"
export SPARK_ATTENTION_LIBRARY=${SPARK_ATTENTION_LIBRARY:-$PWD/.carry/attention.so}
fits() { timeout 30 python3 -c 'from spark_overlay.attention.kernels import library; library.load()'; }
if ! fits >"$OUT/build.log" 2>&1; then # none, or of another interface
    export SPARK_ATTENTION_LIBRARY=$OUT/attention.so
    timeout 80 python3 overlay/csrc/build_cuda.py --attention "$SPARK_ATTENTION_LIBRARY" --arch 90a \
        >>"$OUT/build.log" 2>&1
    echo "attention library: $?, after $((SECONDS - began)) s"
fi

checks() { # TREE NAME: all of them from a tree, into files of that name
    local limit
    limit=$(left)
    timeout -k 5 $((limit + 5)) python3 "$1/tests/gpu/run.py" --limit $((limit - 8)) --at-once 6 \
        --commit "${COMMIT:-unknown}" --out "$OUT/$2.json" --keep-logs "$OUT/logs/$2" \
        portable-layers portable-replies asked-stock-layers portable-stock portable-graphs \
        portable-again portable-tokens portable-replay portable-known portable-draft \
        >"$OUT/$2.log" 2>&1
}
checks . vllm &
engines=$!

timeout 100 python3 -m pytest -q -s -m gpu -p no:cacheprovider \
    tests/gpu/test_padded_prefill.py >"$OUT/padded.log" 2>&1
echo "padded prefill: $?, after $((SECONDS - began)) s"
grep -E "ulp|passed|failed|skipped|Error" "$OUT/padded.log" | tail -n 7
wait "$engines"
echo "vLLM: $?, after $((SECONDS - began)) s"
grep -vE "^ *(File|self|return)|^model " "$OUT/vllm.log" | cut -c 1-200 | tail -n 16
# Another tree, if one was brought and nothing of this one could be judged.
if [[ -e .carry/base.tgz && ! -s $OUT/vllm.json ]] || ! grep -q '"portable-' "$OUT/vllm.json"; then
    if (($(left) > 90)) && [[ -e .carry/base.tgz ]]; then
        mkdir -p .carry/base && tar -xzf .carry/base.tgz -C .carry/base
        (export PYTHONPATH="$PWD/.carry/base/overlay:$PWD/.carry/base/tests:$PYTHONPATH"; checks .carry/base base)
        echo "the other tree: after $((SECONDS - began)) s"
        grep -vE "^ *(File|self|return)|^model " "$OUT/base.log" | cut -c 1-200 | tail -n 12
    fi
fi
rm -f "$OUT/attention.so"
