/* Between the interface and the kernels' translation units. */
#pragma once

#include <cstdint>

#include "../common/launch.hpp"

namespace exl3 {

struct DenseLaunch;
struct ExpertsLaunch;

/* nb: 1 (passes of 8 rows) or 2 (16). `bytes` of dynamic shared memory. */
cudaError_t launch_dense(const DenseLaunch &p, int nb, int ctas, int bytes, bool early, cudaStream_t stream);
cudaError_t launch_experts_a(const ExpertsLaunch &p, int bytes, bool early, cudaStream_t stream);
cudaError_t launch_experts_b(const ExpertsLaunch &p, int bytes, bool early, cudaStream_t stream);
cudaError_t launch_decode(const void *trellis, int in, int out, int k2, int codebook, void *weights,
                          cudaStream_t stream);

/* Static shared memory of a kernel (the lists of rows), at most; and what is left of the 99 KB that a
 * CTA may have on sm_86 and sm_121. */
constexpr int STATIC_SHARED = 1072;
constexpr int MOST_SHARED = 99 * 1024 - STATIC_SHARED;

/* More than 48 KB must be asked for: always the same, so that no launch takes from another (one in a
 * graph that is not instantiated yet, say) what it was made with. */
template <typename Kernel, typename Launch>
cudaError_t launch_warps(Kernel kernel, const Launch &p, dim3 grid, int bytes, bool early, cudaStream_t stream) {
    if (bytes + STATIC_SHARED > 48 * 1024)
        if (const cudaError_t error = call::allow_shared(kernel, MOST_SHARED)) return error;
    return call::launch_early(kernel, grid, 32 * p.warps, bytes, early, stream, p);
}

} // namespace exl3
