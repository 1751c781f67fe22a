/* The weight stream of a warp: packed k-tiles through a ring in shared memory into tensor-core products.
 *
 * For GB10 as for larger chips: two CTAs of eight warps per SM (at most 128 registers), each warp
 * with two or more stages in flight (K = 3: 2 CTAs * 8 warps * 2 stages * 1536 B = 48 KB per
 * SM; 8 KB are needed to cover its memory's latency), shared memory under 99 KB per CTA.
 */
#pragma once

#include "decode.cuh"

#include <type_traits>

namespace exl3 {

/* k-tiles a stage, stages of a warp's ring. Two k-tiles a turn of the loop where that fits twice into
 * a small SM: every instruction besides decoding is then shared by 128 weights a lane. */
__host__ __device__ constexpr int tiles_of(int k2) { return k2 == 4 || k2 == 6 || k2 == 8 ? 2 : 1; }
__host__ __device__ constexpr int stages_of(int k2) { return tiles_of(k2) == 1 && k2 <= 12 ? 4 : 3; }
__host__ __device__ constexpr int ring_bytes(int k2) { return stages_of(k2) * tiles_of(k2) * 128 * k2; }

/* What one warp streams: `count` k-tiles (an even number) of one chunk. */
struct Stream {
    const char *from;   /* the first k-tile's 128 * k2 bytes of this chunk */
    int64_t stride;     /* bytes to the next k-tile */
    int count;
    uint32_t *ring;     /* ring_bytes(k2) */
    const uint2 *x;     /* the lane's operands of the first k-tile (shared memory) */
};

template <int NB>
struct Sums {
    float d[8][NB][4]; /* [tile of 16 outputs][8 rows][operand order] */
    float s0[NB][4];   /* sums of the inputs */
};

/* Where a lane copies from: its pieces of 16 bytes of a stage, numbered through the stage's k-tiles. */
template <int K2>
struct Source {
    static constexpr int PIECES = 8 * K2;        /* of a k-tile */
    static constexpr bool STRADDLES = tiles_of(K2) == 2 && PIECES % 32 != 0;
    const char *first, *second, *both;
    __device__ __forceinline__ Source(const char *from, int64_t stride, int lane)
        : first(from + 16 * lane), second(from + stride + 16 * (lane - PIECES)),
          both(lane < PIECES % 32 ? first : second) {}
    __device__ __forceinline__ void advance(int64_t by) {
        first += by;
        if (tiles_of(K2) == 2) second += by;
        if (STRADDLES) both += by;
    }
    __device__ __forceinline__ void copy(uint32_t to, int lane) const {
#pragma unroll
        for (int i = 0; i < tiles_of(K2) * PIECES; i += 32) {
            const char *from = i + 32 <= PIECES ? first : i >= PIECES ? second : STRADDLES ? both : first;
            if (i + 32 <= tiles_of(K2) * PIECES || lane < tiles_of(K2) * PIECES - i)
                copy16(to + 16u * i, from + 16 * i);
        }
    }
};

/* Any rate: one k-tile a stage. */
template <>
struct Source<0> {
    const char *first;
    __device__ __forceinline__ Source(const char *from, int64_t, int lane) : first(from + 16 * lane) {}
    __device__ __forceinline__ void advance(int64_t by) { first += by; }
    __device__ __forceinline__ void copy(uint32_t to, int lane, int k2) const {
        for (int i = 0; i < 8 * k2 - lane; i += 32) copy16(to + 16u * i, first + 16 * i);
    }
};

template <int K2>
__device__ __forceinline__ void copy_stage(const Source<K2> &source, uint32_t to, int k2, int lane) {
    if constexpr (K2 != 0)
        source.copy(to, lane);
    else
        source.copy(to, lane, k2);
}

template <int K2>
struct Shape {
    static constexpr int TILES = K2 ? tiles_of(K2) : 1;
    static constexpr int STAGES = K2 ? stages_of(K2) : 3;
};

/* Starts a warp's first stages; the caller may do other work before stream_run. */
template <int K2>
__device__ __forceinline__ void stream_start(const Stream &s, int k2, int lane) {
    using S = Shape<K2>;
    const uint32_t bytes = S::TILES * 128u * static_cast<uint32_t>(K2 ? K2 : k2);
    const uint32_t ring = shared_address(s.ring) + 16u * lane;
    Source<K2> source(s.from, s.stride, lane);
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; ++i) {
        if (i * S::TILES < s.count) copy_stage<K2>(source, ring + i * bytes, k2, lane);
        copy_commit();
        source.advance(S::TILES * s.stride);
    }
}

/* The first k-tile of a warp's stream as operands, decoded before its inputs are there. */
struct First {
    uint32_t a[8][4];
};

/* After stream_start, for tuned rates; the others decode in stream_run. */
template <int K2>
__device__ __forceinline__ void decode_first(const Stream &s, int lane, First &first) {
    if constexpr (K2 != 0) {
        copy_wait<Shape<K2>::STAGES - 2>();
        __syncwarp();
        const Window<K2> window(lane);
        const char *stage = reinterpret_cast<const char *>(s.ring);
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
            uint32_t w[window.WORDS], st[8];
#pragma unroll
            for (int i = 0; i < window.WORDS; ++i)
                w[i] = *reinterpret_cast<const uint32_t *>(stage + window.at[i] + tile * 16 * K2);
            window.states(w, st);
            first.a[tile][0] = mul1_pair(st[0], st[1]), first.a[tile][1] = mul1_pair(st[4], st[5]);
            first.a[tile][2] = mul1_pair(st[2], st[3]), first.a[tile][3] = mul1_pair(st[6], st[7]);
        }
    }
}

/* Operands of the next 8 rows lie 32 further, those of the next k-tile STEP. BEGUN: `first` is what
 * decode_first left. */
template <int K2, int NB, int STEP, bool BEGUN = false>
__device__ __forceinline__ void stream_run(const Stream &s, int k2, int codebook, int lane,
                                           Sums<NB> &sums, const First *first = nullptr) {
    using S = Shape<K2>;
    constexpr int AHEAD = (S::STAGES - 1) * S::TILES;
    constexpr int EARLY = 4;
    const int bytes = S::TILES * 128 * (K2 ? K2 : k2);
    const uint32_t ring = shared_address(s.ring) + 16u * lane;
    Source<K2> source(s.from + AHEAD * s.stride, s.stride, lane);
    const uint2 *x = s.x;
    const uint32_t ones[4] = {0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u};
    int read = 0, write = (S::STAGES - 1) * bytes;
    const Window<K2 ? K2 : 4> window(lane);
    const auto turn_of = [&](const char *stage, auto from) {
        constexpr int FROM = decltype(from)::value; /* k-tiles before it are decoded */
        const char *at[window.WORDS];
#pragma unroll
        for (int i = 0; i < window.WORDS; ++i) at[i] = stage + window.at[i];
        /* Words are loaded a few tiles before they are used: shared memory takes its time. */
        uint32_t w[EARLY][window.WORDS];
        const auto load = [&](int number) {
#pragma unroll
            for (int i = 0; i < window.WORDS; ++i)
                w[number % EARLY][i] = *reinterpret_cast<const uint32_t *>(at[i] + number * 16 * K2);
        };
        if constexpr (K2 != 0 && FROM < S::TILES) {
#pragma unroll
            for (int number = 0; number < EARLY; ++number) load(8 * FROM + number);
        }
#pragma unroll
        for (int turn = 0; turn < S::TILES; ++turn) {
            uint32_t b[NB][2];
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                const uint2 v = x[32 * nb];
                b[nb][0] = v.x, b[nb][1] = v.y;
            }
            x += STEP;
            if constexpr (K2 != 0) {
#pragma unroll
                for (int tile = 0; tile < 8; ++tile) {
                    const int number = 8 * turn + tile;
                    if (turn < FROM) {
#pragma unroll
                        for (int nb = 0; nb < NB; ++nb) mma_fp16(sums.d[tile][nb], first->a[tile], b[nb][0], b[nb][1]);
                        continue;
                    }
                    uint32_t st[8];
                    window.states(w[number % EARLY], st);
                    if (number + EARLY < 8 * S::TILES) load(number + EARLY);
                    const uint32_t a[4] = {mul1_pair(st[0], st[1]), mul1_pair(st[4], st[5]),
                                           mul1_pair(st[2], st[3]), mul1_pair(st[6], st[7])};
#pragma unroll
                    for (int nb = 0; nb < NB; ++nb) mma_fp16(sums.d[tile][nb], a, b[nb][0], b[nb][1]);
                }
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) mma_fp16(sums.s0[nb], ones, b[nb][0], b[nb][1]);
            } else {
#pragma unroll
                for (int tile = 0; tile < 8; ++tile) {
                    const uint32_t *words = reinterpret_cast<const uint32_t *>(stage) + tile * 4 * k2;
                    const uint32_t a[4] = {any_pair(words, k2, codebook, 8 * lane),
                                           any_pair(words, k2, codebook, 8 * lane + 4),
                                           any_pair(words, k2, codebook, 8 * lane + 2),
                                           any_pair(words, k2, codebook, 8 * lane + 6)};
#pragma unroll
                    for (int nb = 0; nb < NB; ++nb) mma_fp16(sums.d[tile][nb], a, b[nb][0], b[nb][1]);
                }
            }
        }
    };
    const auto next_stage = [&](int left) {
        copy_wait<S::STAGES - 2>();
        __syncwarp(); /* this stage has landed for all lanes, and all have left the one before */
        if (left > AHEAD) copy_stage<K2>(source, ring + write, k2, lane);
        copy_commit();
        source.advance(S::TILES * s.stride);
        write = write + bytes == S::STAGES * bytes ? 0 : write + bytes;
        const char *stage = reinterpret_cast<const char *>(s.ring) + read;
        read = read + bytes == S::STAGES * bytes ? 0 : read + bytes;
        return stage;
    };
    int left = s.count;
    if constexpr (BEGUN && K2 != 0) {
        if (left > 0) turn_of(next_stage(left), std::integral_constant<int, 1>{});
        left -= S::TILES;
    }
#pragma unroll 1
    for (; left > 0; left -= S::TILES) turn_of(next_stage(left), std::integral_constant<int, 0>{});
    copy_wait<0>();
    if constexpr (K2 != 0) {
#pragma unroll
        for (int tile = 0; tile < 8; ++tile)
#pragma unroll
            for (int nb = 0; nb < NB; ++nb)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums.d[tile][nb][i] = fmaf(MUL1_SCALE, sums.d[tile][nb][i], MUL1_OFFSET * sums.s0[nb][i]);
    }
}

/* Tuned rates of mul1 get code of their own, all else the general one. K2_CALL names the rate. */
#define EXL3_FOR_RATE(k2, codebook, CALL)        \
    switch ((codebook) == 0 ? (k2) : 0) {        \
    case 4: CALL(4); break;                      \
    case 6: CALL(6); break;                      \
    case 8: CALL(8); break;                      \
    case 10: CALL(10); break;                    \
    case 12: CALL(12); break;                    \
    case 16: CALL(16); break;                    \
    default: CALL(0); break;                     \
    }

__device__ __forceinline__ void start_stream(const Stream &s, int k2, int codebook, int lane) {
#define EXL3_START(K2) stream_start<K2>(s, k2, lane)
    EXL3_FOR_RATE(k2, codebook, EXL3_START)
#undef EXL3_START
}

__device__ __forceinline__ void decode_begin(const Stream &s, int k2, int codebook, int lane, First &first) {
#define EXL3_FIRST(K2) decode_first<K2>(s, lane, first)
    EXL3_FOR_RATE(k2, codebook, EXL3_FIRST)
#undef EXL3_FIRST
}

template <int NB, int STEP, bool BEGUN = false>
__device__ __forceinline__ void run_stream(const Stream &s, int k2, int codebook, int lane, Sums<NB> &sums,
                                           const First *first = nullptr) {
#define EXL3_RUN(K2) stream_run<K2, NB, STEP, BEGUN>(s, k2, codebook, lane, sums, first)
    EXL3_FOR_RATE(k2, codebook, EXL3_RUN)
#undef EXL3_RUN
}

} // namespace exl3
