#!/usr/bin/env bash
# Sparse attention on a GPU, all in one call:
#   OUT=DIR [LIMIT=75] [COMMIT=ID] bash tests/gpu/attention_all.sh bench    timed: nothing else may run
#   OUT=DIR [LIMIT=330]            bash tests/gpu/attention_all.sh tests    may run beside other work
# bench: attention.py with its chart, beside vLLM's kernels where vLLM is; then other launches of the
# attention than the table's. tests: every shape against float64, a few under compute-sanitizer, and,
# where vLLM is, the error beside its own and FlashMLA's prefill with padded heads.
# SPARK_ATTENTION_LIBRARY: the CUDA library, built here where it is not said.
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
what=${1:?bench or tests}
began=$SECONDS wrong=0
export PYTHONUNBUFFERED=1
export SPARK_ATTENTION_LIBRARY=${SPARK_ATTENTION_LIBRARY:-$PWD/overlay/build/attention/_cuda.so}
part() { # NAME MOST COMMAND…: with what is left of LIMIT, MOST at most
    local name=$1 most=$2 left=$((LIMIT - (SECONDS - began))) status=0
    shift 2
    if ((left <= 8)); then
        echo "$name: no time left"
        return
    fi
    timeout -k 5 $((left < most ? left : most)) "$@" >"$OUT/$name.log" 2>&1 || status=$? wrong=1
    echo "$name: $status, after $((SECONDS - began)) s"
}
if [[ ! -e $SPARK_ATTENTION_LIBRARY ]]; then
    LIMIT=200 part build 120 python3 overlay/csrc/build_cuda.py --attention "$SPARK_ATTENTION_LIBRARY"
fi
if [[ $what == bench ]]; then
    LIMIT=${LIMIT:-75}
    part bench 90 python3 overlay/benchmarks/attention.py --quick --limit 25 \
        --commit "${COMMIT:-unknown}" --json "$OUT/attention.json" --chart "$OUT/attention.png"
    part launches 30 python3 overlay/benchmarks/attention.py --quick --launches prefill \
        --commit "${COMMIT:-unknown}" --json "$OUT/launches.json"
    grep -h '^bars' "$OUT/bench.log" | sed 's/, /\n/g' | cut -c1-90
    grep -h '^launch.*many' "$OUT/launches.log" | cut -c1-90
else
    LIMIT=${LIMIT:-330}
    part kernels 120 bash tests/gpu/attention.sh
    part stock 60 python3 -m pytest -q -s -m gpu -p no:cacheprovider \
        tests/gpu/test_attention_beside_stock.py tests/gpu/test_padded_prefill.py
    part sanitizer 150 bash tests/gpu/attention.sh --sanitize
    for name in kernels stock sanitizer; do
        grep -hE '^(FAILED|ERROR)|passed|failed|ERROR SUMMARY|RACECHECK' "$OUT/$name.log" | tail -n 6 | cut -c1-150
    done
fi
exit "$wrong"
