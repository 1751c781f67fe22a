/* Between the interface of the kernels for many rows (many.cu) and their translation units. */
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace exl3 {

/* Matrices of one launch of reconstruct, all of one rate and codebook. */
constexpr int MOST_DECODED = 8;

struct Decoded {
    const char *trellis; /* of the first output wanted */
    uint4 *weights;
    int32_t width;  /* tiles of the whole matrix along its outputs */
    int32_t blocks; /* k-blocks */
    int32_t chunks; /* of outputs wanted */
    int32_t first;  /* CTA */
};

struct ReconstructLaunch {
    Decoded of[MOST_DECODED];
    int32_t count, k2, codebook;
};

struct GroupedLaunch;
struct RouteLaunch;

cudaError_t launch_rotate(const void *x, int64_t stride, const void *suh, int rows, int blocks, void *out,
                          cudaStream_t stream);
cudaError_t launch_finish(const void *sums, const void *svh, int rows, int chunks, void *y, int64_t stride,
                          int fp32, cudaStream_t stream);
/* `first` of each is the launch's own to say. `early`: as launch_early's. */
cudaError_t launch_reconstruct(const ReconstructLaunch &p, bool early, cudaStream_t stream);

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

} // namespace exl3
