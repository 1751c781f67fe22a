#!/usr/bin/env bash
# Builds attention's library for the GPU at hand and tries its kernels; needs nvcc, torch and pytest.
#   bash tests/gpu/attention.sh [--sanitize] [pytest arguments]
# --sanitize: a few shapes under compute-sanitizer (memcheck, then racecheck) instead.
set -euo pipefail
cd -- "$(dirname -- "$0")/../.."
library=${SPARK_ATTENTION_LIBRARY:-$PWD/overlay/build/attention/_cuda.so}
if [[ ! -e $library ]]; then
    python3 overlay/csrc/build_cuda.py --attention "$library"
fi
export SPARK_ATTENTION_LIBRARY=$library
if [[ ${1:-} == --sanitize ]]; then
    # torch's allocator would hide what lies beyond a tensor.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck; do
        compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name-exclude kernel_substring=at:: \
            python3 -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_attention_kernels.py \
            -k "(cuda and (sinks or turned)) or (any_number and 265-40)"
    done
    exit
fi
exec python3 -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_attention_kernels.py \
    tests/gpu/test_attention_records.py "$@"
