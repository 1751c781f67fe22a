/* The new streams of four columns: what both roles compute, bit for bit alike. */
#pragma once

#include "../common/ptx.cuh"
#include "api.h"

namespace mhc {

using namespace ptx;

constexpr int THREADS = 256, WARPS = THREADS / 32, STREAMS = MHC_STREAMS, MIXES = MHC_MIXES, COLUMNS = MHC_COLUMNS;
constexpr int SQUARES = MIXES; /* the column of a row's sum of squares */

__device__ __forceinline__ float lower(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float upper(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

/* Four bf16 from column `h` on; zeros where `there` is false. What the launch before may have written is read
 * past L1 and as no constant (`ldcg`): it may still be written when this one starts. */
__device__ __forceinline__ uint2 four_of(const void *values, int64_t row, int hidden, int h, bool there) {
    const auto *at = static_cast<const __nv_bfloat16 *>(values) + row * hidden + h;
    return there ? __ldcg(reinterpret_cast<const uint2 *>(at)) : make_uint2(0, 0);
}

/* What four columns of a row are made of. */
struct Old {
    uint2 stream[STREAMS], out;
};

template <bool POST>
__device__ __forceinline__ Old old_of(const mhc_args &a, int row, int h, bool there) {
    Old old;
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) old.stream[i] = four_of(a.residual, row * STREAMS + i, a.hidden, h, there);
    if constexpr (POST) old.out = four_of(a.x, row, a.hidden, h, there);
    return old;
}

/* COUNT numbers; zeros where `there` is false. */
template <int COUNT>
__device__ __forceinline__ void take(float (&to)[COUNT], const float *at, bool there) {
    static_assert(COUNT == 2 || COUNT == 4);
    if constexpr (COUNT == 4) {
        const float4 v = there ? __ldcg(reinterpret_cast<const float4 *>(at)) : make_float4(0.f, 0.f, 0.f, 0.f);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
        const float2 v = there ? __ldcg(reinterpret_cast<const float2 *>(at)) : make_float2(0.f, 0.f);
        to[0] = v.x, to[1] = v.y;
    }
}

/* Coefficients of EACH new streams. */
template <int EACH>
struct Mix {
    float post[EACH], of[STREAMS][EACH];
};

template <int EACH>
__device__ __forceinline__ Mix<EACH> mix_of(const mhc_args &a, int row, int first, bool there) {
    Mix<EACH> mix;
    take(mix.post, a.post + row * STREAMS + first, there);
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) take(mix.of[i], a.comb + (row * STREAMS + i) * STREAMS + first, there);
    return mix;
}

template <int EACH>
__device__ __forceinline__ uint32_t renewed(const Mix<EACH> &mix, int s, const uint32_t (&old)[STREAMS], uint32_t out) {
    float low = mix.of[0][s] * lower(old[0]), high = mix.of[0][s] * upper(old[0]);
#pragma unroll
    for (int i = 1; i < STREAMS; ++i)
        low = fmaf(mix.of[i][s], lower(old[i]), low), high = fmaf(mix.of[i][s], upper(old[i]), high);
    return pack_bf16(fmaf(mix.post[s], lower(out), low), fmaf(mix.post[s], upper(out), high));
}

/* New stream `s` of the mix's: four columns of it, rounded to bf16 as the model keeps it. */
template <int EACH>
__device__ __forceinline__ uint2 renewed(const Mix<EACH> &mix, int s, const Old &old) {
    const uint32_t first[STREAMS] = {old.stream[0].x, old.stream[1].x, old.stream[2].x, old.stream[3].x};
    const uint32_t second[STREAMS] = {old.stream[0].y, old.stream[1].y, old.stream[2].y, old.stream[3].y};
    return make_uint2(renewed(mix, s, first, old.out.x), renewed(mix, s, second, old.out.y));
}

__device__ __forceinline__ uint32_t mixed(float4 pre, const uint32_t (&now)[STREAMS]) {
    const auto one = [&](float a, float b, float c, float d) {
        return fmaf(pre.y, b, pre.x * a) + fmaf(pre.w, d, pre.z * c);
    };
    return pack_bf16(one(lower(now[0]), lower(now[1]), lower(now[2]), lower(now[3])),
                     one(upper(now[0]), upper(now[1]), upper(now[2]), upper(now[3])));
}

/* Four columns of all streams, mixed by `pre`. */
__device__ __forceinline__ uint2 mixed(float4 pre, const uint2 (&now)[STREAMS]) {
    const uint32_t first[STREAMS] = {now[0].x, now[1].x, now[2].x, now[3].x};
    const uint32_t second[STREAMS] = {now[0].y, now[1].y, now[2].y, now[3].y};
    return make_uint2(mixed(pre, first), mixed(pre, second));
}

__device__ __forceinline__ float squares_of(uint2 v) {
    const float a = lower(v.x), b = upper(v.x), c = lower(v.y), d = upper(v.y);
    return fmaf(a, a, b * b) + fmaf(c, c, d * d);
}

} // namespace mhc
