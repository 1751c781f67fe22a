/* The launch for many tokens. */
#include "many.cuh"

namespace attention {

static_assert(sizeof(Many) <= 227 * 1024); /* of SM90 and SM100 */

int many_shared() { return sizeof(Many); }

cudaError_t launch_many(const Launch &p, cudaStream_t stream) {
    constexpr int bytes = static_cast<int>(sizeof(Many));
    cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void *>(attend_many),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    int device = 0, places = 0;
    if ((error = cudaGetDevice(&device)) != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&places, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    const int units = p.tokens * ((p.heads + Many::HEADS - 1) / Many::HEADS);
    attend_many<<<units < places ? units : places, Many::THREADS, bytes, stream>>>(p);
    return cudaGetLastError();
}

} // namespace attention
