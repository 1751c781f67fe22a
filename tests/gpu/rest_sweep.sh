#!/usr/bin/env bash
# What is left open of inserts, indexer and mHC, on a GPU that nothing else uses: numerics of every
# variant first, while compilers run, then each timed alone beside vLLM's where vLLM is.
#   OUT=DIR [LIMIT=195] [COMMIT=ID] bash tests/gpu/rest_sweep.sh
# $OUT: rest_inserts.json, rest_indexer_THREADS.json, mhc_sweep.json, mhc.json, inserts.json, logs.
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
LIMIT=${LIMIT:-195} began=$SECONDS
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/overlay:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/rest_triton}
left() { echo $((LIMIT - (SECONDS - began) > 3 ? LIMIT - (SECONDS - began) : 3)); }
jobs=()
begin() { # NAME MOST COMMAND…: beside others
    local left
    left=$(left)
    timeout -k 5 $((left < $2 ? left : $2)) "${@:3}" >"$OUT/$1.log" 2>&1 &
    jobs+=($!)
}
part() { # NAME MOST COMMAND…: alone
    local left
    left=$(left)
    timeout -k 5 $((left < $2 ? left : $2)) "${@:3}" >"$OUT/$1.log" 2>&1
    echo "$1: $?, after $((SECONDS - began)) s"
}
library() { echo "/tmp/rest_indexer_$1.so"; }
peer=()
python3 -c 'import vllm' >/dev/null 2>&1 && peer=(--peer)
threads=(1024 512 256)
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
build='import sys
from pathlib import Path
sys.path.insert(1, "overlay/csrc")
import build_cuda as cuda
out, n, arch = sys.argv[1:]
define = [f"-DINDEXER_CHOOSERS={n}"]
cuda.build(Path(out), [cuda.architecture(arch)], define, 2, cuda.sources(cuda.INDEXER))'
for n in "${threads[@]}"; do
    [[ -e $(library "$n") ]] || begin "build_$n" 90 python3 -c "$build" "$(library "$n")" "$n" "$arch"
done
building=("${jobs[@]}")
if ((${#peer[@]})); then
    for rows in 1 4 16 32; do
        begin "tilelang_$rows" 80 python3 overlay/benchmarks/mhc.py --compile --rows "$rows"
    done
fi
begin mhc_compare 80 python3 tests/gpu/mhc_sweep.py "$OUT" 75 --compare
for names in "1 x 1, 16K" "1 x 1, 128K" "1 x 1, 600K" "1 x 4, 128K" "1 x 4, 600K" "4 x 4" "8 x 1" "1 x 6"; do
    begin "compile_${names//[ ,]/}" 80 env SPARK_INDEXER_LIBRARY=none \
        python3 overlay/benchmarks/indexer.py --compile "$names"
done
wait "${building[@]}"
echo "libraries after $((SECONDS - began)) s"
tests=(python3 -m pytest -q -m gpu -p no:cacheprovider)
begin numerics_inserts 80 "${tests[@]}" tests/gpu/test_insert_kernels.py
for n in "${threads[@]}"; do
    begin "numerics_$n" 80 env "SPARK_INDEXER_LIBRARY=$(library "$n")" "${tests[@]}" tests/gpu/test_indexer_kernels.py
done
begin rest_indexer_compile 60 env "SPARK_INDEXER_LIBRARY=$(library 512)" \
    python3 tests/gpu/rest_sweep.py indexer "$OUT" compile --seconds 50
wait "${jobs[@]}"
echo "numerics after $((SECONDS - began)) s"
for n in inserts "${threads[@]}"; do echo "numerics_$n: $(tail -n 1 "$OUT/numerics_$n.log")"; done
part rest_inserts 35 python3 tests/gpu/rest_sweep.py inserts "$OUT"
part mhc_sweep 30 python3 tests/gpu/mhc_sweep.py "$OUT" 28
part mhc 20 python3 overlay/benchmarks/mhc.py "${peer[@]}" --quick --rows 1 4 16 32 \
    --commit "${COMMIT:-unknown}" --json "$OUT/mhc.json"
stock=()
((${#peer[@]})) && stock=(--stock)
for n in 512 256 1024; do
    part "rest_indexer_$n" 20 env "SPARK_INDEXER_LIBRARY=$(library "$n")" \
        python3 tests/gpu/rest_sweep.py indexer "$OUT" "$n" --seconds 16 "${stock[@]}"
    stock=()
done
part inserts 25 python3 overlay/benchmarks/inserts.py "${peer[@]}" --quick \
    --commit "${COMMIT:-unknown}" --json "$OUT/inserts.json"
tail -n 30 "$OUT/rest_inserts.log" | cut -c1-160
for n in "${threads[@]}"; do echo "== $n threads"; cut -c1-170 "$OUT/rest_indexer_$n.log" | grep us; done
tail -n 12 "$OUT/mhc_sweep.log" | cut -c1-400
grep -h '"us"' "$OUT/mhc.log" "$OUT/inserts.log" | cut -c1-170
