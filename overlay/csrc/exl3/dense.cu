#include "dense.cuh"
#include "launch.hpp"

namespace exl3 {

template <int NB>
static cudaError_t launch(const DenseLaunch &p, int ctas, int bytes, cudaStream_t stream) {
    if (const cudaError_t error = allow_shared(dense_kernel<NB>, bytes)) return error;
    const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(p.passes));
    dense_kernel<NB><<<grid, 32 * p.warps, bytes, stream>>>(p);
    return cudaGetLastError();
}

cudaError_t launch_dense(const DenseLaunch &p, int nb, int ctas, int bytes, cudaStream_t stream) {
    return nb == 1 ? launch<1>(p, ctas, bytes, stream) : launch<2>(p, ctas, bytes, stream);
}

} // namespace exl3
