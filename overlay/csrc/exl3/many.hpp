/* Between the interface of the kernels for many rows (many.cu) and their translation units. */
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace exl3 {

struct GroupedLaunch;
struct RouteLaunch;

cudaError_t launch_rotate(const void *x, int64_t stride, const void *suh, int rows, int blocks, void *out,
                          cudaStream_t stream);
cudaError_t launch_finish(const void *sums, const void *svh, int rows, int chunks, void *y, int64_t stride,
                          int fp32, cudaStream_t stream);
cudaError_t launch_reconstruct(const void *trellis, int width, int blocks, int chunks, int k2, int codebook,
                               void *weights, cudaStream_t stream);

cudaError_t launch_route(const RouteLaunch &p, cudaStream_t stream);
cudaError_t launch_gather(const RouteLaunch &p, int first, int groups, cudaStream_t stream);
cudaError_t launch_combine(const RouteLaunch &p, const float *out, int chunk, int chunks, cudaStream_t stream);

/* A way to run the products of all experts: groups of 8 rows of a CTA's item at most, shared memory for
 * rates up to k2; 0 groups of a variant that is not there. */
struct Variant {
    int most, shared;
};
Variant grouped_variant(int variant, int k2, bool down);
cudaError_t launch_grouped(const GroupedLaunch &p, bool down, int variant, int items, int k2, cudaStream_t stream);

/* Each in a file of its own. */
template <int V, bool DOWN>
cudaError_t launch_variant(const GroupedLaunch &p, int items, int k2, cudaStream_t stream);
template <>
cudaError_t launch_variant<0, false>(const GroupedLaunch &p, int items, int k2, cudaStream_t stream);
template <>
cudaError_t launch_variant<0, true>(const GroupedLaunch &p, int items, int k2, cudaStream_t stream);
template <>
cudaError_t launch_variant<1, false>(const GroupedLaunch &p, int items, int k2, cudaStream_t stream);
template <>
cudaError_t launch_variant<1, true>(const GroupedLaunch &p, int items, int k2, cudaStream_t stream);
template <>
cudaError_t launch_variant<2, false>(const GroupedLaunch &p, int items, int k2, cudaStream_t stream);
template <>
cudaError_t launch_variant<2, true>(const GroupedLaunch &p, int items, int k2, cudaStream_t stream);
#ifdef EXL3_SWEEP
template <>
cudaError_t launch_variant<3, false>(const GroupedLaunch &p, int items, int k2, cudaStream_t stream);
template <>
cudaError_t launch_variant<3, true>(const GroupedLaunch &p, int items, int k2, cudaStream_t stream);
#endif

} // namespace exl3
