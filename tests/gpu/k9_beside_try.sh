#!/usr/bin/env bash
# beside other work, before k9_try.sh: numerics of inserts, mHC, indexer (library and Triton); compiles TileLang's
set -uo pipefail
cd -- "$(dirname -- "$0")/../.."
OUT=${OUT:-$(mktemp -d)}; LIMIT=${LIMIT:-120}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/overlay:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} TRITON_CACHE_DIR=/tmp/k9_triton
lib=$PWD/.carry/indexer3.so
t="python3 -m pytest -q -m gpu -p no:cacheprovider"
jobs=()
begin() { timeout "$LIMIT" "${@:2}" >"$OUT/$1.log" 2>&1 & jobs+=($!); }
begin b_lib env SPARK_INDEXER_LIBRARY=$lib $t tests/gpu/test_indexer_kernels.py
begin b_triton $t -n 4 tests/gpu/test_indexer_kernels.py
begin b_inserts $t -n 2 tests/gpu/test_insert_kernels.py
begin b_mhc $t -n 4 tests/gpu/test_mhc_kernels.py
if python3 -c 'import vllm' >/dev/null 2>&1; then
  for r in 1 4 16 32; do begin b_tile$r python3 overlay/benchmarks/mhc.py --peer --quick --rows $r --commit beside; done
  begin b_ins python3 overlay/benchmarks/inserts.py --peer --quick --rows 1 --commit beside
fi
begin b_try python3 tests/gpu/k9_try.py "$OUT" 60
begin b_mhctry python3 tests/gpu/k9_mhc_try.py "$OUT" 60
wait "${jobs[@]}"
for n in b_lib b_triton b_inserts b_mhc; do echo "$n: $(tail -n 1 "$OUT/$n.log")"; grep -h "^E  " "$OUT/$n.log" | head -n 3 | cut -c1-200; done
for r in 1 4 16 32; do grep -h '"us"' "$OUT/b_tile$r.log" | tail -n 2 | cut -c1-200; done
tail -n 2 "$OUT/b_ins.log" "$OUT/b_try.log" | cut -c1-200
