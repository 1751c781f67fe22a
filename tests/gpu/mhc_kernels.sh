#!/usr/bin/env bash
# mHC's kernels (CUDA and Triton) and the cache inserts on a GPU: right or not. No figure of it counts, so
# it may run beside other work.
#   OUT=DIR [LIMIT=120] bash tests/gpu/mhc_kernels.sh
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
LIMIT=${LIMIT:-120}
. tests/gpu/libraries.sh
tests="timeout $LIMIT python3 -m pytest -q -m gpu -p no:cacheprovider --maxfail=12"
jobs=()
SPARK_MHC_LIBRARY=none $tests -n 4 tests/gpu/test_mhc_kernels.py >"$OUT/mhc_triton.log" 2>&1 &
jobs+=($!)
$tests -n 2 tests/gpu/test_insert_kernels.py >"$OUT/inserts.log" 2>&1 &
jobs+=($!)
libraries mhc || exit
$tests -n 2 tests/gpu/test_mhc_kernels.py >"$OUT/mhc_cuda.log" 2>&1 &
jobs+=($!)
wait "${jobs[@]}"
for name in mhc_cuda mhc_triton inserts; do
    echo "$name: $(tail -n 1 "$OUT/$name.log")"
    grep -h "^E  " "$OUT/$name.log" | head -n 3 | cut -c1-200
done
