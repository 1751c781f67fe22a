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

#include "engine.cuh"
#include "route.cuh"

namespace exl3 {

struct GroupedLaunch {
    const int64_t *table;
    const RouteHead *head;
    const int4 *items;
    const int32_t *slot_of;
    const float *weights;
    const char *inputs;     /* operands of side 0, of the first group that is there */
    int64_t input_side;     /* bytes to side 1's */
    const float *sums;      /* [rows][k-blocks of inputs] of side 0 */
    int64_t sum_side;       /* floats to side 1's */
    char *act;              /* A: operands of down, [group][k-tiles of inter][lane] uint2 */
    float *act_sums;        /* A: [rows][k-blocks of inter] */
    float *out;             /* B: fp32 [slots + tokens][chunks * 128] */
    int32_t entries;
    int32_t down;           /* 0: A, 1: B */
    int32_t first_item;     /* index into head->wave_item of the launch's first item, and of its end */
    int32_t end_item;
    int32_t first_group;    /* that `inputs` and `sums` begin with */
    int32_t in_blocks, out_chunks;
    int32_t chunk, chunks;  /* B: of this launch */
    int32_t slots;
    float limit;
    int32_t warp_bytes, stage_bytes;
};

/* KT k-tiles a stage; STAGES in the ring; items of at most 8 * MOST rows, in loops for NG groups each. */
template <int CT_, int KT_, int STAGES_, int CTAS_, int... NG>
struct Config {
    static constexpr int CT = CT_, KT = KT_, STAGES = STAGES_, CTAS = CTAS_;
    static constexpr int WARPS = 16 / CT, SIDE = WARPS / 2, THREADS = 32 * WARPS;
    static constexpr int COUNT = sizeof...(NG);
    /* The i-th of the sizes, which grow. */
    __host__ __device__ static constexpr int size(int i) {
        const int sizes[] = {NG...};
        return sizes[i];
    }
    static constexpr int MOST = size(COUNT - 1);
    static constexpr int warp_bytes(int k2) { return KT * CT * 16 * k2; }
    static constexpr int stage_bytes(int k2, bool down) {
        return WARPS * warp_bytes(k2) + (down ? 1 : 2) * MOST * KT * 256;
    }
    /* Two sides of sums of 16 rows lie in the ring's place at the end. */
    static constexpr int shared_bytes(int k2, bool down) {
        const int ring = STAGES * stage_bytes(k2, down), red = 2 * 16 * RED_STRIDE * 4;
        return ring > red ? ring : red;
    }
};

__host__ __device__ constexpr bool fast_rate(int k2) { return k2 == 4 || k2 == 6 || k2 == 8 || k2 == 10; }

struct Side {
    const char *trellis; /* the warp's first tile */
    int64_t stride;      /* bytes from k-tile to k-tile */
    const char *inputs;  /* the item's first group, at the lane's 16 bytes */
    int64_t group;       /* bytes from group to group */
    uint32_t weights_at, inputs_at; /* of the ring's first stage: the warp's, the side's */
    int tiles;           /* k-tiles */
    int k2, codebook;
    int place;           /* of the warp in its side */
    bool lower, upper;   /* which halves of the groups this side loads */
};

template <typename C, int NG>
__device__ __forceinline__ void copy_inputs(const Side &s, int64_t from, uint32_t to) {
    constexpr int PAIRS = C::KT / 2, EACH = C::SIDE / PAIRS, TURNS = (NG + EACH - 1) / EACH;
    const int first = s.place / PAIRS, pair = s.place % PAIRS;
    const char *at = s.inputs + from + first * s.group + 512 * pair;
    const uint32_t put = to + (first * C::KT + 2 * pair) * 256;
    const auto one = [&](int i) {
        if (NG % EACH == 0 || first + EACH * i < NG)
            copy_async(put + i * EACH * C::KT * 256, at + i * EACH * s.group);
    };
    if (s.lower) {
#pragma unroll
        for (int i = 0; i < (TURNS + 1) / 2; ++i) one(i);
    }
    if (s.upper) {
#pragma unroll
        for (int i = (TURNS + 1) / 2; i < TURNS; ++i) one(i);
    }
}

template <typename C, int K2>
__device__ __forceinline__ void copy_weights(const Side &s, const char *from, uint32_t to, int lane) {
    const int each = C::CT * (K2 ? K2 : s.k2), all = C::KT * each;
    if constexpr (K2 != 0) {
#pragma unroll
        for (int i = 0; i < C::KT * C::CT * K2; i += 32) {
            const int piece = i + lane, tile = piece / each;
            if (i + 32 <= all || piece < all)
                copy_async(to + 16 * piece, from + tile * s.stride + 16 * (piece - tile * each));
        }
    } else {
        for (int piece = lane; piece < all; piece += 32) {
            const int tile = piece / each;
            copy_async(to + 16 * piece, from + tile * s.stride + 16 * (piece - tile * each));
        }
    }
}

template <typename C, int K2, int NG>
__device__ __forceinline__ void multiply(const Side &s, const char *ring, uint32_t ring_at, int stage_bytes, int lane,
                                         float (&d)[C::CT][C::MOST][4]) {
    constexpr int AHEAD = C::STAGES - 1;
    const int stages = s.tiles / C::KT;
    const char *trellis = s.trellis;
    const int64_t step = C::KT * s.stride;
    int64_t from = 0;
    const auto load = [&](int at) {
        copy_weights<C, K2>(s, trellis, ring_at + at + s.weights_at, lane);
        copy_inputs<C, NG>(s, from, ring_at + at + s.inputs_at + 16 * lane);
        trellis += step;
        from += C::KT * 256;
    };
    int write = 0, read = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        if (i < stages) load(write);
        copy_commit();
        write += stage_bytes;
    }
    const Window<K2 ? K2 : 4> window(lane);
#pragma unroll 1
    for (int left = stages; left > 0; --left) {
        copy_wait<C::STAGES - 2>();
        __syncthreads(); /* the stage is there for all warps, and all have left the one before */
        if (left > AHEAD) load(write);
        copy_commit();
        write = write + stage_bytes == C::STAGES * stage_bytes ? 0 : write + stage_bytes;
        const char *const weights = ring + read + s.weights_at;
        const char *const inputs = ring + read + s.inputs_at + 8 * lane;
        read = read + stage_bytes == C::STAGES * stage_bytes ? 0 : read + stage_bytes;
#pragma unroll
        for (int kt = 0; kt < C::KT; ++kt) {
            uint2 b[NG];
#pragma unroll
            for (int g = 0; g < NG; ++g) b[g] = *reinterpret_cast<const uint2 *>(inputs + (g * C::KT + kt) * 256);
            if constexpr (K2 != 0) {
                uint32_t w[C::CT][window.WORDS];
#pragma unroll
                for (int t = 0; t < C::CT; ++t)
#pragma unroll
                    for (int i = 0; i < window.WORDS; ++i)
                        w[t][i] = *reinterpret_cast<const uint32_t *>(weights + (kt * C::CT + t) * 16 * K2 + window.at[i]);
#pragma unroll
                for (int t = 0; t < C::CT; ++t) {
                    uint32_t st[8];
                    window.states(w[t], st);
                    const uint32_t a[4] = {mul1_pair(st[0], st[1]), mul1_pair(st[4], st[5]),
                                           mul1_pair(st[2], st[3]), mul1_pair(st[6], st[7])};
#pragma unroll
                    for (int g = 0; g < NG; ++g) mma(d[t][g], a, b[g].x, b[g].y);
                }
            } else {
#pragma unroll
                for (int t = 0; t < C::CT; ++t) {
                    const uint32_t *words = reinterpret_cast<const uint32_t *>(weights) + (kt * C::CT + t) * 4 * s.k2;
                    const uint32_t a[4] = {any_pair(words, s.k2, s.codebook, 8 * lane),
                                           any_pair(words, s.k2, s.codebook, 8 * lane + 4),
                                           any_pair(words, s.k2, s.codebook, 8 * lane + 2),
                                           any_pair(words, s.k2, s.codebook, 8 * lane + 6)};
#pragma unroll
                    for (int g = 0; g < NG; ++g) mma(d[t][g], a, b[g].x, b[g].y);
                }
            }
        }
    }
    copy_wait<0>();
}

/* The shortest loop that has room for `groups`. The general rate has only the longest. */
template <typename C, int K2, int I = 0>
__device__ __forceinline__ void multiply_any(const Side &s, int groups, const char *ring, uint32_t ring_at,
                                             int stage_bytes, int lane, float (&d)[C::CT][C::MOST][4]) {
    if constexpr (K2 == 0 || I + 1 == C::COUNT) {
        multiply<C, K2, C::MOST>(s, ring, ring_at, stage_bytes, lane, d);
    } else {
        constexpr int SIZE = C::size(I);
        if (groups <= SIZE)
            multiply<C, K2, SIZE>(s, ring, ring_at, stage_bytes, lane, d);
        else
            multiply_any<C, K2, I + 1>(s, groups, ring, ring_at, stage_bytes, lane, d);
    }
}

struct Matrix {
    const char *trellis;
    const __half *suh, *svh;
    int k2, codebook;
};

__device__ __forceinline__ Matrix matrix_of(const GroupedLaunch &p, int which, int entry) {
    const longlong2 *at = reinterpret_cast<const longlong2 *>(p.table) + 2 * (which * p.entries + entry);
    const longlong2 a = __ldg(at), b = __ldg(at + 1);
    Matrix m;
    m.trellis = reinterpret_cast<const char *>(a.x);
    m.suh = reinterpret_cast<const __half *>(a.y);
    m.svh = reinterpret_cast<const __half *>(b.x);
    m.k2 = static_cast<int>(b.y & 0xff);
    m.codebook = static_cast<int>(b.y >> 8 & 0xff);
    return m;
}

/* silu(min(gate, L)) * clamp(up, -L, L); as torch.clamp, NaN stays NaN. */
__device__ __forceinline__ float gated(float gate, float up, float limit) {
    if (limit > 0.0f) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
    }
    return gate / (1.0f + __expf(-gate)) * up;
}

/* A row's chunk: sums of the tensor cores to outputs. */
__device__ __forceinline__ float4 row_outputs(const float *red, const float *sums, int blocks, const Matrix &m, int chunk,
                                              int lane) {
    float4 v = *reinterpret_cast<const float4 *>(red + 4 * lane);
    if (m.codebook == 0 && fast_rate(m.k2)) {
        float s0 = 0.0f;
        for (int i = lane; i < blocks; i += 32) s0 += __ldg(sums + i);
#pragma unroll
        for (int step = 16; step; step /= 2) s0 += __shfl_xor_sync(~0u, s0, step);
        s0 *= MUL1_OFFSET;
        v = make_float4(fmaf(MUL1_SCALE, v.x, s0), fmaf(MUL1_SCALE, v.y, s0), fmaf(MUL1_SCALE, v.z, s0),
                        fmaf(MUL1_SCALE, v.w, s0));
    }
    return finish(v, m.svh + CHUNK * chunk, lane);
}

/* Rotated fp16 of a row's k-block, as operand B of its group; and their sum. */
__device__ __forceinline__ void put_row(const GroupedLaunch &p, int row, int block, float4 v, int lane) {
    v = hadamard(v, lane);
    const uint32_t a = pack_half(v.x, v.y), b = pack_half(v.z, v.w);
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
template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS) grouped_kernel(const __grid_constant__ GroupedLaunch p) {
    extern __shared__ __align__(16) char ring[];
    const int item_at = __ldg(p.head->wave_item + p.first_item) + static_cast<int>(blockIdx.y);
    if (item_at >= __ldg(p.head->wave_item + p.end_item)) return;
    const int4 item = __ldg(p.items + item_at);
    const int entry = item.x, first = item.y, groups = item.z;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = warp / C::SIDE, place = warp % C::SIDE;
    const int chunk0 = p.down ? p.chunk + 2 * static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x);
    /* An odd number of B's chunks: the last CTA's second one is the first again, not stored. */
    const int count = p.down ? min(2, p.chunk + p.chunks - chunk0) : 1;
    const int chunk1 = count == 2 ? chunk0 + 1 : chunk0;
    float d[C::CT][C::MOST][4];
#pragma unroll
    for (int t = 0; t < C::CT; ++t)
#pragma unroll
        for (int g = 0; g < C::MOST; ++g) d[t][g][0] = d[t][g][1] = d[t][g][2] = d[t][g][3] = 0.0f;
    {
        const Matrix m = matrix_of(p, p.down ? 2 : side, entry);
        Side s;
        s.stride = static_cast<int64_t>(p.out_chunks) * 128 * m.k2;
        s.trellis = m.trellis + (8 * (side ? chunk1 : chunk0) + C::CT * place) * 16 * m.k2;
        s.group = static_cast<int64_t>(p.in_blocks) * 2048;
        const int inputs_of = p.down ? 0 : side;
        s.inputs = p.inputs + inputs_of * p.input_side + (first - p.first_group) * s.group + 16 * lane;
        s.weights_at = warp * p.warp_bytes;
        s.inputs_at = C::WARPS * p.warp_bytes + inputs_of * C::MOST * C::KT * 256;
        s.tiles = 8 * p.in_blocks;
        s.k2 = m.k2;
        s.codebook = m.codebook;
        s.place = place;
        s.lower = !p.down || side == 0;
        s.upper = !p.down || side == 1;
        const uint32_t ring_at = shared_address(ring);
#define EXL3_RUN(K2) multiply_any<C, K2>(s, groups, ring, ring_at, p.stage_bytes, lane, d)
        switch (m.codebook == 0 ? m.k2 : 0) {
        case 4: EXL3_RUN(4); break;
        case 6: EXL3_RUN(6); break;
        case 8: EXL3_RUN(8); break;
        case 10: EXL3_RUN(10); break;
        default: EXL3_RUN(0); break;
        }
#undef EXL3_RUN
    }
    const Matrix gate = matrix_of(p, p.down ? 2 : 0, entry), up = matrix_of(p, p.down ? 2 : 1, entry);
    const __half *const down_suh = p.down ? nullptr : matrix_of(p, 2, entry).suh;
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
#pragma unroll 1
        for (int r = warp; r < here; r += C::WARPS) {
            const int row = 8 * first + 16 * pass + r;
            const int64_t sum_at = static_cast<int64_t>(row - 8 * p.first_group) * p.in_blocks;
            const int slot = p.slot_of[row];
            if (p.down && slot < 0) continue;
            const float4 a = row_outputs(red + r * RED_STRIDE, p.sums + sum_at, p.in_blocks, gate, chunk0, lane);
            if (p.down) {
                const float weight = slot < p.slots ? __ldg(p.weights + slot) : 1.0f;
                float4 *const to = reinterpret_cast<float4 *>(p.out) +
                                   (static_cast<int64_t>(slot) * p.chunks + chunk0 - p.chunk) * 32 + lane;
                __stcs(to, make_float4(a.x * weight, a.y * weight, a.z * weight, a.w * weight));
                if (count == 1) continue;
                const float4 b = row_outputs(red + (16 + r) * RED_STRIDE, p.sums + sum_at, p.in_blocks, gate, chunk1, lane);
                __stcs(to + 32, make_float4(b.x * weight, b.y * weight, b.z * weight, b.w * weight));
            } else {
                const float4 b = row_outputs(red + (16 + r) * RED_STRIDE, p.sums + p.sum_side + sum_at, p.in_blocks, up,
                                             chunk0, lane);
                const uint2 s = __ldg(reinterpret_cast<const uint2 *>(down_suh + CHUNK * chunk0 + 4 * lane));
                const float2 s0 = __half22float2(*reinterpret_cast<const __half2 *>(&s.x));
                const float2 s1 = __half22float2(*reinterpret_cast<const __half2 *>(&s.y));
                /* 1/8 as the other rotated inputs have it. */
                put_row(p, row, chunk0,
                        make_float4(gated(a.x, b.x, p.limit) * s0.x * 0.125f, gated(a.y, b.y, p.limit) * s0.y * 0.125f,
                                    gated(a.z, b.z, p.limit) * s1.x * 0.125f, gated(a.w, b.w, p.limit) * s1.y * 0.125f),
                        lane);
            }
        }
    }
}

template <int V>
struct Pick;
/* What a launch table may name. Both hold two CTAs an SM by registers. */
template <>
struct Pick<0> {
    using C = Config<4, 2, 4, 3, 2, 4>;
};
template <>
struct Pick<1> {
    using C = Config<4, 2, 4, 2, 2, 4, 6, 8>;
};
#ifdef EXL3_SWEEP
template <> struct Pick<2> { using C = Config<4, 4, 3, 2, 2, 4, 6, 8>; };
template <> struct Pick<3> { using C = Config<2, 2, 4, 2, 2, 4, 6, 8>; };
template <> struct Pick<4> { using C = Config<2, 2, 4, 1, 8, 12, 16>; };
template <> struct Pick<5> { using C = Config<4, 2, 4, 3, 2, 4, 6>; };
template <> struct Pick<6> { using C = Config<2, 2, 4, 2, 2, 4, 6>; };
template <> struct Pick<7> { using C = Config<4, 2, 3, 2, 2, 4, 6, 8>; };
#endif

template <typename C>
cudaError_t launch_config(GroupedLaunch p, int items, int k2, cudaStream_t stream) {
    const int shared = C::shared_bytes(k2, p.down);
    if (shared > 48 * 1024) {
        const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void *>(grouped_kernel<C>),
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize, 99 * 1024);
        if (error != cudaSuccess) return error;
    }
    p.warp_bytes = C::warp_bytes(k2);
    p.stage_bytes = C::stage_bytes(k2, p.down);
    const dim3 grid(p.down ? (p.chunks + 1) / 2 : p.out_chunks, items);
    grouped_kernel<C><<<grid, C::THREADS, shared, stream>>>(p);
    return cudaGetLastError();
}

} // namespace exl3
