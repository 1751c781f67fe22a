/* From a head's sums to its output: what divides them, and RoPE turned back. */
#pragma once

#include "../common/ptx.cuh"
#include "launch.hpp"

namespace attention {

using namespace ptx;

constexpr float NONE = -INFINITY;

/* The token's cosine and sine of RoPE pair `pair`. */
__device__ __forceinline__ float2 turn_of(const Launch &p, int token, int pair) {
    const int64_t at = p.positions_wide ? static_cast<const int64_t *>(p.positions)[token]
                                        : static_cast<const int32_t *>(p.positions)[token];
    const int64_t place = at * p.cos_sin_row + pair;
    if (p.cos_sin_float) {
        const float *table = static_cast<const float *>(p.cos_sin) + place;
        return make_float2(table[0], table[32]);
    }
    const __nv_bfloat16 *table = static_cast<const __nv_bfloat16 *>(p.cos_sin) + place;
    return make_float2(__bfloat162float(table[0]), __bfloat162float(table[32]));
}

/* Turned back: (x, y) by minus the pair's angle. */
__device__ __forceinline__ uint32_t packed_pair(const Launch &p, float x, float y, float2 turn) {
    return p.cos_sin ? pack_bf16(x * turn.x + y * turn.y, y * turn.x - x * turn.y) : pack_bf16(x, y);
}

/* What divides a head's sums: 0 where there is neither record nor sink. */
__device__ __forceinline__ float share(float peak, float total, float sink) {
    sink *= 1.4426950408889634f;
    float top = fmaxf(peak, sink);
    top = top == NONE ? 0.f : top;
    const float fade = power(peak - top), below = total * fade + power(sink - top);
    return below == 0.f ? 0.f : fade / below;
}

} // namespace attention
