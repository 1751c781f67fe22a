/* Which of the grouped kernels a launch table's number means; each has files of its own. */
#include "grouped.cuh"
#include "many.hpp"

namespace exl3 {

template <int V>
static Variant variant_of(int k2, bool down) {
    using C = typename Pick<V>::C;
    return Variant{C::MOST, C::shared_bytes(k2, down)};
}

Variant grouped_variant(int variant, int k2, bool down) {
    switch (variant) {
    case 0: return variant_of<0>(k2, down);
    case 1: return variant_of<1>(k2, down);
    case 2: return variant_of<2>(k2, down);
#ifdef EXL3_SWEEP
    case 3: return variant_of<3>(k2, down);
#endif
    default: return Variant{0, 0};
    }
}

template <int V>
static cudaError_t launch(const GroupedLaunch &p, bool down, int items, int k2, cudaStream_t stream) {
    return down ? launch_variant<V, true>(p, items, k2, stream) : launch_variant<V, false>(p, items, k2, stream);
}

cudaError_t launch_grouped(const GroupedLaunch &p, bool down, int variant, int items, int k2, cudaStream_t stream) {
    switch (variant) {
    case 0: return launch<0>(p, down, items, k2, stream);
    case 1: return launch<1>(p, down, items, k2, stream);
    case 2: return launch<2>(p, down, items, k2, stream);
#ifdef EXL3_SWEEP
    case 3: return launch<3>(p, down, items, k2, stream);
#endif
    default: return cudaErrorInvalidValue;
    }
}

} // namespace exl3
