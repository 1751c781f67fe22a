#!/usr/bin/env bash
# quiet, no vLLM: mHC's library, variants of the indexer's, a flake
set -uo pipefail
cd -- "$(dirname -- "$0")/../.."
OUT=${OUT:-$(mktemp -d)}; LIMIT=${LIMIT:-60}; began=$SECONDS
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/overlay:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} TRITON_CACHE_DIR=/tmp/k9_triton
part() { local n=$1 m=$2 l=$((LIMIT - (SECONDS - began))); shift 2; ((l > 6)) || return; timeout -k 5 $((l < m ? l : m)) "$@" >"$OUT/$n.log" 2>&1; echo "$n: $? after $((SECONDS - began)) s"; }
part mhc_try 25 python3 tests/gpu/k9_mhc_try.py "$OUT" 20
part try 60 python3 tests/gpu/k9_try.py "$OUT" $((LIMIT - (SECONDS - began) - 18))
part ins 14 python3 tests/gpu/k9_ins_try.py
cat "$OUT/ins.log" 2>/dev/null | tail -n 10
grep -v "^off" "$OUT/mhc_try.log" | tail -n 8 | cut -c1-400
tail -n 26 "$OUT/try.log" | cut -c1-260
