/* The new streams of four columns of one token. */
#pragma once

#include "api.h"
#include "ptx.cuh"

namespace mhc {

struct Coefficients {
    float4 post, comb[4];
};

struct Columns {
    uint2 stream[4], x; /* old */
};

__device__ __forceinline__ Coefficients coefficients(const mhc_args &a, int token, bool live) {
    Coefficients found{};
    if (a.x && live) {
        found.post = __ldg(reinterpret_cast<const float4 *>(a.post) + token);
#pragma unroll
        for (int i = 0; i < 4; ++i) found.comb[i] = __ldg(reinterpret_cast<const float4 *>(a.comb) + 4 * token + i);
    }
    return found;
}

__device__ __forceinline__ Columns columns(const mhc_args &a, int token, int h, bool live) {
    Columns found{};
    if (live) {
        const auto *residual = static_cast<const __nv_bfloat16 *>(a.residual) + static_cast<int64_t>(token) * 4 * a.hidden + h;
#pragma unroll
        for (int i = 0; i < 4; ++i) found.stream[i] = load_four(residual + i * a.hidden);
        if (a.x) found.x = load_four(static_cast<const __nv_bfloat16 *>(a.x) + static_cast<int64_t>(token) * a.hidden + h);
    }
    return found;
}

__device__ __forceinline__ float of(const float4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float of(const uint2 &v, int i) {
    const uint32_t pair = i < 2 ? v.x : v.y;
    return i & 1 ? high_of(pair) : low_of(pair);
}

/* bf16, as the model keeps them; the old ones where nothing is written back. */
__device__ __forceinline__ void renew(uint2 (&now)[4], const Columns &old, const Coefficients &by, bool write_back) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (!write_back) {
            now[j] = old.stream[j];
            continue;
        }
        float s[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float mixed = of(by.comb[0], j) * of(old.stream[0], c);
#pragma unroll
            for (int i = 1; i < 4; ++i) mixed += of(by.comb[i], j) * of(old.stream[i], c);
            s[c] = mixed + of(by.post, j) * of(old.x, c);
        }
        now[j] = {pack(s[0], s[1]), pack(s[2], s[3])};
    }
}

} // namespace mhc
