#!/usr/bin/env bash
# mHC's kernels and the cache inserts on a GPU: right or not. No figure of it counts, so it may run beside
# other work.
#   OUT=DIR [LIMIT=120] bash tests/gpu/mhc_kernels.sh
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
tests="timeout ${LIMIT:-120} python3 -m pytest -q -m gpu -p no:cacheprovider --maxfail=12"
$tests -n 4 tests/gpu/test_mhc_kernels.py >"$OUT/mhc_kernels.log" 2>&1 &
$tests -n 2 tests/gpu/test_insert_kernels.py >"$OUT/insert_kernels.log" 2>&1 &
wait
for name in mhc_kernels insert_kernels; do
    echo "$name: $(tail -n 1 "$OUT/$name.log")"
    grep -h "^E  " "$OUT/$name.log" | head -n 3 | cut -c1-200
done
