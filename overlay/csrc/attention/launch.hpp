/* Between the interface and the kernels' translation units. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace attention {

struct Source {
    const uint8_t *cache;
    int64_t stride;
    const int32_t *slots;
    int64_t slots_row;
    const int32_t *lengths;
    int32_t page, width, shift; /* shift: page is 1 << shift, or -1 */
};

struct Launch {
    const __nv_bfloat16 *q;
    int64_t q_token, q_head;
    __nv_bfloat16 *out;
    int64_t out_token, out_head;
    const float *sink;
    float *partial, *peaks;
    const void *cos_sin;
    int64_t cos_sin_row;
    const void *positions;
    Source source[2];
    int32_t tokens, heads, cos_sin_float, positions_wide, splits;
    float scale; /* of logits, in powers of two */
};

/* `wide`: 32 heads a CTA instead of 16. */
int attend_shared(int keys, bool wide);
cudaError_t launch_attend(const Launch &p, int keys, bool wide, cudaStream_t stream);
/* Whole tokens, tiles of 64. */
int many_shared();
cudaError_t launch_many(const Launch &p, cudaStream_t stream);
cudaError_t launch_reduce(const Launch &p, bool early, cudaStream_t stream);

} // namespace attention
