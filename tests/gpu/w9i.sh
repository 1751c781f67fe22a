#!/usr/bin/env bash
# The indexer's kernels on the GPU at hand: numerics, the benchmark (beside vLLM's own where vLLM is
# installed), then which launch shapes are fastest.
#   OUT=folder [LIMIT=90] [COMMIT=id] bash tests/gpu/w9i.sh
# Needs torch, Triton and pytest.
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
bench=overlay/benchmarks/indexer.py
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
tests="python3 -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_indexer_kernels.py"
jobs=()
begin() { timeout 40 "${@:2}" >"$OUT/$1.log" 2>&1 & jobs+=($!); }
begin choice $tests -k "test_choice and not 2048"
begin prefill $tests -k "test_choice and 2048"
begin candidates $tests -k "test_candidates or decode or test_queries"
begin far $tests -k "test_far or test_blocks"
begin others $tests -k "not test_choice and not test_candidates and not test_far and not decode and not test_queries and not test_blocks"
begin warm_bench python3 $bench --commit "$commit" "1 x 4, 600K" "prefill 2048, 64K"
for n in 0 1 2 3 4 5; do
    begin "compile_$n" python3 $sweep --compile "$n/6"
done
wait "${jobs[@]}"
echo "numerics and compiling: $((SECONDS - end + LIMIT)) s"
timeout "$(left)" python3 $bench --commit "$commit" --seconds "$(($(left) - 6))" \
    --json "$OUT/indexer.json" >"$OUT/bench.log" 2>&1
timeout "$(left)" python3 $sweep --seconds "$(($(left) - 3))" --json "$OUT/sweep.json" >"$OUT/sweep.log" 2>&1
for name in choice prefill candidates far others; do
    echo "$name: $(tail -1 "$OUT/$name.log")"
done
grep -h "^E  " "$OUT"/{choice,prefill,candidates,far,others}.log | head -4
cut -c1-200 "$OUT/bench.log" | grep -v '^copy' | head -40
awk '{k = $1 substr($0, 9, 15)} k != last {print; last = k}' "$OUT/sweep.log" | tail -12
