/* Between the interface and the kernels' translation units. */
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace exl3 {

struct DenseLaunch;
struct ExpertsLaunch;

/* nb: 1 (passes of 8 rows) or 2 (16). `bytes` of dynamic shared memory. */
cudaError_t launch_dense(const DenseLaunch &p, int nb, int ctas, int bytes, cudaStream_t stream);
cudaError_t launch_experts_a(const ExpertsLaunch &p, int nb, int bytes, cudaStream_t stream);
cudaError_t launch_experts_b(const ExpertsLaunch &p, int nb, int bytes, bool early, cudaStream_t stream);
cudaError_t launch_decode(const void *trellis, int in, int out, int k2, int codebook, void *weights,
                          cudaStream_t stream);

/* More than 48 KB of dynamic shared memory is asked for once per kernel and device use; cheap. */
template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes) {
    if (bytes <= 40 * 1024) return cudaSuccess; /* static shared memory counts too */
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                                cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

} // namespace exl3
