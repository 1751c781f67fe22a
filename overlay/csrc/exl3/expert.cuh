/* What the kernels of few rows and those of many know of an expert alike. */
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace exl3 {

/* A line of the table of experts: four int64, the last k2 and codebook. */
struct Matrix {
    const char *trellis;
    const __half *suh, *svh;
    int k2, codebook;
};

__device__ __forceinline__ Matrix matrix_at(const longlong2 *at) {
    const longlong2 a = __ldg(at), b = __ldg(at + 1);
    return Matrix{reinterpret_cast<const char *>(a.x), reinterpret_cast<const __half *>(a.y),
                  reinterpret_cast<const __half *>(b.x), static_cast<int>(b.y & 0xff),
                  static_cast<int>(b.y >> 8 & 0xff)};
}

/* silu(min(gate, L)) * clamp(up, -L, L); as torch.clamp, NaN stays NaN. */
__device__ __forceinline__ float gated(float gate, float up, float limit) {
    if (limit > 0.0f) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
    }
    return gate / (1.0f + __expf(-gate)) * up;
}

} // namespace exl3
