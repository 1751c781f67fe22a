#!/usr/bin/env bash
# mHC and cache inserts on a GPU: geometries right and timed, beside vLLM's TileLang where vLLM is.
#   OUT=DIR [LIMIT=150] [COMMIT=ID] bash tests/gpu/w9m.sh
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
LIMIT=${LIMIT:-150} began=$SECONDS
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/w9m_triton}
left() { echo $((LIMIT - (SECONDS - began))); }
peer=
if python3 -c 'import vllm' >/dev/null 2>&1; then peer=--peer; fi
# Compiles TileLang's kernels while the sweep compiles ours; times nothing before the sweep is done.
timeout -k 5 "$LIMIT" python3 tests/gpu/mhc_best.py "$OUT/mhc_sweep.json" \
    ${peer:+--after "$OUT/mhc_go"} $peer --quick --commit "${COMMIT:-unknown}" \
    --json "$OUT/mhc.json" >"$OUT/mhc.log" 2>&1 &
bench=$!
[[ -n $peer ]] || { kill "$bench"; bench=; }
timeout -k 5 70 python3 tests/gpu/mhc_sweep.py "$OUT" 66 >"$OUT/mhc_sweep.log" 2>&1
echo "mHC sweep: $?, after $((SECONDS - began)) s"
touch "$OUT/mhc_go"
if [[ -n $bench ]]; then
    wait "$bench"
    echo "mHC benchmark: $?, after $((SECONDS - began)) s"
fi
limit=$(left)
if ((limit > 15)); then
    timeout -k 5 "$limit" python3 -m pytest -q -m gpu -p no:cacheprovider --maxfail=12 \
        tests/gpu/test_insert_kernels.py tests/gpu/test_mhc_kernels.py >"$OUT/kernels.log" 2>&1
    echo "kernels: $?, after $((SECONDS - began)) s"
fi
tail -n 11 "$OUT/mhc_sweep.log" | cut -c1-200
grep -v '^ ' "$OUT/mhc.log" | tail -n 8 | cut -c1-250
tail -n 4 "$OUT/kernels.log" | cut -c1-200
