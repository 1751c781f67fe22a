/* What mHC's instructions are defined to do. */
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
    uint16_t bits;
};

namespace mhc {

inline uint32_t rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline uint32_t pack(float low, float high) { return rounded(low) | rounded(high) << 16; }
inline float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
inline float reciprocal(float x) { return 1.f / x; }
inline int32_t arrive(int32_t *counter) { return atomicAdd(counter, 1); }

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated::multiply(d, a, b0, b1, low_of);
}

inline float4 load4(const float *at) { return {at[0], at[1], at[2], at[3]}; }

inline uint2 load_four(const void *at) {
    uint2 v;
    std::memcpy(&v, at, 8);
    return v;
}

} // namespace mhc
