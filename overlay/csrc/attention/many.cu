/* The launch for many tokens. */
#include "../common/launch.hpp"
#include "many.cuh"

namespace attention {

static_assert(sizeof(Many) <= 227 * 1024); /* of SM90 and SM100 */

int many_shared() { return sizeof(Many); }

cudaError_t launch_many(const Launch &p, cudaStream_t stream) {
    constexpr int bytes = static_cast<int>(sizeof(Many));
    if (const cudaError_t error = call::allow_shared(attend_many, bytes)) return error;
    int places = 0;
    if (const cudaError_t error = call::attribute_of_gpu(cudaDevAttrMultiProcessorCount, places)) return error;
    const int units = p.tokens * ((p.heads + Many::HEADS - 1) / Many::HEADS);
    attend_many<<<units < places ? units : places, Many::THREADS, bytes, stream>>>(p);
    return cudaGetLastError();
}

} // namespace attention
