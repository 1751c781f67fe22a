#include "experts.cuh"
#include "launch.hpp"

namespace exl3 {

template <int NB>
static cudaError_t launch(const ExpertsLaunch &p, int bytes, cudaStream_t stream) {
    if (const cudaError_t error = allow_shared(experts_a_kernel<NB>, bytes)) return error;
    const dim3 grid(2 * p.groups, p.splits, p.slots + p.shared);
    experts_a_kernel<NB><<<grid, 32 * p.warps, bytes, stream>>>(p);
    return cudaGetLastError();
}

cudaError_t launch_experts_a(const ExpertsLaunch &p, int nb, int bytes, cudaStream_t stream) {
    return nb == 1 ? launch<1>(p, bytes, stream) : launch<2>(p, bytes, stream);
}

} // namespace exl3
