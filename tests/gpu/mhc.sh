#!/usr/bin/env bash
# mHC and the cache inserts on a GPU: right, then timed, beside vLLM's where vLLM is.
#   OUT=DIR [LIMIT=300] [COMMIT=ID] bash tests/gpu/mhc.sh
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
LIMIT=${LIMIT:-300} began=$SECONDS
export PYTHONUNBUFFERED=1
peer=
if python3 -c 'import vllm' >/dev/null 2>&1; then peer=--peer; fi
part() { # NAME MOST COMMAND…: with what is left of LIMIT, MOST at most
    local name=$1 most=$2 left=$((LIMIT - (SECONDS - began)))
    shift 2
    ((left > 10)) || return
    timeout -k 5 $((left < most ? left : most)) "$@" >"$OUT/$name.log" 2>&1
    echo "$name: $?, after $((SECONDS - began)) s"
    grep -v '^[0-9 :-]* \[TileLang' "$OUT/$name.log" | tail -n 8 | cut -c1-220
}
part kernels 120 python3 -m pytest -q -m gpu -p no:cacheprovider -n 8 --maxfail=12 \
    tests/gpu/test_insert_kernels.py tests/gpu/test_mhc_kernels.py
part inserts 60 python3 overlay/benchmarks/inserts.py $peer --quick \
    --commit "${COMMIT:-unknown}" --json "$OUT/inserts.json"
part mhc 200 python3 overlay/benchmarks/mhc.py $peer --quick \
    --commit "${COMMIT:-unknown}" --json "$OUT/mhc.json"
part mhc_sweep 200 python3 tests/gpu/mhc_sweep.py "$OUT" 190
