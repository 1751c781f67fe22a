#include "experts.cuh"
#include "launch.hpp"

namespace exl3 {

/* May start while A still ends, where the chip can: it waits for A before it reads what A wrote. */
template <int NB>
static cudaError_t launch(const ExpertsLaunch &p, int bytes, bool early, cudaStream_t stream) {
    if (const cudaError_t error = allow_shared(experts_b_kernel<NB>, bytes)) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(p.groups, p.slots + p.shared);
    config.blockDim = dim3(32 * p.warps);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, experts_b_kernel<NB>, p);
}

cudaError_t launch_experts_b(const ExpertsLaunch &p, int nb, int bytes, bool early, cudaStream_t stream) {
    return nb == 1 ? launch<1>(p, bytes, early, stream) : launch<2>(p, bytes, early, stream);
}

} // namespace exl3
