#include "grouped.cuh"
#include "many.hpp"

namespace exl3 {

template <>
cudaError_t launch_variant<1, true>(const GroupedLaunch &p, int items, int k2, cudaStream_t stream) {
    return launch_config<Pick<1>::C, true>(p, items, k2, stream);
}

} // namespace exl3
