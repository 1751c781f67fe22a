#!/usr/bin/env bash
# The indexer's kernels on the GPU at hand: numerics, and everything that indexer.sh times compiled. No
# figure of it counts, so it may run beside other work.
#   OUT=folder [LIMIT=100] bash tests/gpu/indexer_kernels.sh
set -uo pipefail
cd -- "$(dirname -- "$0")/../.."
OUT=${OUT:-$(mktemp -d)}
LIMIT=${LIMIT:-100}
export PYTHONPATH=$PWD/overlay:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/indexer_triton}
tests="python3 -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_indexer_kernels.py"
jobs=()
begin() { timeout "$LIMIT" "${@:2}" >"$OUT/$1.log" 2>&1 & jobs+=($!); }
begin bench_cold python3 overlay/benchmarks/indexer.py --commit cold --seconds "$LIMIT"
begin choice $tests -k "test_choice and not 2048"
begin prefill $tests -k "test_choice and 2048"
begin candidates $tests -k "test_candidates or decode or test_queries"
begin far $tests -k "test_far or test_blocks"
begin others $tests -k "not test_choice and not test_candidates and not test_far and not decode and not test_queries and not test_blocks"
for n in 0 1 2 3; do
    begin "compile_$n" python3 overlay/benchmarks/indexer_sweep.py --compile "$n/4"
done
wait "${jobs[@]}"
for name in choice prefill candidates far others; do
    echo "$name: $(tail -n 1 "$OUT/$name.log")"
done
grep -h "^E  " "$OUT"/{choice,prefill,candidates,far,others}.log | head -n 6
grep -h "WRONG" "$OUT/bench_cold.log" | cut -c1-200 | head -n 4
