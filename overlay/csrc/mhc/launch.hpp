/* Between the interface and the kernel's translation unit. */
#pragma once

#include <cuda_runtime.h>

#include "api.h"

namespace mhc {

/* `early`: may start while the launch before it ends; it waits for that one itself. */
cudaError_t launch(const mhc_args &args, bool early, cudaStream_t stream);

} // namespace mhc
