#!/usr/bin/env bash
# The indexer's kernels on the GPU at hand, CUDA and Triton: right or not. No figure of it counts, so it
# may run beside other work. --sanitize: a few shapes under compute-sanitizer (memcheck, racecheck) instead.
#   OUT=folder [LIMIT=100] bash tests/gpu/indexer_kernels.sh [--sanitize]
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
OUT=${OUT:-$(mktemp -d)}
LIMIT=${LIMIT:-100}
export PYTHONPATH=$PWD/overlay:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/indexer_triton}
. tests/gpu/libraries.sh
tests=(python3 -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_indexer_kernels.py)
jobs=()
begin() { timeout "$LIMIT" "${@:2}" >"$OUT/$1.log" 2>&1 & jobs+=($!); }
names=(triton cuda)
if [[ ${1:-} == --sanitize ]]; then
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # torch's allocator would hide what lies beyond a tensor
    names=(memcheck racecheck)
    libraries indexer || exit
    for tool in "${names[@]}"; do
        begin "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
            --kernel-name-exclude kernel_substring=at:: "${tests[@]}" -k "short or page or equal or 1-64-0-6 or (rows_at_once and 8)"
    done
else
    begin triton env SPARK_INDEXER_LIBRARY=none "${tests[@]}" -n 4
    libraries indexer || exit
    begin cuda "${tests[@]}"
fi
status=0
for i in "${!jobs[@]}"; do
    wait "${jobs[i]}" || status=$?
    echo "${names[i]}: $(tail -n 1 "$OUT/${names[i]}.log")"
    grep -hE "^E  |=========" "$OUT/${names[i]}.log" | head -n 3 | cut -c1-200 || true
done
exit "$status"
