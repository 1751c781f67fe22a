/* A row's 24 projections to its coefficients: 0-3 make the next pre-mix, 4-7 the post mix, 8-23 the
 * residual mix. */
#pragma once

#include "api.h"
#include "ptx.cuh"

namespace mhc {

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.f + __expf(-x)); }

/* Of four, by two: the unit that divides is slow. */
__device__ __forceinline__ void reciprocals(float (&to)[4], const float (&of)[4]) {
    const float ab = reciprocal(of[0] * of[1]), cd = reciprocal(of[2] * of[3]);
    to[0] = of[1] * ab, to[1] = of[0] * ab, to[2] = of[3] * cd, to[3] = of[2] * cd;
}

/* The residual mix, in place: softmax over its rows, then columns and rows divided by their sums (and eps)
 * in turn. It stays as it begins, with a factor for each row and column: where a line's own factor was
 * 1 / before, its sum times that becomes one by what is added up here. */
__device__ __forceinline__ void sinkhorn(float (&m)[4][4], float eps, int iterations) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float top = fmaxf(fmaxf(m[i][0], m[i][1]), fmaxf(m[i][2], m[i][3]));
#pragma unroll
        for (int j = 0; j < 4; ++j) m[i][j] = __expf(m[i][j] - top);
        const float by = reciprocal((m[i][0] + m[i][1]) + (m[i][2] + m[i][3]));
#pragma unroll
        for (int j = 0; j < 4; ++j) m[i][j] = m[i][j] * by + eps;
    }
    float w[4] = {1.f, 1.f, 1.f, 1.f}, z[4], u[4] = {1.f, 1.f, 1.f, 1.f}, v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) z[j] = ((eps + m[0][j]) + m[1][j]) + (m[2][j] + m[3][j]);
    reciprocals(v, z);
#pragma unroll 1
    for (int step = 1; step < iterations; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = ((eps * w[i] + m[i][0] * v[0]) + m[i][1] * v[1]) + (m[i][2] * v[2] + m[i][3] * v[3]);
        reciprocals(u, w);
#pragma unroll
        for (int j = 0; j < 4; ++j) z[j] = ((eps * z[j] + m[0][j] * u[0]) + m[1][j] * u[1]) + (m[2][j] * u[2] + m[3][j] * u[3]);
        reciprocals(v, z);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) m[i][j] = m[i][j] * u[i] * v[j];
}

} // namespace mhc
