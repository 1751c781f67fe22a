#!/usr/bin/env bash
# quiet: variants of the indexer's library, mHC's parts, inserts and mHC beside vLLM's
set -uo pipefail
cd -- "$(dirname -- "$0")/../.."
OUT=${OUT:-$(mktemp -d)}; LIMIT=${LIMIT:-140}; began=$SECONDS
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/overlay:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} TRITON_CACHE_DIR=/tmp/k9_triton
part() { local n=$1 m=$2 l=$((LIMIT - (SECONDS - began))); shift 2; ((l > 6)) || return; timeout -k 5 $((l < m ? l : m)) "$@" >"$OUT/$n.log" 2>&1; echo "$n: $? after $((SECONDS - began)) s"; }
part try 75 python3 tests/gpu/k9_try.py "$OUT" 62
part mhc_try 25 python3 tests/gpu/k9_mhc_try.py "$OUT" 22
peer=; if python3 -c 'import vllm' >/dev/null 2>&1; then peer=--peer; fi
part inserts 30 python3 overlay/benchmarks/inserts.py $peer --quick --rows 1 4 32 256 2048 --commit "${COMMIT:-unknown}" --json "$OUT/inserts.json"
part mhc 45 python3 overlay/benchmarks/mhc.py $peer --quick --rows 1 4 16 32 --commit "${COMMIT:-unknown}" --json "$OUT/mhc.json"
grep -A40 '^shape kind' "$OUT/try.log" | cut -c1-170 || tail -5 "$OUT/try.log"
cat "$OUT/mhc_try.log" | tail -6
grep -h "us" "$OUT/inserts.log" "$OUT/mhc.log" | grep -v TileLang | cut -c1-150 | tail -30
