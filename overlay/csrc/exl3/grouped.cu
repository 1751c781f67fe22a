/* Which of the grouped kernels a launch table's number means; each has a file of its own. */
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
#ifdef EXL3_SWEEP
    case 2: return variant_of<2>(k2, down);
    case 3: return variant_of<3>(k2, down);
    case 4: return variant_of<4>(k2, down);
    case 5: return variant_of<5>(k2, down);
    case 6: return variant_of<6>(k2, down);
    case 7: return variant_of<7>(k2, down);
#endif
    default: return Variant{0, 0};
    }
}

cudaError_t launch_grouped(const GroupedLaunch &p, int variant, int items, int k2, cudaStream_t stream) {
    switch (variant) {
    case 0: return launch_variant<0>(p, items, k2, stream);
    case 1: return launch_variant<1>(p, items, k2, stream);
#ifdef EXL3_SWEEP
    case 2: return launch_variant<2>(p, items, k2, stream);
    case 3: return launch_variant<3>(p, items, k2, stream);
    case 4: return launch_variant<4>(p, items, k2, stream);
    case 5: return launch_variant<5>(p, items, k2, stream);
    case 6: return launch_variant<6>(p, items, k2, stream);
    case 7: return launch_variant<7>(p, items, k2, stream);
#endif
    default: return cudaErrorInvalidValue;
    }
}

} // namespace exl3
