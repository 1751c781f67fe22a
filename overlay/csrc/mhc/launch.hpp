/* Between the interface and the kernel's translation unit. */
#pragma once

#include <cuda_runtime.h>

#include "api.h"

namespace mhc {

cudaError_t launch_one(const mhc_args &args, cudaStream_t stream);

} // namespace mhc
