#!/usr/bin/env bash
# The indexer's benchmark on the GPU at hand, beside vLLM's own where vLLM is installed; with time left,
# which launch shapes of Triton's are fastest (SWEEP=1). Nothing else may use the GPU.
#   OUT=folder [LIMIT=75] [COMMIT=id] bash tests/gpu/indexer.sh
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
OUT=${OUT:-$(mktemp -d)}
LIMIT=${LIMIT:-75}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/overlay:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/indexer_triton}
. tests/gpu/libraries.sh
end=$((SECONDS + LIMIT))
left() { echo $((end - SECONDS > 3 ? end - SECONDS : 3)); }
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
libraries indexer || exit
compiling=()
for names in "1 x 1, 16K" "1 x 1, 128K" "1 x 1, 600K" "1 x 4, 16K" "1 x 4, 128K" "1 x 4, 600K" "4 x 4" "8 x 1" "1 x 6" prefill; do
    timeout "$(left)" python3 overlay/benchmarks/indexer.py --compile "$names" >>"$OUT/compile.log" 2>&1 &
    compiling+=($!)
done
wait "${compiling[@]}"
echo "compiled after $((LIMIT - end + SECONDS)) s"
timeout "$(left)" python3 overlay/benchmarks/indexer.py --commit "$commit" \
    --seconds "$(($(left) - 12))" --json "$OUT/indexer.json" >"$OUT/bench.log" 2>&1
echo "indexer: $?"
if [[ -n ${SWEEP:-} ]]; then
    timeout "$(left)" python3 overlay/benchmarks/indexer_sweep.py choice dense limited \
        --seconds "$(($(left) - 3))" --json "$OUT/sweep.json" >"$OUT/sweep.log" 2>&1
    awk '{k = $1 substr($0, 9, 15)} k != last {print; last = k}' "$OUT/sweep.log" | tail -n 12
fi
grep -v '^copy' "$OUT/bench.log" | sed -E 's/"us_(least|most)": [0-9.]+, //g; s/"//g' | cut -c1-170
