#include "dense.cuh"
#include "launch.hpp"

namespace exl3 {

/* May start while what comes before still ends, where the chip can: see dense_kernel. */
cudaError_t launch_dense(const DenseLaunch &p, int nb, int ctas, int bytes, bool early, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(p.passes), static_cast<unsigned>(ctas));
    return nb == 1 ? launch_warps(dense_kernel<1>, p, grid, bytes, early, stream)
                   : launch_warps(dense_kernel<2>, p, grid, bytes, early, stream);
}

} // namespace exl3
