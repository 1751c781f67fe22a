/* Codes of a record in shared memory to bf16 in shared memory. */
#pragma once

#include "numbers.cuh"

namespace attention::many {

/* 16 codes of a group to 32 bytes. */
template <bool MORE>
__device__ __forceinline__ void convert(uint4 codes, uint32_t scale, uint8_t *to) {
    const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
    const uint32_t by = any_nan(w) ? NAN2 : both(factor(scale));
    uint32_t v[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Halves parts = halves(w[i]);
        v[2 * i] = times(pair01(parts), by);
        v[2 * i + 1] = times(pair23(parts), by);
    }
    if (MORE) {
        const uint32_t rest = both(factor_more(scale));
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = times(v[i], rest);
    }
    *reinterpret_cast<uint4 *>(to) = make_uint4(v[0], v[1], v[2], v[3]);
    *reinterpret_cast<uint4 *>(to + 16) = make_uint4(v[4], v[5], v[6], v[7]);
}

template <bool MORE>
__device__ __forceinline__ void convert_groups(const uint8_t *from, uint2 scales, uint8_t *to, uint4 &next) {
#pragma unroll 1
    for (int group = 0; group < 7; ++group) { /* short code: unrolled, it is fetched more slowly */
        const uint4 codes = next;
        next = *reinterpret_cast<const uint4 *>(from + (group + 1) * 64);
        const uint32_t four = group < 4 ? scales.x : scales.y;
        convert<MORE>(codes, four >> 8 * (group & 3) & 0xff, to + group * 128);
    }
}

} // namespace attention::many
