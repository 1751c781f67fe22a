#!/usr/bin/env bash
# The indexer's kernels on the GPU at hand: numerics, then which launch shapes are fastest.
#   OUT=folder LIMIT=90 bash tests/gpu/w9i.sh
# Needs torch, Triton and pytest; with vLLM to be had, the benchmark measures its kernels, too.
set -uo pipefail
cd -- "$(dirname -- "$0")/../.."
OUT=${OUT:-$(mktemp -d)}
LIMIT=${LIMIT:-90}
export PYTHONPATH=$PWD/overlay:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/w9i_triton}
end=$((SECONDS + LIMIT))
left() { echo $((end - SECONDS > 3 ? end - SECONDS : 3)); }

# Compiling is the host's work and most of the time: all at once, then the clock on an idle GPU.
sweep=overlay/benchmarks/indexer_sweep.py
for n in $(seq 0 9); do
    timeout 60 python3 $sweep --compile "$n/10" >"$OUT/compile_$n.log" 2>&1 &
done
tests="python3 -m pytest -q -x -m gpu -p no:cacheprovider tests/gpu/test_indexer_kernels.py"
timeout 60 $tests -k "test_choice and not 2048" >"$OUT/choice.log" 2>&1 &
timeout 60 $tests -k "test_choice and 2048" >"$OUT/prefill.log" 2>&1 &
timeout 60 $tests -k "test_candidates or test_far or decode" >"$OUT/candidates.log" 2>&1 &
timeout 60 $tests -k "not test_choice and not test_candidates and not test_far and not decode" \
    >"$OUT/others.log" 2>&1 &
wait
echo "numerics and compiling: $((SECONDS - end + LIMIT)) s"
timeout "$(left)" python3 $sweep --seconds "$(($(left) - 4))" --json "$OUT/sweep.json" >"$OUT/sweep.log" 2>&1
for name in choice prefill candidates others; do
    echo "$name: $(tail -1 "$OUT/$name.log")"
done
grep -h "^E  " "$OUT"/{choice,prefill,candidates,others}.log | head -5
awk '{k = $1 substr($0, 9, 15)} k != last {print; last = k}' "$OUT/sweep.log" | tail -17
