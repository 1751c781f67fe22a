/* How a CTA of the grouped kernels goes through its stages; grouped.cuh says what they are.
 *
 * A warp has CT tiles of 16 outputs, all inputs and all rows of the item. */
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

/* Where the compiler keeps three CTAs' registers without spilling; elsewhere two are asked for. */
#if __CUDA_ARCH__ == 900
#define EXL3_CTAS(C) C::CTAS
#else
#define EXL3_CTAS(C) 2
#endif

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
    /* A warp's tiles of a stage, and room for the one that it reads ahead at the end and never uses: without
       it that read would meet what the other side's warps are copying. Only fast rates (to 10) read ahead. */
    static constexpr int warp_bytes(int k2) {
        const int own = KT * CT * k2, ahead = (KT * CT + 1) * (k2 < 10 ? k2 : 10);
        return 16 * (own > ahead ? own : ahead);
    }
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
        if (i + EACH <= NG || first + i < NG) copy16(put + i * C::KT * 256, at + i * s.group);
}

template <typename C, int K2>
__device__ __forceinline__ void copy_weights(const Side &s, const char *from, uint32_t to, int lane) {
    const int each = C::CT * (K2 ? K2 : s.k2), all = C::KT * each;
    if constexpr (K2 != 0) {
#pragma unroll
        for (int i = 0; i < C::KT * C::CT * K2; i += 32) {
            const int piece = i + lane, tile = piece / each;
            if (i + 32 <= all || piece < all)
                copy16(to + 16 * piece, from + tile * s.stride + 16 * (piece - tile * each));
        }
    } else {
        for (int piece = lane; piece < all; piece += 32) {
            const int tile = piece / each;
            copy16(to + 16 * piece, from + tile * s.stride + 16 * (piece - tile * each));
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
                for (int g = 0; g < NG; ++g) mma_fp16(d[t][g], a[K2 ? t & 1 : 0], b[g].x, b[g].y);
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

} // namespace exl3
