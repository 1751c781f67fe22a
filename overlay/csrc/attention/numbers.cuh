/* e4m3 codes with UE8M0 scales to bf16, by integers: exact but for what bf16 itself rounds.
 *
 * A code `s eeee mmm` becomes the bf16 `s 0000eeee mmm0000`: the value times 2^-120. One product with
 * 2^(scale - 7) gives the value while that is a bf16 (scale up to 134: values up to 57344); a second one
 * gives the rest. */
#pragma once

#include "../common/ptx.cuh"

namespace attention {

using namespace ptx;

constexpr int LAST_PLAIN = 134;       /* the largest scale of one product */
constexpr uint32_t NAN2 = 0x7fc07fc0; /* two bf16 NaNs */

/* First factor, one bf16. */
__device__ __forceinline__ uint32_t factor(uint32_t scale) {
    return (min(scale, static_cast<uint32_t>(LAST_PLAIN)) + 120) << 7;
}

/* Second factor: 2^(scale - 134), 1 below that, NaN of 255. */
__device__ __forceinline__ uint32_t factor_more(uint32_t scale) {
    const uint32_t more = max(scale, static_cast<uint32_t>(LAST_PLAIN)) - LAST_PLAIN;
    return scale == 255 ? 0x7fc0u : (more + 127) << 7;
}

__device__ __forceinline__ uint32_t both(uint32_t one) { return __byte_perm(one, 0, 0x1010); }

/* Of four codes, the upper and the lower bytes of their bf16 forms. */
struct Halves {
    uint32_t upper, lower;
};

__device__ __forceinline__ Halves halves(uint32_t codes) {
    return {(codes & 0x80808080u) | ((codes >> 4) & 0x07070707u), (codes << 4) & 0xf0f0f0f0u};
}

/* Codes 0 and 1, 2 and 3; and 0 and 2, 1 and 3. */
__device__ __forceinline__ uint32_t pair01(Halves h) { return __byte_perm(h.lower, h.upper, 0x5140); }
__device__ __forceinline__ uint32_t pair23(Halves h) { return __byte_perm(h.lower, h.upper, 0x7362); }
__device__ __forceinline__ uint32_t pair02(Halves h) { return __byte_perm(h.lower, h.upper, 0x6240); }
__device__ __forceinline__ uint32_t pair13(Halves h) { return __byte_perm(h.lower, h.upper, 0x7351); }

/* Whether a NaN (0x7F, 0xFF) is among 16 codes. Adding 1 turns a byte's highest bit over where its other
 * seven are set, or where a carry comes from such a byte. */
__device__ __forceinline__ bool any_nan(const uint32_t (&w)[4]) {
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) seen |= (w[i] + 0x01010101u) ^ w[i];
    return (seen & 0x80808080u) != 0;
}

} // namespace attention
