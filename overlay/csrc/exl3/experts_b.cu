#include "experts.cuh"
#include "launch.hpp"

namespace exl3 {

template <int NB>
static cudaError_t launch(const ExpertsLaunch &p, int bytes, cudaStream_t stream) {
    if (const cudaError_t error = allow_shared(experts_b_kernel<NB>, bytes)) return error;
    const int ctas = (p.slots + p.shared) * p.groups;
    experts_b_kernel<NB><<<ctas, 32 * p.warps, bytes, stream>>>(p);
    return cudaGetLastError();
}

cudaError_t launch_experts_b(const ExpertsLaunch &p, int nb, int bytes, cudaStream_t stream) {
    return nb == 1 ? launch<1>(p, bytes, stream) : launch<2>(p, bytes, stream);
}

} // namespace exl3
