#!/usr/bin/env bash
# All of EXL3 on a GPU host in one call of some 330 s, the most telling first; each part has its own
# limit and leaves what it found in OUT. vLLM must be unpacked (stage.py's common/env.sh sourced).
#   OUT=DIR COMMIT=ID [EXLLAMAV3=WHEEL] bash tests/gpu/exl3_all.sh
# With exllamav3's wheel the benchmark measures it, too (its build: 100 s of 16 cores, once).
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}" "${COMMIT:?the commit of this tree}"
began=$SECONDS
left() { # LEAST MOST: seconds for a part so that all ends in time
    local rest=$((LIMIT - (SECONDS - began)))
    ((rest < $1)) && return 1
    echo $((rest < $2 ? rest : $2))
}
LIMIT=${LIMIT:-330}
export SPARK_EXL3_LIBRARY=${SPARK_EXL3_LIBRARY:-$PWD/overlay/build/exl3/_cuda.so}
export SPARK_EXL3_KERNELS=1 SPARK_EXL3_SECONDS=${SPARK_EXL3_SECONDS:-20} PYTHONUNBUFFERED=1

if [[ ! -e $SPARK_EXL3_LIBRARY ]]; then
    timeout 90 python3 overlay/csrc/build_cuda.py "$SPARK_EXL3_LIBRARY" || exit 1
    echo "built after $((SECONDS - began)) s"
fi

# Times first, while nothing else is on the GPU.
timeout $((${EXLLAMAV3:+120} + 60)) python3 overlay/benchmarks/exl3.py --quick --commit "$COMMIT" --json "$OUT/bench.json" \
    --chart "$OUT/bench.png" experts layer dense >"$OUT/bench.log" 2>&1
echo "benchmark: $?, after $((SECONDS - began)) s"
tail -n 1 "$OUT/bench.log"

if command -v ncu >/dev/null && limit=$(left 30 60); then
    timeout "$limit" python3 overlay/benchmarks/exl3_instructions.py --commit "$COMMIT" \
        --json "$OUT/instructions.json" >"$OUT/instructions.log" 2>&1
    echo "instructions a weight: $?, after $((SECONDS - began)) s"
fi

# vLLM's engines compile for minutes; the kernels' own tests run meanwhile.
if limit=$(left 60 $((LIMIT - 100))); then
    timeout -k 5 $((limit + 5)) python3 tests/gpu/run.py --limit "$limit" --commit "$COMMIT" \
        --out "$OUT/vllm.json" exl3-layers exl3-graphs exl3-draft exl3-replies \
        >"$OUT/vllm.log" 2>&1 &
    engines=$!
fi
if limit=$(left 20 150); then
    timeout -k 5 "$limit" python3 -m pytest -q -m gpu -p no:cacheprovider -n 3 --maxfail=12 \
        tests/gpu/test_exl3_kernels.py >"$OUT/kernels.log" 2>&1
    echo "kernels: $?, after $((SECONDS - began)) s"
    tail -n 15 "$OUT/kernels.log"
fi
if [[ -n ${engines:-} ]]; then
    wait "$engines"
    echo "vLLM: $?, after $((SECONDS - began)) s"
    tail -n 25 "$OUT/vllm.log"
fi

if limit=$(left 25 60); then
    PYTHONPATH=overlay${PYTHONPATH:+:$PYTHONPATH} timeout "$limit" \
        python3 -m spark_overlay.exl3.cuda.tune "$OUT/sm_90.json" >"$OUT/tune.log" 2>&1
    echo "tuner: $?, after $((SECONDS - began)) s"
    tail -n 3 "$OUT/tune.log"
fi
