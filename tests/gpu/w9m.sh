#!/usr/bin/env bash
# mHC's geometries on a GPU, right and timed. OUT=DIR [LIMIT=90] bash tests/gpu/w9m.sh
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
LIMIT=${LIMIT:-90}
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/w9m_triton}
timeout -k 5 "$LIMIT" python3 tests/gpu/mhc_sweep.py "$OUT" "$((LIMIT - 6))" >"$OUT/mhc_sweep.log" 2>&1
echo "mHC sweep: $?"
tail -n 22 "$OUT/mhc_sweep.log" | cut -c1-330
