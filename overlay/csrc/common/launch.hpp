/* Launches, and what they ask of the GPU. */
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>

namespace call {

/* Of the current GPU. */
inline cudaError_t attribute_of_gpu(cudaDeviceAttr which, int &value) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    return cudaDeviceGetAttribute(&value, which, device);
}

/* 9 of 9.0; 0 where CUDA does not say. */
inline int major_capability() {
    int major = 0;
    return attribute_of_gpu(cudaDevAttrComputeCapabilityMajor, major) == cudaSuccess ? major : 0;
}

/* Whether launches start before what is in front of them has ended (spark_overlay/early.py has the same
 * rule). Measured on sm_90; sm_100 is its like. On sm_120 others saw captures of graphs fail with it: not
 * there, unless SPARK_EARLY_STARTS=1 asks for it; 0 forbids it. Read once. */
inline bool starts_early() {
    static const char *const asked = std::getenv("SPARK_EARLY_STARTS");
    const int major = major_capability();
    return asked ? major >= 9 && asked[0] == '1' : major == 9 || major == 10;
}

/* Of a CTA, with what it has of its own. */
inline cudaError_t most_shared(int &bytes) { return attribute_of_gpu(cudaDevAttrMaxSharedMemoryPerBlockOptin, bytes); }

/* More than 48 KB of dynamic shared memory must be asked for. It is the function's, not a launch's: what a
 * graph holds was captured with as much as it asks for, so a function asks for the same each time. */
template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes) {
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                bytes);
}

/* `early`: the launch may start before the one in front of it has ended (programmatic dependent launch);
 * the kernel waits for that one itself. `bytes` of dynamic shared memory. */
template <typename Kernel, typename... Args>
cudaError_t launch_early(Kernel kernel, dim3 grid, int threads, int bytes, bool early, cudaStream_t stream,
                         const Args &...args) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

} // namespace call
