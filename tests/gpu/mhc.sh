#!/usr/bin/env bash
# mHC and the cache inserts timed on a GPU, beside vLLM's where vLLM is. Nothing else may use the GPU.
#   OUT=DIR [LIMIT=180] [COMMIT=ID] bash tests/gpu/mhc.sh
# Exit status: 0 where both ran to their end.
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
LIMIT=${LIMIT:-180} status=0
export PYTHONUNBUFFERED=1
. tests/gpu/libraries.sh
libraries mhc || exit
began=$SECONDS
left() { echo $((LIMIT - (SECONDS - began) > 3 ? LIMIT - (SECONDS - began) : 3)); }
part() { # NAME MOST COMMAND…: with what is left of LIMIT, MOST at most
    local name=$1 most=$2 left rc
    left=$(left)
    shift 2
    timeout -k 5 $((left < most ? left : most)) "$@" >"$OUT/$name.log" 2>&1
    rc=$?
    ((rc == 0)) || status=$rc
    echo "$name: $rc, after $((SECONDS - began)) s"
}
peer=() compiling=()
if python3 -c 'import vllm' >/dev/null 2>&1; then
    peer=(--peer)
    # TileLang compiles for a quarter of a minute a kernel: all at once, and nothing is timed meanwhile,
    # for it takes every core there is.
    for rows in 1 16 17 32 33 64 256 2048; do
        timeout "$(left)" python3 overlay/benchmarks/mhc.py --compile --rows "$rows" \
            >"$OUT/compile_$rows.log" 2>&1 &
        compiling+=($!)
    done
    wait "${compiling[@]}"
    echo "compiled after $((SECONDS - began)) s"
fi
part mhc 110 python3 overlay/benchmarks/mhc.py "${peer[@]}" --quick \
    --commit "${COMMIT:-unknown}" --json "$OUT/mhc.json"
part inserts 40 python3 overlay/benchmarks/inserts.py "${peer[@]}" --quick \
    --commit "${COMMIT:-unknown}" --json "$OUT/inserts.json"
for name in mhc inserts; do
    grep -h '"us"' "$OUT/$name.log" | sed -E 's/"//g; s/launches.*off_float32: [^,]*, //' | cut -c1-120 | tail -n 26
done
exit "$status"
