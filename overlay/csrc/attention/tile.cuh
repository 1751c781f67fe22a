/* One tile of records of the kernel for few tokens (attend.cuh): its logits, their softmax, and values
 * times weights. */
#pragma once

#include "finish.cuh"
#include "numbers.cuh"

namespace attention {

constexpr int THREADS = 256, PARTS = 4;
constexpr int DATA = 576, CHUNKS = DATA / 16, PITCH = DATA + 16; /* rows fall on different banks */

/* MT: 16s of heads. */
template <int KEYS, int MT>
struct Shared {
    static constexpr int HEADS = 16 * MT, SUMS_ROW = KEYS + 8, WEIGHTS_ROW = 2 * KEYS + 16;
    alignas(16) uint8_t tile[2][KEYS * PITCH];
    alignas(16) uint8_t scales[2][KEYS * 8];
    alignas(16) uint8_t weights[HEADS * WEIGHTS_ROW]; /* bf16 */
    alignas(16) float sums[PARTS][HEADS * SUMS_ROW];
    alignas(16) uint16_t factors[7][KEYS];
    float fade[HEADS], last[HEADS];
    uint8_t there[2][KEYS];
};

/* One tile's logits, to s.sums. */
template <int KEYS, int MT>
__device__ __forceinline__ void logits(Shared<KEYS, MT> &s, int stage, const uint32_t (&q)[MT][8][4], int warp,
                                       int lane) {
    constexpr int N = KEYS / 16; /* 8s of keys */
    const int kk = warp >> 1, g = lane >> 2, t = lane & 3, key = (warp & 1) * (KEYS / 2);
    const uint32_t tile = shared_address(s.tile[stage]) + (key + (lane & 7)) * PITCH + (lane >> 3) * 16;
    const auto times_query = [&](float (&sum)[N][MT][4], int step, const uint32_t (&b)[N][2]) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) mma_bf16(sum[n][m], q[m][step], b[n][0], b[n][1]);
    };
    float sum[N][MT][4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint32_t w[N][4], b[N][2];
        if (h == 0 || kk < 3) {
            uint32_t scale[N], by[N];
            bool more = false;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                load_matrices(w[n], tile + n * 8 * PITCH + (2 * kk + h) * 64);
                scale[n] = s.scales[stage][(key + n * 8 + g) * 8 + 2 * kk + h];
                by[n] = any_nan(w[n]) ? NAN2 : both(factor(scale[n]));
                more |= scale[n] > LAST_PLAIN;
            }
            more = __any_sync(0xffffffffu, more);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const Halves parts = halves(w[n][c]);
                    b[n][0] = times(pair01(parts), by[n]);
                    b[n][1] = times(pair23(parts), by[n]);
                }
                if (more) {
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        const uint32_t rest = both(factor_more(scale[n]));
                        b[n][0] = times(b[n][0], rest);
                        b[n][1] = times(b[n][1], rest);
                    }
                }
                times_query(sum, 4 * h + c, b);
            }
        } else {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
#pragma unroll
                for (int n = 0; n < N; ++n) load_matrices(w[n], tile + n * 8 * PITCH + 448 + x * 64);
#pragma unroll
                for (int y = 0; y < 2; ++y) {
#pragma unroll
                    for (int n = 0; n < N; ++n) b[n][0] = w[n][2 * y], b[n][1] = w[n][2 * y + 1];
                    times_query(sum, 4 + 2 * x + y, b);
                }
            }
        }
    }
    float *to = s.sums[kk] + g * s.SUMS_ROW + key + 2 * t;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            float *row = to + m * 16 * s.SUMS_ROW + n * 8;
            *reinterpret_cast<float2 *>(row) = make_float2(sum[n][m][0], sum[n][m][1]);
            *reinterpret_cast<float2 *>(row + 8 * s.SUMS_ROW) = make_float2(sum[n][m][2], sum[n][m][3]);
        }
}

/* The warp's heads: logits to weights, and by how much what was summed before fades. */
template <int KEYS, int MT>
__device__ __forceinline__ void softmax(Shared<KEYS, MT> &s, int stage, float scale, float (&peak)[2 * MT],
                                        float (&total)[2 * MT], int warp, int lane) {
    bool there[KEYS / 32];
#pragma unroll
    for (int i = 0; i < KEYS / 32; ++i) there[i] = s.there[stage][lane + 32 * i] != 0;
    float value[2 * MT][KEYS / 32];
#pragma unroll
    for (int j = 0; j < 2 * MT; ++j) {
        const int at = (warp * 2 * MT + j) * s.SUMS_ROW + lane;
#pragma unroll
        for (int i = 0; i < KEYS / 32; ++i) {
            const float sum = ((s.sums[0][at + 32 * i] + s.sums[1][at + 32 * i]) + s.sums[2][at + 32 * i]) +
                              s.sums[3][at + 32 * i];
            value[j][i] = there[i] ? sum * scale : NONE;
        }
    }
#pragma unroll
    for (int j = 0; j < 2 * MT; ++j) {
        float top = value[j][0];
#pragma unroll
        for (int i = 1; i < KEYS / 32; ++i) top = fmaxf(top, value[j][i]);
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        top = fmaxf(top, peak[j]); /* exact: the largest weight is 1, which bf16 has */
        const float base = top == NONE ? 0.f : top; /* nothing seen yet: 0 - inf, not inf - inf */
        const float fade = power(peak[j] - base);
        peak[j] = top;
        total[j] *= fade;
        const int head = warp * 2 * MT + j;
        auto *weights = reinterpret_cast<__nv_bfloat16 *>(s.weights + head * s.WEIGHTS_ROW);
#pragma unroll
        for (int i = 0; i < KEYS / 32; ++i) {
            const float weight = power(value[j][i] - base);
            total[j] += weight; /* of this lane's keys; added up at the end */
            weights[lane + 32 * i] = __float2bfloat16_rn(weight);
        }
        if (lane == 0) s.fade[head] = fade;
    }
}

/* One tile's values times their weights, onto `sum`. MORE: a scale of the tile needs two factors. */
template <bool MORE, int KEYS, int MT>
__device__ __forceinline__ void outputs(const Shared<KEYS, MT> &s, int stage, float (&sum)[MT][8][4], int warp,
                                        int lane) {
    const int t = lane & 3;
    const uint32_t weights = shared_address(s.weights) + (lane & 15) * s.WEIGHTS_ROW + (lane >> 4) * 16;
    const uint32_t tile =
        shared_address(s.tile[stage]) + (lane & 15) * PITCH + (lane >> 4) * 16 + (warp < 7 ? warp * 64 : 448);
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
        uint32_t a[MT][4], v[4];
#pragma unroll
        for (int m = 0; m < MT; ++m) load_matrices(a[m], weights + m * 16 * s.WEIGHTS_ROW + k * 32);
        if (warp < 7) {
            const uint32_t *factors = reinterpret_cast<const uint32_t *>(s.factors[warp]) + k * 8 + t;
            const uint32_t by0 = factors[0], by1 = factors[4];
            uint32_t more0 = 0, more1 = 0;
            if (MORE) {
                const uint8_t *scales = s.scales[stage] + (k * 16 + 2 * t) * 8 + warp;
                more0 = factor_more(scales[0]) | factor_more(scales[8]) << 16;
                more1 = factor_more(scales[64]) | factor_more(scales[72]) << 16;
            }
#pragma unroll
            for (int c = 0; c < 4; c += 2) {
                load_transposed(v, tile + k * 16 * PITCH + c * 16);
#pragma unroll
                for (int d = 0; d < 2; ++d) {
                    const Halves low = halves(v[2 * d]), high = halves(v[2 * d + 1]);
                    uint32_t even0 = times(pair02(low), by0), even1 = times(pair02(high), by1);
                    uint32_t odd0 = times(pair13(low), by0), odd1 = times(pair13(high), by1);
                    if (MORE) {
                        even0 = times(even0, more0), even1 = times(even1, more1);
                        odd0 = times(odd0, more0), odd1 = times(odd1, more1);
                    }
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        mma_bf16(sum[m][2 * (c + d)], a[m], even0, even1);
                        mma_bf16(sum[m][2 * (c + d) + 1], a[m], odd0, odd1);
                    }
                }
            }
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                load_transposed(v, tile + k * 16 * PITCH + c * 32);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma_bf16(sum[m][2 * c], a[m], v[0], v[1]);
                    mma_bf16(sum[m][2 * c + 1], a[m], v[2], v[3]);
                }
            }
        }
    }
}

} // namespace attention
