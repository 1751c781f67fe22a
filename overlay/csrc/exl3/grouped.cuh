/* Products of many rows with the experts that they go to: each weight is decoded once for all rows of
 * an item, by the warp that multiplies with it, from trellis bits to tensor-core operands.
 *
 * A CTA takes an item (groups of 8 rows of one expert) and two chunks of 128 outputs: the same chunk
 * of gate and up (launch A), or two neighbours of down (launch B). Half of its warps serve a chunk
 * each, CT tiles of 16 outputs a warp; every warp goes through all inputs and all rows of the item, so
 * no sums are exchanged and a row's result does not depend on its place.
 *
 * Stages of KT k-tiles in shared memory: [warp][k-tile][tile] packed weights, and rotated rows as
 * operands B, [side][group][k-tile][lane] uint2; B's two chunks share one side's.
 */
#pragma once

#include "../common/launch.hpp"
#include "expert.cuh"
#include "multiply.cuh"

namespace exl3 {

__device__ __forceinline__ Matrix matrix_of(const GroupedLaunch &p, int which, int entry) {
    return matrix_at(reinterpret_cast<const longlong2 *>(p.table) + 2 * (which * p.entries + entry));
}

/* A row's chunk: sums of the tensor cores to outputs. `offset` is 0 for values as they are. */
__device__ __forceinline__ float4 row_outputs(const float *red, float scale, float offset, const __half *svh, int lane) {
    const float4 v = *reinterpret_cast<const float4 *>(red + 4 * lane);
    return finish(make_float4(fmaf(scale, v.x, offset), fmaf(scale, v.y, offset), fmaf(scale, v.z, offset),
                              fmaf(scale, v.w, offset)), svh, lane);
}

/* Rotated fp16 of a row's k-block, as operand B of its group; and their sum. */
__device__ __forceinline__ void put_row(const GroupedLaunch &p, int row, int block, float4 v, int lane) {
    v = hadamard(v, lane);
    const uint32_t a = pack_fp16(v.x, v.y), b = pack_fp16(v.z, v.w);
    const int m = lane & 3, upper = m >> 1;
    char *to = p.act + (static_cast<int64_t>(row >> 3) * p.out_chunks + block) * 2048 + (lane >> 2) * 256 +
               (4 * (row & 7) + 2 * (m & 1)) * 8 + 4 * upper;
    *reinterpret_cast<uint32_t *>(to) = a;
    *reinterpret_cast<uint32_t *>(to + 8) = b;
    const float2 x = __half22float2(*reinterpret_cast<const __half2 *>(&a));
    const float2 y = __half22float2(*reinterpret_cast<const __half2 *>(&b));
    float s0 = x.x + x.y + y.x + y.y;
#pragma unroll
    for (int step = 16; step; step /= 2) s0 += __shfl_xor_sync(~0u, s0, step);
    if (lane == 0) p.act_sums[static_cast<int64_t>(row) * p.out_chunks + block] = s0;
}

template <typename C, int PASS>
__device__ __forceinline__ void put_pass(const float (&d)[C::CT][C::MOST][4], float *red, int lane) {
    float *at = red + 2 * (lane & 3) * RED_STRIDE + (lane >> 2);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int t = 0; t < C::CT; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                at[(8 * h + (i & 1)) * RED_STRIDE + 16 * t + 8 * (i >> 1)] = d[t][2 * PASS + h][i];
}

/* Grid [chunks, or pairs of them][items, or more]; spare CTAs leave at once. */
template <typename C, bool DOWN>
__global__ void __launch_bounds__(C::THREADS, EXL3_CTAS(C)) grouped_kernel(const __grid_constant__ GroupedLaunch p) {
    extern __shared__ __align__(16) char ring[];
    __shared__ Rows<C> rows;
    const int item_at = __ldg(p.head->wave_item + p.first_item) + static_cast<int>(blockIdx.y);
    if (item_at >= __ldg(p.head->wave_item + p.end_item)) return;
    const int4 item = __ldg(p.items + item_at);
    const int entry = item.x, first = item.y, groups = item.z;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = warp / C::SIDE, place = warp % C::SIDE;
    const int chunk0 = DOWN ? p.chunk + 2 * static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x);
    /* An odd number of B's chunks: the last CTA's second one is the first again, not stored. */
    const int count = DOWN ? min(2, p.chunk + p.chunks - chunk0) : 1;
    const int chunk1 = count == 2 ? chunk0 + 1 : chunk0;
    float d[C::CT][C::MOST][4];
#pragma unroll
    for (int t = 0; t < C::CT; ++t)
#pragma unroll
        for (int g = 0; g < C::MOST; ++g) d[t][g][0] = d[t][g][1] = d[t][g][2] = d[t][g][3] = 0.0f;
    {
        const Matrix m = matrix_of(p, DOWN ? 2 : side, entry);
        Side s;
        s.stride = static_cast<uint32_t>(p.out_chunks * 128 * m.k2);
        s.trellis = m.trellis + (8 * (side ? chunk1 : chunk0) + C::CT * place) * 16 * m.k2;
        s.group = static_cast<uint32_t>(p.in_blocks) * 2048u;
        const int inputs_of = DOWN ? 0 : side;
        s.inputs = p.inputs + inputs_of * p.input_side + static_cast<int64_t>(first - p.first_group) * s.group + 16 * lane;
        s.weights_at = warp * p.warp_bytes;
        s.inputs_at = C::WARPS * p.warp_bytes + inputs_of * C::MOST * C::KT * 256;
        s.tiles = 8 * p.in_blocks;
        s.k2 = m.k2;
        s.codebook = m.codebook;
        s.place = place;
        s.side = side;
#define EXL3_RUN(K2) multiply_any<C, DOWN, K2>(p, s, first, groups, rows, ring, d)
        switch (m.codebook == 0 ? m.k2 : 0) {
        case 4: EXL3_RUN(4); break;
        case 6: EXL3_RUN(6); break;
        case 8: EXL3_RUN(8); break;
        case 10: EXL3_RUN(10); break;
        default: EXL3_RUN(0); break;
        }
#undef EXL3_RUN
    }
    const Matrix m0 = matrix_of(p, DOWN ? 2 : 0, entry), m1 = matrix_of(p, DOWN ? 2 : 1, entry);
    const float scale0 = m0.codebook == 0 && fast_rate(m0.k2) ? MUL1_SCALE : 1.0f;
    const float scale1 = m1.codebook == 0 && fast_rate(m1.k2) ? MUL1_SCALE : 1.0f;
    const __half *const svh0 = m0.svh + CHUNK * chunk0, *const svh1 = m1.svh + CHUNK * chunk1;
    const __half *const down_suh = DOWN ? nullptr : matrix_of(p, 2, entry).suh + CHUNK * chunk0 + 4 * lane;
    float *const red = reinterpret_cast<float *>(ring);
    float *const own = red + side * 16 * RED_STRIDE + 16 * C::CT * place;
#pragma unroll 1
    for (int pass = 0; 2 * pass < groups; ++pass) {
        __syncthreads();
        switch (pass) {
        case 0: put_pass<C, 0>(d, own, lane); break;
        case 1: if constexpr (C::MOST > 2) put_pass<C, 1>(d, own, lane); break;
        case 2: if constexpr (C::MOST > 4) put_pass<C, 2>(d, own, lane); break;
        case 3: if constexpr (C::MOST > 6) put_pass<C, 3>(d, own, lane); break;
        case 4: if constexpr (C::MOST > 8) put_pass<C, 4>(d, own, lane); break;
        case 5: if constexpr (C::MOST > 10) put_pass<C, 5>(d, own, lane); break;
        case 6: if constexpr (C::MOST > 12) put_pass<C, 6>(d, own, lane); break;
        default: if constexpr (C::MOST > 14) put_pass<C, 7>(d, own, lane); break;
        }
        __syncthreads();
        const int here = min(16, 8 * groups - 16 * pass);
        /* Two rows of a warp at once: their Hadamards wait for one another's shuffles. */
#pragma unroll 1
        for (int r = warp; r < here; r += 2 * C::WARPS) {
            float4 a[2], b[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = min(r + i * C::WARPS, here - 1), row = 16 * pass + at;
                a[i] = row_outputs(red + at * RED_STRIDE, scale0, rows.sums[0][row], svh0, lane);
                b[i] = row_outputs(red + (16 + at) * RED_STRIDE, scale1, rows.sums[1][row], svh1, lane);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 16 * pass + r + i * C::WARPS, slot = r + i * C::WARPS < here ? rows.slot[row] : -1;
                if (DOWN) {
                    if (slot < 0) continue;
                    const float weight = rows.weight[row];
                    float4 *const to = reinterpret_cast<float4 *>(p.out) +
                                       (static_cast<int64_t>(slot) * p.chunks + chunk0 - p.chunk) * 32 + lane;
                    __stcs(to, make_float4(a[i].x * weight, a[i].y * weight, a[i].z * weight, a[i].w * weight));
                    if (count == 2)
                        __stcs(to + 32, make_float4(b[i].x * weight, b[i].y * weight, b[i].z * weight, b[i].w * weight));
                } else if (r + i * C::WARPS < here) {
                    const uint2 s = __ldg(reinterpret_cast<const uint2 *>(down_suh));
                    const float2 s0 = __half22float2(*reinterpret_cast<const __half2 *>(&s.x));
                    const float2 s1 = __half22float2(*reinterpret_cast<const __half2 *>(&s.y));
                    /* 1/8 as the other rotated inputs have it. */
                    put_row(p, 8 * first + row, chunk0,
                            make_float4(gated(a[i].x, b[i].x, p.limit) * s0.x * 0.125f,
                                        gated(a[i].y, b[i].y, p.limit) * s0.y * 0.125f,
                                        gated(a[i].z, b[i].z, p.limit) * s1.x * 0.125f,
                                        gated(a[i].w, b[i].w, p.limit) * s1.y * 0.125f),
                            lane);
                }
            }
        }
    }
}

template <int V>
struct Pick;
/* What a launch table may name. By registers the first fits three times into an SM, the others
 * twice; the last does so also by the shared memory of a small one (100 KB), up to K = 5. */
template <>
struct Pick<0> {
    using C = Config<4, 4, 3, 3, 2, 4, 6>;
};
template <>
struct Pick<1> {
    using C = Config<4, 4, 3, 2, 2, 4, 6, 8>;
};
template <>
struct Pick<2> {
    using C = Config<4, 2, 3, 2, 2, 4, 6, 8>;
};

template <typename C, bool DOWN>
cudaError_t launch_config(GroupedLaunch p, int items, int k2, cudaStream_t stream) {
    const int shared = C::shared_bytes(k2, DOWN);
    if (shared > 46 * 1024) { /* with what is static, 48 KB */
        if (const cudaError_t error = call::allow_shared(grouped_kernel<C, DOWN>, MOST_GROUPED)) return error;
    }
    p.warp_bytes = C::warp_bytes(k2);
    p.stage_bytes = C::stage_bytes(k2, DOWN);
    const dim3 grid(DOWN ? (p.chunks + 1) / 2 : p.out_chunks, items);
    grouped_kernel<C, DOWN><<<grid, C::THREADS, shared, stream>>>(p);
    return cudaGetLastError();
}

} // namespace exl3
