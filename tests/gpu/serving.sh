#!/usr/bin/env bash
# Attention in vLLM on a GPU host: its classes beside each other, eager and in graphs, with replay,
# after a cached beginning and with DSpark; FlashMLA's prefill with padded heads. vLLM must be
# unpacked (stage.py's common/env.sh sourced). With two GPUs the engines share both. About 190 s.
#   OUT=DIR [COMMIT=ID] [LIMIT=250] [SPARK_ATTENTION_LIBRARY=FILE] bash tests/gpu/serving.sh
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
began=$SECONDS
LIMIT=${LIMIT:-250}
export PYTHONUNBUFFERED=1 PYTHONPATH="overlay:tests${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT/logs"
fits() { timeout 30 python3 -c 'from spark_overlay.attention.kernels import library; library.load()'; }
if ! fits >"$OUT/build.log" 2>&1; then # none, or of another interface
    export SPARK_ATTENTION_LIBRARY=$OUT/attention.so
    timeout 80 python3 overlay/csrc/build_cuda.py --attention "$SPARK_ATTENTION_LIBRARY" \
        >>"$OUT/build.log" 2>&1
    echo "attention library: $?, after $((SECONDS - began)) s"
fi
. tests/gpu/libraries.sh
libraries indexer # without it Triton's kernels serve

limit=$((LIMIT - (SECONDS - began)))
timeout -k 5 $((limit + 5)) python3 tests/gpu/run.py --limit $((limit - 8)) --at-once 6 \
    --commit "${COMMIT:-unknown}" --out "$OUT/vllm.json" --keep-logs "$OUT/logs" \
    portable-layers portable-replies asked-stock-layers portable-stock portable-graphs \
    portable-again portable-tokens portable-replay portable-known portable-draft \
    >"$OUT/vllm.log" 2>&1 &
engines=$!

timeout 100 python3 -m pytest -q -s -m gpu -p no:cacheprovider \
    tests/gpu/test_padded_prefill.py >"$OUT/padded.log" 2>&1
echo "padded prefill: $?, after $((SECONDS - began)) s"
grep -E "^T=|passed|failed|skipped" "$OUT/padded.log" | tail -n 7
wait "$engines"
echo "vLLM: $?, after $((SECONDS - began)) s"
grep -vE "^ *(File|self|return)|^model " "$OUT/vllm.log" | cut -c 1-200 | tail -n 16
rm -f "$OUT/attention.so"
