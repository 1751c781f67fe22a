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
    const float *sums;      /* [rows][sum_count] of side 0: what adds up to the sum of a row's inputs */
    int64_t sum_side;       /* floats to side 1's */
    char *act;              /* A: operands of down, [group][k-tiles of inter][lane] uint2 */
    float *act_sums;        /* A: [rows][k-blocks of inter] */
    float *out;             /* B: fp32 [slots + tokens][chunks * 128] */
    int32_t entries;
    int32_t first_item;     /* index into head->wave_item of the launch's first item, and of its end */
    int32_t end_item;
    int32_t first_group;    /* that `inputs` and `sums` begin with */
    int32_t in_blocks, out_chunks;
    int32_t sum_count;
    int32_t chunk, chunks;  /* B: of this launch */
    int32_t slots;
    float limit;
    int32_t warp_bytes, stage_bytes;
};

/* Dynamic shared memory at most: 99 KB less what is static. */
constexpr int MOST_GROUPED = 97 * 1024;

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

/* Of the warps that share stages: all of B's, one side's of A. Barrier 0 is __syncthreads's. */
template <typename C, bool DOWN>
__device__ __forceinline__ void stage_barrier(int side) {
    if (DOWN)
        __syncthreads();
    else if (side == 0)
        asm volatile("bar.sync 1, %0;" ::"n"(C::THREADS / 2) : "memory");
    else
        asm volatile("bar.sync 2, %0;" ::"n"(C::THREADS / 2) : "memory");
}

struct Side {
    const char *trellis; /* the warp's first tile */
    uint32_t stride;     /* bytes from k-tile to k-tile */
    const char *inputs;  /* the item's first group, at the lane's 16 bytes */
    uint32_t group;      /* bytes from group to group */
    uint32_t weights_at, inputs_at; /* of the ring's first stage: the warp's, the side's */
    int tiles;           /* k-tiles */
    int k2, codebook;
    int side, place;     /* of the CTA, and the warp's in it */
};

/* Rows of a stage: of A by the side that needs them, of B by all warps. */
template <typename C, bool DOWN, int NG>
__device__ __forceinline__ void copy_inputs(const Side &s, const char *from, uint32_t to) {
    constexpr int PAIRS = C::KT / 2, WARPS = DOWN ? C::WARPS : C::SIDE, EACH = WARPS / PAIRS;
    const int warp = DOWN ? s.side * C::SIDE + s.place : s.place, first = warp / PAIRS, pair = warp % PAIRS;
    const char *at = from + first * s.group + 512 * pair;
    const uint32_t put = to + (first * C::KT + 2 * pair) * 256;
#pragma unroll
    for (int i = 0; i < NG; i += EACH)
        if (i + EACH <= NG || first + i < NG) copy_async(put + i * C::KT * 256, at + i * s.group);
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

/* What the end needs to know of the item's rows; loaded while the first stages are on their way. */
template <typename C>
struct Rows {
    float sums[2][8 * C::MOST]; /* of a side's inputs, times the codebook's offset; 0 where none is needed */
    int slot[8 * C::MOST];
    float weight[8 * C::MOST];
};

template <typename C, bool DOWN>
__device__ __forceinline__ void load_rows(const GroupedLaunch &p, const Side &s, int first, int groups, Rows<C> &rows) {
    const bool affine = s.codebook == 0 && fast_rate(s.k2);
    const int in_side = static_cast<int>(threadIdx.x) % (32 * C::SIDE), side = static_cast<int>(threadIdx.x) / (32 * C::SIDE);
    for (int r = in_side; r < 8 * groups; r += 32 * C::SIDE) {
        const float *from = p.sums + (DOWN ? 0 : side) * p.sum_side + static_cast<int64_t>(8 * (first - p.first_group) + r) * p.sum_count;
        float total = 0.0f;
        if (affine) {
#pragma unroll 8
            for (int i = 0; i < p.sum_count; ++i) total += __ldg(from + i);
        }
        rows.sums[side][r] = MUL1_OFFSET * total;
        if (side == 0) {
            const int slot = __ldg(p.slot_of + 8 * first + r);
            rows.slot[r] = slot;
            rows.weight[r] = DOWN && slot >= 0 && slot < p.slots ? __ldg(p.weights + slot) : 1.0f;
        }
    }
}

/* One tile's operand A. */
template <int K2>
struct Decoder {
    const Window<K2> window;
    __device__ __forceinline__ explicit Decoder(int lane) : window(lane) {}
    struct Words {
        uint32_t w[Window<K2>::WORDS];
    };
    __device__ __forceinline__ Words load(const char *tile, int, int) const {
        Words found;
#pragma unroll
        for (int i = 0; i < Window<K2>::WORDS; ++i)
            found.w[i] = *reinterpret_cast<const uint32_t *>(tile + window.at[i]);
        return found;
    }
    __device__ __forceinline__ void decode(const Words &words, uint32_t (&a)[4]) const {
        uint32_t st[8];
        window.states(words.w, st);
        a[0] = mul1_pair(st[0], st[1]), a[1] = mul1_pair(st[4], st[5]);
        a[2] = mul1_pair(st[2], st[3]), a[3] = mul1_pair(st[6], st[7]);
    }
};

/* Any rate and codebook: the values themselves. */
template <>
struct Decoder<0> {
    const int lane;
    __device__ __forceinline__ explicit Decoder(int at) : lane(at) {}
    struct Words {
        uint32_t a[4];
    };
    __device__ __forceinline__ Words load(const char *tile, int k2, int codebook) const {
        Words found;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(tile);
        found.a[0] = any_pair(words, k2, codebook, 8 * lane), found.a[1] = any_pair(words, k2, codebook, 8 * lane + 4);
        found.a[2] = any_pair(words, k2, codebook, 8 * lane + 2), found.a[3] = any_pair(words, k2, codebook, 8 * lane + 6);
        return found;
    }
    __device__ __forceinline__ void decode(const Words &words, uint32_t (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = words.a[i];
    }
};

template <typename C, bool DOWN, int K2, int NG>
__device__ __forceinline__ void multiply(const GroupedLaunch &p, const Side &s, int first, int groups, Rows<C> &rows,
                                         const char *ring, float (&d)[C::CT][C::MOST][4]) {
    constexpr int AHEAD = C::STAGES - 1;
    const uint32_t ring_at = shared_address(ring);
    const int stage_bytes = p.stage_bytes, lane = threadIdx.x & 31;
    const int stages = s.tiles / C::KT, tile_bytes = 16 * (K2 ? K2 : s.k2);
    const char *trellis = s.trellis, *inputs_from = s.inputs;
    const auto load = [&](int at) {
        copy_weights<C, K2>(s, trellis, ring_at + at + s.weights_at, lane);
        copy_inputs<C, DOWN, NG>(s, inputs_from, ring_at + at + s.inputs_at + 16 * lane);
        trellis += C::KT * s.stride;
        inputs_from += C::KT * 256;
    };
    int write = 0, read = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        if (i < stages) load(write);
        copy_commit();
        write += stage_bytes;
    }
    load_rows<C, DOWN>(p, s, first, groups, rows);
    const Decoder<K2> decoder(lane);
#pragma unroll 1
    for (int left = stages; left > 0; --left) {
        copy_wait<C::STAGES - 2>();
        stage_barrier<C, DOWN>(s.side); /* the stage is there for all, and all have left the one before */
        if (left > AHEAD) load(write);
        copy_commit();
        write = write + stage_bytes == C::STAGES * stage_bytes ? 0 : write + stage_bytes;
        const char *weights = ring + read + s.weights_at;
        const char *inputs = ring + read + s.inputs_at + 8 * lane;
        read = read + stage_bytes == C::STAGES * stage_bytes ? 0 : read + stage_bytes;
        /* A loop, not unrolled: within one k-tile the compiler decodes a tile while the tensor cores have
           the one before; over several it would first decode them all. */
        auto next = decoder.load(weights, s.k2, s.codebook);
#pragma unroll 1
        for (int kt = 0; kt < C::KT; ++kt) {
            uint2 b[NG];
#pragma unroll
            for (int g = 0; g < NG; ++g) b[g] = *reinterpret_cast<const uint2 *>(inputs + g * C::KT * 256);
            uint32_t a[2][4];
            decoder.decode(next, a[0]);
            if (K2) next = decoder.load(weights + tile_bytes, s.k2, s.codebook);
#pragma unroll
            for (int t = 0; t < C::CT; ++t) {
                if (K2 && t + 1 < C::CT) {
                    decoder.decode(next, a[(t + 1) & 1]);
                    next = decoder.load(weights + (t + 2) * tile_bytes, s.k2, s.codebook); /* at last the next k-tile's first */
                }
#pragma unroll
                for (int g = 0; g < NG; ++g) mma(d[t][g], a[K2 ? t & 1 : 0], b[g].x, b[g].y);
                if (!K2) decoder.decode(next = decoder.load(weights + (t + 1) * tile_bytes, s.k2, s.codebook), a[0]);
            }
            weights += C::CT * tile_bytes;
            inputs += 256;
        }
    }
    copy_wait<0>();
}

/* The shortest loop that has room for `groups`. The general rate has only the longest. */
template <typename C, bool DOWN, int K2, int I = 0>
__device__ __forceinline__ void multiply_any(const GroupedLaunch &p, const Side &s, int first, int groups, Rows<C> &rows,
                                             const char *ring, float (&d)[C::CT][C::MOST][4]) {
    constexpr int SIZE = C::size(I);
    if constexpr (K2 == 0 || I + 1 == C::COUNT)
        multiply<C, DOWN, K2, C::MOST>(p, s, first, groups, rows, ring, d);
    else if (groups <= SIZE)
        multiply<C, DOWN, K2, SIZE>(p, s, first, groups, rows, ring, d);
    else
        multiply_any<C, DOWN, K2, I + 1>(p, s, first, groups, rows, ring, d);
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

/* A row's chunk: sums of the tensor cores to outputs. `offset` is 0 for values as they are. */
__device__ __forceinline__ float4 row_outputs(const float *red, float scale, float offset, const __half *svh, int lane) {
    const float4 v = *reinterpret_cast<const float4 *>(red + 4 * lane);
    return finish(make_float4(fmaf(scale, v.x, offset), fmaf(scale, v.y, offset), fmaf(scale, v.z, offset),
                              fmaf(scale, v.w, offset)), svh, lane);
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
template <typename C, bool DOWN>
__global__ void __launch_bounds__(C::THREADS, C::CTAS) grouped_kernel(const __grid_constant__ GroupedLaunch p) {
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
#ifdef EXL3_SWEEP
template <> struct Pick<3> { using C = Config<4, 4, 3, 4, 2, 4>; };
#endif

template <typename C, bool DOWN>
cudaError_t launch_config(GroupedLaunch p, int items, int k2, cudaStream_t stream) {
    const int shared = C::shared_bytes(k2, DOWN);
    if (shared > 46 * 1024) { /* with what is static, 48 KB */
        const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void *>(grouped_kernel<C, DOWN>),
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_GROUPED);
        if (error != cudaSuccess) return error;
    }
    p.warp_bytes = C::warp_bytes(k2);
    p.stage_bytes = C::stage_bytes(k2, DOWN);
    const dim3 grid(DOWN ? (p.chunks + 1) / 2 : p.out_chunks, items);
    grouped_kernel<C, DOWN><<<grid, C::THREADS, shared, stream>>>(p);
    return cudaGetLastError();
}

} // namespace exl3
