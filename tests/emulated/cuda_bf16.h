/* bf16 on the host: to nearest, ties to even. */
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};

namespace emulated {

inline uint16_t rounded(double value) {
    const float wide = static_cast<float>(value); /* exact for products of two bf16 within float's range */
    if (std::isnan(wide)) return 0x7fff;
    uint32_t bits;
    std::memcpy(&bits, &wide, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float widened(uint32_t half) {
    const uint32_t bits = half << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

/* The lower or upper value of a pair. */
inline float of_pair(uint32_t pair, int upper) { return widened(upper ? pair >> 16 : pair & 0xffff); }

} // namespace emulated

inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {emulated::rounded(value)}; }
inline float __bfloat162float(__nv_bfloat16 value) { return emulated::widened(value.bits); }
