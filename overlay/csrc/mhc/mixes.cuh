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

/* Of four, by two: the unit that divides is slow. */
__device__ __forceinline__ void reciprocals(float (&of)[STREAMS], const float (&v)[STREAMS]) {
    const float first = reciprocal(v[0] * v[1]), second = reciprocal(v[2] * v[3]);
    of[0] = v[1] * first, of[1] = v[0] * first, of[2] = v[3] * second, of[3] = v[2] * second;
}

/* One step of Sinkhorn's: each line of `m` (ACROSS: its rows) is divided by its sum and eps. A line's factor
 * was 1 / before; it is one by what is put there. The crossing lines have factors `by`. */
template <bool ACROSS>
__device__ __forceinline__ void step(float (&before)[STREAMS], const float (&m)[STREAMS][STREAMS],
                                     const float (&by)[STREAMS], float eps) {
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) {
        const auto at = [&](int k) { return ACROSS ? m[i][k] : m[k][i]; };
        const float half = fmaf(at(3), by[3], at(2) * by[2]);
        before[i] = fmaf(at(1), by[1], fmaf(at(0), by[0], eps * before[i])) + half;
    }
}

/* One thread holds a row's residual mix, as its start and a factor for each of its rows and columns, so that
 * no iteration waits for another thread. */
__device__ __forceinline__ void sinkhorn(const float *row, const mhc_args &a, const Constants &c, float4 *out) {
    float m[STREAMS][STREAMS], w[STREAMS], z[STREAMS], u[STREAMS], v[STREAMS];
    const float gain = norm_of(row, a) * c.scale[2], eps = a.sinkhorn_eps;
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) {
        soften(m[i], moved(row, 8 + 4 * i, gain, c.base), eps);
        w[i] = z[i] = u[i] = 1.f;
    }
    step<false>(z, m, u, eps);
    reciprocals(v, z);
#pragma unroll 1
    for (int i = 1; i < a.iterations; ++i) {
        step<true>(w, m, v, eps);
        reciprocals(u, w);
        step<false>(z, m, u, eps);
        reciprocals(v, z);
    }
#pragma unroll
    for (int i = 0; i < STREAMS; ++i)
        out[i] = {m[i][0] * u[i] * v[0], m[i][1] * u[i] * v[1], m[i][2] * u[i] * v[2], m[i][3] * u[i] * v[3]};
}

} // namespace mhc
