/* What the dense and the expert kernels share besides the weight stream: rotation of inputs, sums
 * over a CTA's warps and over CTAs, rotation of outputs. */
#pragma once

#include "stream.cuh"

namespace exl3 {

constexpr int MAX_WARPS = 8;
constexpr int CHUNK = 128;
constexpr int RED_STRIDE = CHUNK + 4; /* floats: rows of a warp's sums, free of bank conflicts */
constexpr int RED_WARP = 8 * RED_STRIDE;

/* H128 / sqrt(128) of the inputs is left at 1/8 of the +-1 matrix and that of the outputs at 1: what
 * is missing of both, 8 / 128, is applied to the outputs. */
constexpr float OUTPUT_SCALE = 0.0625f;

/* Rotated rows of one k-block as operands: [k-tile 8][NB][lane 32][2] words. */
__host__ __device__ constexpr int block_bytes(int nb) { return 8 * 32 * nb * 8; }

/* How a CTA's warps stand: `chunks` side by side, `lanes` share the k-range. Divisions by both are
 * multiplications by 2^16 / n, rounded up: exact for the few thousand numbers that occur. */
struct Stand {
    int32_t chunks, lanes;
    uint32_t by_chunks, by_lanes;
};

struct Place {
    bool works;
    int chunk, tile0, tile1; /* chunk of the CTA's; its k-tiles, from and to */
};

__device__ __forceinline__ uint32_t divide(uint32_t n, uint32_t by) { return n * by >> 16; }

__device__ __forceinline__ Place place_of(const Stand &s, int warp, int blocks) {
    const uint32_t share = divide(warp, s.by_chunks);
    Place at;
    at.works = static_cast<int>(share) < s.lanes;
    at.chunk = warp - static_cast<int>(share) * s.chunks;
    const uint32_t pairs = 4u * static_cast<uint32_t>(blocks);
    at.tile0 = at.works ? 2 * static_cast<int>(divide(pairs * share, s.by_lanes)) : 0;
    at.tile1 = at.works ? 2 * static_cast<int>(divide(pairs * (share + 1u), s.by_lanes)) : 0;
    return at;
}

/* ---- input rotation ------------------------------------------------------------------------ */

/* H16 / 8 as operand B: inputs in the order in which a lane loads them (four neighbours), outputs
 * in two halves of eight. */
struct Hadamard16 {
    uint32_t b[2][2]; /* [half][register] */
    __device__ explicit Hadamard16(int lane) {
        const int q = lane & 3, n = lane >> 2;
        for (int half = 0; half < 2; ++half)
            for (int reg = 0; reg < 2; ++reg) {
                const int lo = 4 * q + 2 * reg, out = 8 * half + n;
                const uint32_t first = 0x3000u | (__popc(lo & out) & 1) << 15;
                const uint32_t second = 0x3000u | (__popc((lo + 1) & out) & 1) << 15;
                b[half][reg] = first | second << 16;
            }
    }
};

/* Four bf16 times four fp16, as two fp16 pairs. */
__device__ __forceinline__ void scale_four(uint2 x, uint2 scale, uint32_t &a, uint32_t &b) {
    const float2 s0 = __half22float2(*reinterpret_cast<const __half2 *>(&scale.x));
    const float2 s1 = __half22float2(*reinterpret_cast<const __half2 *>(&scale.y));
    a = pack_fp16(__uint_as_float(x.x << 16) * s0.x, __uint_as_float(x.x & 0xffff0000u) * s0.y);
    b = pack_fp16(__uint_as_float(x.y << 16) * s1.x, __uint_as_float(x.y & 0xffff0000u) * s1.y);
}

/* One half of 128 rotated outputs: H16 of each group of 16 inputs, then H8 across the groups; of the first
 * USED sums of a lane, two for each eight rows. */
template <int USED>
__device__ __forceinline__ void rotate_half(const uint32_t (&a)[8][4], const uint32_t (&b)[2], float (&d)[8][4]) {
#pragma unroll
    for (int hi = 0; hi < 8; ++hi) {
        d[hi][0] = d[hi][1] = d[hi][2] = d[hi][3] = 0.0f;
        mma_fp16(d[hi], a[hi], b[0], b[1]);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int hi = 0; hi < 8; ++hi)
            if (!(hi & step))
#pragma unroll
                for (int i = 0; i < USED; ++i) {
                    const float u = d[hi][i], v = d[hi + step][i];
                    d[hi][i] = u + v;
                    d[hi + step][i] = u - v;
                }
}

/* Rows (at most 8 * NB of them) of `blocks` k-blocks, H(x * suh) as operands in `out` (block_bytes(NB)
 * a block). Eight pairs of a row and a k-block at a time, whichever they are: a warp then does as
 * much for one row of eight blocks as for eight rows of one. `row_at` gives a row's first element.
 * Operands of rows that are not there are not written: what they hold reaches their own sums only. */
template <int NB, typename RowAt>
__device__ __forceinline__ void rotate_rows(const RowAt &row_at, int rows, int blocks, const __half *suh,
                                            int warp, int warps, int lane, uint32_t *out) {
    const Hadamard16 had(lane);
    const int q = lane & 3, pairs = rows * blocks;
    /* Half a row off every border, far more than this reciprocal is: exact, and soon there. */
    const float by_rows = __fdividef(1.0f, static_cast<float>(rows));
    for (int from = 8 * warp; from < pairs; from += 8 * warps) {
        const int pair = from + (lane >> 2);
        const bool there = pair < pairs;
        const int block = there ? static_cast<int>((static_cast<float>(pair) + 0.5f) * by_rows) : 0;
        const int row = there ? pair - block * rows : 0;
        const __nv_bfloat16 *const x = row_at(row) + 128 * block + 4 * q;
        const __half *const scales = suh + 128 * block + 4 * q;
        uint32_t a[8][4];
#pragma unroll
        for (int hi = 0; hi < 8; ++hi) {
            const uint2 scale = __ldg(reinterpret_cast<const uint2 *>(scales + 16 * hi));
            scale_four(__ldcg(reinterpret_cast<const uint2 *>(x + 16 * hi)), scale, a[hi][0], a[hi][2]);
            a[hi][1] = a[hi][3] = 0u;
        }
        uint2 *const to = reinterpret_cast<uint2 *>(out) + (8 * block * NB + (row >> 3)) * 32 + 4 * (row & 7) + q;
        uint32_t first[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float d[8][4];
            rotate_half<2>(a, had.b[half], d);
#pragma unroll
            for (int hi = 0; hi < 8; ++hi) {
                const uint32_t v = pack_fp16(d[hi][0], d[hi][1]);
                if (half == 0)
                    first[hi] = v;
                else if (there)
                    to[hi * NB * 32] = make_uint2(first[hi], v);
            }
        }
    }
}

/* ---- sums over warps, output rotation --------------------------------------------------------- */

/* A warp's sums of 8 rows to shared memory: [row 8][RED_STRIDE]. */
template <int NB>
__device__ __forceinline__ void put_sums(const Sums<NB> &sums, int nb, float *red, int lane) {
    float *at = red + 2 * (lane & 3) * RED_STRIDE + (lane >> 2);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            at[(i & 1) * RED_STRIDE + 16 * tile + 8 * (i >> 1)] = sums.d[tile][nb][i];
}

__device__ __forceinline__ void add_four(float4 &to, const float4 &v) {
    to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

/* Row `row` of one chunk, outputs 4 * lane.., summed over the `lanes` warps first, first + step... */
__device__ __forceinline__ float4 take_sums(const float *red, int first, int step, int lanes, int row,
                                            int lane) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float *const from = red + first * RED_WARP + row * RED_STRIDE + 4 * lane;
#pragma unroll 1
    for (int base = 0; base < lanes; base += 4) {
        float4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = *reinterpret_cast<const float4 *>(from + min(base + i, lanes - 1) * step * RED_WARP);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (base + i < lanes) add_four(total, v[i]);
    }
    return total;
}

/* The +-1 Hadamard matrix on 128 values of a warp, four neighbours a lane. */
__device__ __forceinline__ float4 hadamard(float4 v, int lane) {
    const float a = v.x + v.y, b = v.x - v.y, c = v.z + v.w, d = v.z - v.w;
    v = make_float4(a + c, b + d, a - c, b - d);
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const float sign = lane & m ? -1.0f : 1.0f;
        v.x = fmaf(v.x, sign, __shfl_xor_sync(~0u, v.x, m));
        v.y = fmaf(v.y, sign, __shfl_xor_sync(~0u, v.y, m));
        v.z = fmaf(v.z, sign, __shfl_xor_sync(~0u, v.z, m));
        v.w = fmaf(v.w, sign, __shfl_xor_sync(~0u, v.w, m));
    }
    return v;
}

/* A lane's four scales of a chunk. */
__device__ __forceinline__ float4 scales_of(const __half *at, int lane) {
    const uint2 s = __ldg(reinterpret_cast<const uint2 *>(at + 4 * lane));
    const float2 s0 = __half22float2(*reinterpret_cast<const __half2 *>(&s.x));
    const float2 s1 = __half22float2(*reinterpret_cast<const __half2 *>(&s.y));
    return make_float4(s0.x, s0.y, s1.x, s1.y);
}

/* Rotated outputs times svh. */
__device__ __forceinline__ float4 finish(float4 v, float4 svh, int lane) {
    v = hadamard(v, lane);
    return make_float4(v.x * OUTPUT_SCALE * svh.x, v.y * OUTPUT_SCALE * svh.y, v.z * OUTPUT_SCALE * svh.z,
                       v.w * OUTPUT_SCALE * svh.w);
}

__device__ __forceinline__ float4 finish(float4 v, const __half *svh, int lane) {
    return finish(v, scales_of(svh, lane), lane);
}

__device__ __forceinline__ void store_four(void *y, int64_t at, int fp32, float4 v) {
    if (fp32) {
        *reinterpret_cast<float4 *>(static_cast<float *>(y) + at) = v;
    } else {
        const __nv_bfloat162 lo = __floats2bfloat162_rn(v.x, v.y), hi = __floats2bfloat162_rn(v.z, v.w);
        uint2 bits;
        bits.x = *reinterpret_cast<const uint32_t *>(&lo);
        bits.y = *reinterpret_cast<const uint32_t *>(&hi);
        *reinterpret_cast<uint2 *>(static_cast<__nv_bfloat16 *>(y) + at) = bits;
    }
}

/* Sum of `count` partial rows, `stride` floats apart, in order; past L1, other CTAs wrote them. BATCH are
 * on their way at a time, however few there are: each alone would take the memory's latency. Those beyond
 * the last read that one again: loads that may not happen would need a predicate each, and there are seven. */
template <int BATCH>
__device__ __forceinline__ float4 sum_partials(const float *from, int64_t stride, int count, int lane) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int base = 0; base < count; base += BATCH) {
        float4 v[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            v[i] = __ldcg(reinterpret_cast<const float4 *>(from + min(base + i, count - 1) * stride) + lane);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (base + i < count) add_four(total, v[i]);
    }
    return total;
}

/* Two such sums; what both want of memory is asked for at once. */
__device__ __forceinline__ void sum_both(const float *one, const float *other, int64_t stride, int count, int lane,
                                         float4 &first, float4 &second) {
    first = second = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int base = 0; base < count; base += 8) {
        float4 u[8], v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int64_t at = min(base + i, count - 1) * stride;
            u[i] = __ldcg(reinterpret_cast<const float4 *>(one + at) + lane);
            v[i] = __ldcg(reinterpret_cast<const float4 *>(other + at) + lane);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (base + i < count) add_four(first, u[i]), add_four(second, v[i]);
    }
}

/* True in every thread of the CTA that arrives last of `expected`; the counter is zero again then,
 * for the next launch. What the CTAs wrote before is visible to it: the barrier orders a CTA's writes
 * before its first thread's addition, which releases them to, and acquires those of, the others. */
__device__ __forceinline__ bool arrive(int *counter, int expected, int *flag) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool last = add_and_order(counter, 1) == expected - 1;
        if (last) *counter = 0;
        *flag = last;
    }
    __syncthreads();
    return *flag != 0;
}

} // namespace exl3
