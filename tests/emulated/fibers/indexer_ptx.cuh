/* What the indexer's instructions are defined to do. */
#pragma once

#include <cuda_runtime.h>

namespace indexer {

/* Of every fp16, its value. */
struct Halves {
    float value[1 << 16];
    Halves() {
        for (int bits = 0; bits < 1 << 16; ++bits) {
            const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
            const float size = exponent ? std::ldexp(1024.f + mantissa, exponent - 25) : std::ldexp(1.f * mantissa, -24);
            value[bits] = bits & 0x8000 ? -size : size;
        }
    }
};
inline const Halves halves;

inline void mma(float (&d)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
    emulated::multiply(d, words, b0, b1, [](uint32_t bits) { return halves.value[bits]; });
}

inline uint4 load16(const void *at) {
    uint4 v;
    std::memcpy(&v, at, 16);
    return v;
}

inline void let_next_start() {}
inline void wait_for_previous() {}

} // namespace indexer
