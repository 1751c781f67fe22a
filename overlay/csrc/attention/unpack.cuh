/* Codes of a record in shared memory to bf16 in shared memory, with few instructions of the pipe of logic
 * and permutation, which issues at half rate: two there and one product a pair of codes. */
#pragma once

#include "numbers.cuh"

namespace attention::many {

/* Codes FIRST and FIRST + 1 of a word as bf16, times 2^-120: each byte under its own sign's byte, so
 * that one shift and one mask put sign, exponent and mantissa in their places. */
template <int FIRST>
__device__ __forceinline__ uint32_t pair_of(uint32_t codes) {
    constexpr uint32_t selector = FIRST == 0 ? 0x9180 : 0xb3a2;
    return (permute(codes, selector) << 4) & 0x87f087f0u;
}

/* 16 codes of a group to 32 bytes, scales up to LAST_PLAIN; above, `enlarge` brings the rest. */
__device__ __forceinline__ void convert(uint4 codes, uint32_t scale, uint8_t *to) {
    const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
    const uint32_t by = any_nan(w) ? NAN2 : factor(scale) * 0x10001u; /* twice; not by the other pipe */
    uint32_t v[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = times(pair_of<0>(w[i]), by);
        v[2 * i + 1] = times(pair_of<2>(w[i]), by);
    }
    *reinterpret_cast<uint4 *>(to) = make_uint4(v[0], v[1], v[2], v[3]);
    *reinterpret_cast<uint4 *>(to + 16) = make_uint4(v[4], v[5], v[6], v[7]);
}

/* What `convert` wrote, times the second factor. */
__device__ __forceinline__ void enlarge(uint32_t scale, uint8_t *to) {
    const uint32_t rest = both(factor_more(scale));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint4 v = *reinterpret_cast<const uint4 *>(to + 16 * i);
        v.x = times(v.x, rest), v.y = times(v.y, rest), v.z = times(v.z, rest), v.w = times(v.w, rest);
        *reinterpret_cast<uint4 *>(to + 16 * i) = v;
    }
}

/* Of a record's seven scales, that of `group`. */
__device__ __forceinline__ uint32_t scale_of(uint2 scales, int group) {
    return __byte_perm(scales.x, scales.y, static_cast<uint32_t>(group)) & 0xff;
}

__device__ __forceinline__ bool any_large(uint2 scales) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 7; ++i) most = max(most, (i < 4 ? scales.x >> 8 * i : scales.y >> 8 * (i - 4)) & 0xff);
    return most > LAST_PLAIN;
}

} // namespace attention::many
