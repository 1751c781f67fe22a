/* Before and after a product with decoded weights: rotated inputs, rotated outputs. Both move each
 * value once. */
#include "hadamard.cuh"
#include "many.hpp"

namespace exl3 {

/* A warp 16 rows of one k-block: grid [groups of 4 k-blocks][groups of 32 rows], 8 warps. No shared
 * memory. Within every 32 inputs the order is that of `reconstruct`. */
__global__ void __launch_bounds__(256) rotate_kernel(const __nv_bfloat16 *x, int64_t stride, const __half *suh,
                                                     int rows, int blocks, uint4 *out) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, q = lane & 3;
    const int block = 4 * static_cast<int>(blockIdx.x) + (warp & 3);
    const int first = 32 * static_cast<int>(blockIdx.y) + 16 * (warp >> 2) + (lane >> 2);
    if (block >= blocks) return;
    const Hadamard16 had(lane);
    uint32_t a[8][4];
    uint2 in[2][8];
#pragma unroll
    for (int nb = 0; nb < 2; ++nb) {
        const int row = first + 8 * nb;
        const uint2 *from = reinterpret_cast<const uint2 *>(x + row * stride + 128 * block + 4 * q);
#pragma unroll
        for (int hi = 0; hi < 8; ++hi) in[nb][hi] = row < rows ? __ldcs(from + 4 * hi) : make_uint2(0u, 0u);
    }
#pragma unroll
    for (int hi = 0; hi < 8; ++hi) {
        const uint2 scale = __ldg(reinterpret_cast<const uint2 *>(suh + 128 * block + 16 * hi + 4 * q));
        scale_four(in[0][hi], scale, a[hi][0], a[hi][2]);
        scale_four(in[1][hi], scale, a[hi][1], a[hi][3]);
    }
    uint32_t b[8][2][2];
    rotate_operands(a, had, b);
#pragma unroll
    for (int nb = 0; nb < 2; ++nb) {
        const int row = first + 8 * nb;
        if (row >= rows) continue;
        uint4 *to = out + (static_cast<int64_t>(row) * blocks + block) * 16 + q;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            to[4 * pair] = make_uint4(b[2 * pair][nb][0], b[2 * pair][nb][1], b[2 * pair + 1][nb][0],
                                      b[2 * pair + 1][nb][1]);
    }
}

/* A warp 4 rows of one chunk: grid [chunks][groups of 32 rows], 8 warps. No shared memory. */
__global__ void __launch_bounds__(256) finish_kernel(const float *sums, const __half *svh, int rows, int chunks,
                                                     void *y, int64_t stride, int fp32) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, chunk = static_cast<int>(blockIdx.x);
    const int first = 32 * static_cast<int>(blockIdx.y) + 4 * warp;
    float4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        v[i] = first + i < rows
                   ? __ldcs(reinterpret_cast<const float4 *>(sums) + (static_cast<int64_t>(first + i) * chunks + chunk) * 32 + lane)
                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float4 w = finish(v[i], svh + CHUNK * chunk, lane);
        if (first + i < rows) store_four(y, (first + i) * stride + CHUNK * chunk + 4 * lane, fp32, w);
    }
}

cudaError_t launch_rotate(const void *x, int64_t stride, const void *suh, int rows, int blocks, void *out,
                          cudaStream_t stream) {
    const dim3 grid((blocks + 3) / 4, (rows + 31) / 32);
    rotate_kernel<<<grid, 256, 0, stream>>>(static_cast<const __nv_bfloat16 *>(x), stride,
                                            static_cast<const __half *>(suh), rows, blocks, static_cast<uint4 *>(out));
    return cudaGetLastError();
}

cudaError_t launch_finish(const void *sums, const void *svh, int rows, int chunks, void *y, int64_t stride,
                          int fp32, cudaStream_t stream) {
    const dim3 grid(chunks, (rows + 31) / 32);
    finish_kernel<<<grid, 256, 0, stream>>>(static_cast<const float *>(sums), static_cast<const __half *>(svh),
                                            rows, chunks, y, stride, fp32);
    return cudaGetLastError();
}

} // namespace exl3
