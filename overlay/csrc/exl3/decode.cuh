/* From trellis bits to tensor-core operands.
 *
 * A tile of 16 inputs x 16 outputs is a ring of 128 * k2 bits, read MSB first from little-endian
 * 32-bit words. Lane t of a warp owns ring positions 8t..8t+7, which are exactly its eight values
 * of the m16 x k16 operand of W_hat^T: j = 0,1 -> a0; 4,5 -> a1; 2,3 -> a2; 6,7 -> a3. The state
 * of position j is the 16 bits that end 4 * k2 * (t + 1) - K * (7 - j) bits into the ring.
 *
 * mul1's value is affine in the byte sum B of state * 0x83DCD12D. Tuned rates hand 1024 + B (an
 * exact fp16: 0x6400 + B) to the tensor cores; scale and offset are applied to the sums.
 */
#pragma once

#include "../common/ptx.cuh"

namespace exl3 {

using namespace ptx;

constexpr uint32_t MUL1 = 0x83DCD12Du;
constexpr uint32_t MCG = 0xCBAC1FEDu;
/* Half constants 0x1EEE and 0xC931 of the mul1 codebook, as they are. */
constexpr float MUL1_SCALE = 1.732421875f / 256.0f;
constexpr float MUL1_OFFSET = -10.3828125f;

template <int K2>
struct Window; /* tuned rates: which words a lane loads, and its eight states out of them */

/* Byte offset in the tile of the word `back` words before the one that holds ring bit `end` - 1. */
template <int K2>
__device__ __forceinline__ uint32_t word_offset(int end, int back) {
    constexpr int WORDS = 4 * K2;
    return 4u * static_cast<uint32_t>((((end - 1) >> 5) - back + WORDS) % WORDS);
}

/* Unused low bits of the word that holds ring bit `end` - 1. */
__device__ __forceinline__ uint32_t word_shift(int end) { return static_cast<uint32_t>(-end) & 31u; }

__device__ __forceinline__ uint32_t low(uint32_t v) { return v & 0xffffu; }
__device__ __forceinline__ uint32_t middle(uint32_t v) { return __byte_perm(v, 0u, 0x4421); }
__device__ __forceinline__ uint32_t high(uint32_t v) { return v >> 16; }

template <>
struct Window<4> {
    static constexpr int WORDS = 2;
    uint32_t at[WORDS], by;
    __device__ explicit Window(int lane) {
        const int end = 16 * (lane + 1);
        at[0] = word_offset<4>(end, 0);
        at[1] = word_offset<4>(end, 1);
        by = word_shift(end);
    }
    __device__ __forceinline__ void states(const uint32_t (&w)[WORDS], uint32_t (&s)[8]) const {
        const uint32_t a = __funnelshift_r(w[0], w[1], by);
        const uint32_t b = a >> 2, c = a >> 4, d = a >> 6;
        s[7] = low(a), s[6] = low(b), s[5] = low(c), s[4] = low(d);
        s[3] = middle(a), s[2] = middle(b), s[1] = middle(c), s[0] = middle(d);
    }
};

template <>
struct Window<6> {
    static constexpr int WORDS = 2;
    uint32_t at[WORDS], by, top;
    __device__ explicit Window(int lane) {
        const int end = 24 * (lane + 1);
        at[0] = word_offset<6>(end, 0);
        at[1] = word_offset<6>(end, 1);
        by = word_shift(end);
        top = by + 18u;
    }
    __device__ __forceinline__ void states(const uint32_t (&w)[WORDS], uint32_t (&s)[8]) const {
        const uint32_t a = __funnelshift_r(w[0], w[1], by);
        const uint32_t b = shift64(w[0], w[1], top);
        s[7] = low(a), s[6] = low(a >> 3), s[5] = low(a >> 6), s[4] = low(a >> 9);
        s[3] = low(a >> 12), s[2] = low(a >> 15), s[1] = low(b), s[0] = low(b >> 3);
    }
};

template <>
struct Window<8> {
    static constexpr int WORDS = 2;
    uint32_t at[WORDS];
    __device__ explicit Window(int lane) {
        const int end = 32 * (lane + 1);
        at[0] = word_offset<8>(end, 0);
        at[1] = word_offset<8>(end, 1);
    }
    __device__ __forceinline__ void states(const uint32_t (&w)[WORDS], uint32_t (&s)[8]) const {
        const uint32_t a = __funnelshift_r(w[0], w[1], 12), b = __funnelshift_r(w[0], w[1], 24);
        s[7] = low(w[0]), s[5] = middle(w[0]), s[3] = high(w[0]);
        s[4] = low(a), s[2] = middle(a), s[0] = high(a);
        s[6] = low(w[0] >> 4), s[1] = low(b);
    }
};

template <>
struct Window<10> {
    static constexpr int WORDS = 4;
    uint32_t at[WORDS], by, top;
    __device__ explicit Window(int lane) {
        const int end = 40 * (lane + 1);
        at[0] = word_offset<10>(end, 0);
        at[1] = word_offset<10>(end, 1);
        by = word_shift(end);
        const uint32_t from = by + 20u; /* the four states before, in their own pair of words */
        at[2] = word_offset<10>(end, static_cast<int>(from >> 5));
        at[3] = word_offset<10>(end, static_cast<int>(from >> 5) + 1);
        top = from & 31u;
    }
    __device__ __forceinline__ void states(const uint32_t (&w)[WORDS], uint32_t (&s)[8]) const {
        const uint32_t a = __funnelshift_r(w[0], w[1], by);
        const uint32_t b = __funnelshift_r(w[2], w[3], top);
        s[7] = low(a), s[6] = low(a >> 5), s[5] = low(a >> 10), s[4] = low(a >> 15);
        s[3] = low(b), s[2] = low(b >> 5), s[1] = low(b >> 10), s[0] = low(b >> 15);
    }
};

template <>
struct Window<12> {
    static constexpr int WORDS = 3;
    uint32_t at[WORDS], by, mid, top;
    __device__ explicit Window(int lane) {
        const int end = 48 * (lane + 1);
        for (int i = 0; i < WORDS; ++i) at[i] = word_offset<12>(end, i);
        by = word_shift(end);
        mid = by + 18u;
        top = by + 4u;
    }
    __device__ __forceinline__ void states(const uint32_t (&w)[WORDS], uint32_t (&s)[8]) const {
        const uint32_t a = __funnelshift_r(w[0], w[1], by);
        const uint32_t b = shift64(w[0], w[1], mid);
        const uint32_t c = __funnelshift_r(w[1], w[2], top);
        s[7] = low(a), s[6] = low(a >> 6), s[5] = low(a >> 12);
        s[4] = low(b), s[3] = low(b >> 6), s[2] = low(b >> 12);
        s[1] = low(c), s[0] = low(c >> 6);
    }
};

template <>
struct Window<16> {
    static constexpr int WORDS = 3;
    uint32_t at[WORDS];
    __device__ explicit Window(int lane) {
        const int end = 64 * (lane + 1);
        for (int i = 0; i < WORDS; ++i) at[i] = word_offset<16>(end, i);
    }
    __device__ __forceinline__ void states(const uint32_t (&w)[WORDS], uint32_t (&s)[8]) const {
        s[7] = low(w[0]), s[6] = middle(w[0]), s[5] = high(w[0]);
        s[4] = low(__funnelshift_r(w[0], w[1], 24));
        s[3] = low(w[1]), s[2] = middle(w[1]), s[1] = high(w[1]);
        s[0] = low(__funnelshift_r(w[1], w[2], 24));
    }
};

/* Two states to a pair of fp16 1024 + B. Packed by an fp16 sum, (b, b) * (0, 1) + (a, 0), it was no
 * faster on an H200: that takes a slot of the integer multiplier's pipe. Nor not packed at all, a value
 * a word and twice the products: 8 % fewer instructions, 2 % more time. */
__device__ __forceinline__ uint32_t mul1_pair(uint32_t lo, uint32_t hi) {
    const uint32_t b = __dp4a(lo * MUL1, 0x01010101u, 0x64006400u);
    return __dp4a(hi * MUL1, 0x01010101u, 0u) * 65536u + b;
}

/* Any rate and codebook ------------------------------------------------------------------- */

/* fp16 bits of a state, exactly as the format defines them. */
__device__ __forceinline__ uint32_t codebook_value(uint32_t state, int codebook) {
    if (codebook == 0) {
        const uint32_t sum = __dp4a(state * MUL1, 0x01010101u, 0x6400u);
        const __half v = __hfma(__ushort_as_half(static_cast<unsigned short>(sum)),
                                __ushort_as_half(0x1EEE), __ushort_as_half(0xC931));
        return __half_as_ushort(v);
    }
    uint32_t x = codebook == 1 ? state * MCG : state * 89226354u + 64248484u;
    x = (x & 0x8FFF8FFFu) ^ 0x3B603B60u;
    const __half v = __hadd(__ushort_as_half(static_cast<unsigned short>(x)),
                            __ushort_as_half(static_cast<unsigned short>(x >> 16)));
    return __half_as_ushort(v);
}

/* The 16 ring bits that end at position i (of a tile of 4 * k2 words). */
__device__ __forceinline__ uint32_t ring_state(const uint32_t *tile, int k2, int i) {
    /* Half rates: the odd positions append one bit more. */
    const int end = (i + 1) * (k2 >> 1) + (k2 & 1) * ((i + 1) >> 1);
    const int words = 4 * k2;
    /* end may be 0..: the word of bit end - 1, around the ring. */
    const int at = (end - 1 + 32 * words) >> 5;
    const uint32_t lo = tile[at % words], hi = tile[(at - 1) % words];
    return __funnelshift_r(lo, hi, word_shift(end)) & 0xffffu;
}

__device__ __forceinline__ uint32_t any_pair(const uint32_t *tile, int k2, int codebook, int i) {
    return codebook_value(ring_state(tile, k2, i), codebook) |
           codebook_value(ring_state(tile, k2, i + 1), codebook) << 16;
}

} // namespace exl3
