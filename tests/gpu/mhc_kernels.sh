#!/usr/bin/env bash
# mHC's kernels (by the CUDA library, by Triton alone) and the cache inserts on a GPU: right or not. No figure
# of it counts, so it may run beside other work. --sanitize: the library's under compute-sanitizer instead.
#   OUT=DIR [LIMIT=120] bash tests/gpu/mhc_kernels.sh [--sanitize]
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}"
. tests/gpu/libraries.sh
tests=(python3 -m pytest -q -m gpu -p no:cacheprovider --maxfail=12)
begin() { timeout "${LIMIT:-120}" "${@:2}" >"$OUT/$1.log" 2>&1 & jobs+=($!); }
jobs=()
libraries mhc || exit
if [[ ${1:-} == --sanitize ]]; then
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # torch's allocator would hide what lies beyond a tensor
    names=(memcheck racecheck)
    for tool in "${names[@]}"; do
        begin "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
            --kernel-name-exclude kernel_substring=at:: "${tests[@]}" tests/gpu/test_mhc_kernels.py -k "librarys and (41 or 5-)"
    done
else
    names=(mhc_cuda mhc_triton insert_kernels)
    begin mhc_cuda "${tests[@]}" -n 3 tests/gpu/test_mhc_kernels.py
    begin mhc_triton env SPARK_MHC_LIBRARY=none "${tests[@]}" -n 3 tests/gpu/test_mhc_kernels.py
    begin insert_kernels "${tests[@]}" -n 2 tests/gpu/test_insert_kernels.py
fi
status=0
for i in "${!jobs[@]}"; do
    wait "${jobs[i]}" || status=$?
    echo "${names[i]}: $(tail -n 1 "$OUT/${names[i]}.log")"
    grep -hE "^E  |=========" "$OUT/${names[i]}.log" | head -n 3 | cut -c1-200 || true
done
exit "$status"
