/* A row's coefficients from its 24 projections, 32 columns in shared memory. */
#pragma once

#include "streams.cuh"

namespace mhc {

constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.f + power(-x * LOG2E)); }

/* Columns from `first` on, scaled and moved. */
__device__ __forceinline__ float4 moved(const float *row, int first, float gain, const float *base) {
    const float4 v = *reinterpret_cast<const float4 *>(row + first);
    return {fmaf(v.x, gain, base[first]), fmaf(v.y, gain, base[first + 1]), fmaf(v.z, gain, base[first + 2]),
            fmaf(v.w, gain, base[first + 3])};
}

/* What is the same for all rows: in shared memory, so that nothing is waited for when the sums are there. */
struct Constants {
    float base[MIXES], scale[3];
};

__device__ __forceinline__ float norm_of(const float *row, const mhc_args &a) {
    return rsqrtf(fmaf(row[SQUARES], reciprocal(static_cast<float>(STREAMS * a.hidden)), a.rms_eps));
}

/* `gate`: the pre-mix's projections 0 to 3, or post's 4 to 7. */
__device__ __forceinline__ float4 gates(const float *row, const mhc_args &a, int gate, const Constants &c) {
    const float4 v = moved(row, 4 * gate, norm_of(row, a) * c.scale[gate], c.base);
    return {sigmoid(v.x), sigmoid(v.y), sigmoid(v.z), sigmoid(v.w)};
}

/* Softmax of four, and `eps` more each. */
__device__ __forceinline__ void soften(float (&m)[STREAMS], float4 v, float eps) {
    const float top = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    m[0] = power((v.x - top) * LOG2E), m[1] = power((v.y - top) * LOG2E);
    m[2] = power((v.z - top) * LOG2E), m[3] = power((v.w - top) * LOG2E);
    const float by = reciprocal((m[0] + m[1]) + (m[2] + m[3]));
#pragma unroll
    for (float &one : m) one = fmaf(one, by, eps);
}

/* Factors of four lines, each `by` of it: the sum of a line divides it, so its factor is the product of the other
 * three sums by the product of all. The unit that divides is slow; meanwhile the crossing lines are added up. */
struct Factors {
    float of[STREAMS], by;
    __device__ __forceinline__ void divide(const float (&sums)[STREAMS]) {
        const float first = sums[0] * sums[1], second = sums[2] * sums[3];
        by = reciprocal(first * second);
        of[0] = sums[1] * second, of[1] = sums[0] * second, of[2] = sums[3] * first, of[3] = sums[2] * first;
    }
};

/* One step of Sinkhorn's: the sums, and eps, of the lines of `m` (ACROSS: its rows), the crossing lines having
 * `factors`. A line's own factor was one by what stood in `sums`. */
template <bool ACROSS>
__device__ __forceinline__ void add_lines(float (&sums)[STREAMS], const float (&m)[STREAMS][STREAMS],
                                          const Factors &factors, float eps) {
    float line[STREAMS];
#pragma unroll
    for (int k = 0; k < STREAMS; ++k)
#pragma unroll
        for (int i = 0; i < STREAMS; ++i) {
            const float value = ACROSS ? m[i][k] : m[k][i];
            line[i] = k ? fmaf(value, factors.of[k], line[i]) : value * factors.of[k];
        }
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) sums[i] = fmaf(line[i], factors.by, eps * sums[i]);
}

/* One thread holds a row's residual mix, as its start and a factor for each of its rows and columns, so that
 * no iteration waits for another thread. */
__device__ __forceinline__ void sinkhorn(const float *row, const mhc_args &a, const Constants &c, float4 *out) {
    float m[STREAMS][STREAMS], across[STREAMS], down[STREAMS];
    Factors rows, columns;
    const float gain = norm_of(row, a) * c.scale[2], eps = a.sinkhorn_eps;
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) {
        soften(m[i], moved(row, 8 + 4 * i, gain, c.base), eps);
        across[i] = down[i] = rows.of[i] = 1.f;
    }
    rows.by = 1.f;
    add_lines<false>(down, m, rows, eps);
    columns.divide(down);
#pragma unroll 1
    for (int i = 1; i < a.iterations; ++i) {
        add_lines<true>(across, m, columns, eps);
        rows.divide(across);
        add_lines<false>(down, m, rows, eps);
        columns.divide(down);
    }
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) {
        const float by = rows.of[i] * rows.by * columns.by;
        out[i] = {m[i][0] * by * columns.of[0], m[i][1] * by * columns.of[1], m[i][2] * by * columns.of[2],
                  m[i][3] * by * columns.of[3]};
    }
}

} // namespace mhc
