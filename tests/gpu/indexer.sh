#!/usr/bin/env bash
# The indexer's benchmark on the GPU at hand, beside vLLM's own where vLLM is installed; then which
# launch shapes are fastest. Nothing else may run; indexer_kernels.sh before it compiles all.
#   OUT=folder [LIMIT=45] [COMMIT=id] bash tests/gpu/indexer.sh
set -uo pipefail
cd -- "$(dirname -- "$0")/../.."
OUT=${OUT:-$(mktemp -d)}
LIMIT=${LIMIT:-45}
export PYTHONPATH=$PWD/overlay:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/indexer_triton}
end=$((SECONDS + LIMIT))
left() { echo $((end - SECONDS > 3 ? end - SECONDS : 3)); }
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
timeout "$(left)" python3 overlay/benchmarks/indexer.py --commit "$commit" \
    --seconds "$(($(left) - 12))" --json "$OUT/indexer.json" >"$OUT/bench.log" 2>&1
timeout "$(left)" python3 overlay/benchmarks/indexer_sweep.py choice dense limited \
    --seconds "$(($(left) - 3))" --json "$OUT/sweep.json" >"$OUT/sweep.log" 2>&1
grep -v '^copy' "$OUT/bench.log" | sed -E 's/"us_(least|most)": [0-9.]+, //g; s/"//g' | cut -c1-150
awk '{k = $1 substr($0, 9, 15)} k != last {print; last = k}' "$OUT/sweep.log" | tail -n 12
