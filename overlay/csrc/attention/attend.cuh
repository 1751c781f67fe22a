/* Sparse MLA for few tokens (many.cuh: many): a CTA takes one token, up to 32 heads, and a run of tiles
 * of its records.
 *
 * Records come to shared memory as they are (cp.async, two stages) and become bf16 in registers, where
 * ldmatrix puts them for the product: once as keys, once as values. Eight warps:
 *
 *   logits   warp (kk, kn): 128 of the 512 dimensions, half the tile's keys, all heads. Its part of the
 *            query stays in registers; the four parts of a logit are added in shared memory, in order.
 *   softmax  each warp has its heads' rows; running peak and sum stay in its registers
 *   output   warp w: 64 of the 512 columns, which are one scale group (w < 7) or the RoPE values, all
 *            heads; float32 sums in registers
 *
 * Dimensions are permuted within groups of 16 so that four codes of a key, one word, are the two
 * registers of a B operand. Numbers: numbers.cuh. Instructions of sm_80 only. */
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

template <int KEYS, int MT>
__global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Launch p) {
    extern __shared__ __align__(16) uint8_t memory[];
    auto &s = *reinterpret_cast<Shared<KEYS, MT> *>(memory);
    const int tid = static_cast<int>(threadIdx.x), warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int groups = (p.heads + 16 * MT - 1) / (16 * MT);
    const int token = static_cast<int>(blockIdx.x) / groups;
    const int head0 = (static_cast<int>(blockIdx.x) - token * groups) * 16 * MT;
    const int split = static_cast<int>(blockIdx.y);

    if (p.splits > 1) let_next_start(); /* one wave: the reduction may take its places and wait */
    int limit[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        limit[i] = p.source[i].width;
        if (limit[i] && p.source[i].lengths) limit[i] = min(max(p.source[i].lengths[token], 0), limit[i]);
    }
    /* Splits divide the slots there may be, which needs no look at the lengths. */
    const int full0 = p.splits > 1 ? p.source[0].width : limit[0], full1 = p.splits > 1 ? p.source[1].width : limit[1];
    const int tiles0 = (full0 + KEYS - 1) / KEYS, tiles = tiles0 + (full1 + KEYS - 1) / KEYS;
    const int each = (tiles + p.splits - 1) / p.splits;
    const int low = split * each, high = min(low + each, tiles);

    /* Copying: PER threads a row. */
    constexpr int PER = THREADS / KEYS;
    const int row = tid / PER, part = tid % PER;
    const auto slot_of = [&](int tile) {
        if (tile >= high) return -1;
        const bool second = tile >= tiles0;
        const int column = (second ? tile - tiles0 : tile) * KEYS + row;
        const Source &from = p.source[second ? 1 : 0];
        const int slot = column < from.width ? from.slots[token * from.slots_row + column] : -1;
        return column < (second ? limit[1] : limit[0]) ? slot : -1;
    };
    const auto copy = [&](int tile, int stage, int slot) {
        if (tile < high) {
            const Source &from = p.source[tile >= tiles0 ? 1 : 0];
            const bool there = slot >= 0;
            const int page = from.shift >= 0 ? max(slot, 0) >> from.shift : max(slot, 0) / from.page, offset = max(slot, 0) - page * from.page;
            const uint8_t *begin = from.cache + page * from.stride;
            const uint8_t *data = begin + static_cast<int64_t>(offset) * DATA;
            const uint32_t to = shared_address(s.tile[stage]) + row * PITCH;
#pragma unroll
            for (int c = 0; c < (CHUNKS + PER - 1) / PER; ++c) {
                const int chunk = part + c * PER;
                if (CHUNKS % PER == 0 || chunk < CHUNKS) copy16(to + chunk * 16, data + chunk * 16, there);
            }
            if (part == 0) {
                copy8(shared_address(s.scales[stage]) + row * 8,
                      begin + static_cast<int64_t>(from.page) * DATA + offset * 8, there);
                s.there[stage][row] = there;
            }
        }
        copy_commit();
    };
    const int begin = slot_of(low);
    int ahead = slot_of(low + 1);

    /* The query's part that this warp multiplies, in the order of numbers.cuh's words. */
    const int kk = warp >> 1;
    uint32_t q[MT][8][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = head0 + m * 16 + i * 8 + g;
            const __nv_bfloat16 *from = p.q + token * p.q_token + min(head, p.heads - 1) * p.q_head;
            const bool mine = head < p.heads;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const int at = kk * 128 + c * 16;
                uint2 v;
                if (at < 448)
                    v = *reinterpret_cast<const uint2 *>(from + at + 4 * t);
                else
                    v = make_uint2(*reinterpret_cast<const uint32_t *>(from + at + 2 * t),
                                   *reinterpret_cast<const uint32_t *>(from + at + 2 * t + 8));
                q[m][c][i] = mine ? v.x : 0;
                q[m][c][i + 2] = mine ? v.y : 0;
            }
        }

    copy(low, 0, begin);

    float sum[MT][8][4] = {}, peak[2 * MT], total[2 * MT] = {};
#pragma unroll
    for (int j = 0; j < 2 * MT; ++j) peak[j] = NONE;
    for (int tile = low; tile < high; ++tile) {
        const int stage = (tile - low) & 1;
        copy_wait_all();
        __syncthreads(); /* all of this tile is there, and nobody reads the other stage any more */
        copy(tile + 1, stage ^ 1, ahead);
        ahead = slot_of(tile + 2);

        bool more = false;
        if (tid < KEYS) {
            const uint2 scales = *reinterpret_cast<const uint2 *>(s.scales[stage] + tid * 8);
#pragma unroll
            for (int i = 0; i < 7; ++i) {
                const uint32_t scale = (i < 4 ? scales.x >> 8 * i : scales.y >> 8 * (i - 4)) & 0xff;
                s.factors[i][tid] = static_cast<uint16_t>(factor(scale));
                more |= scale > LAST_PLAIN;
            }
        }
        logits<KEYS, MT>(s, stage, q, warp, lane);
        more = __syncthreads_or(more);
        softmax<KEYS, MT>(s, stage, p.scale, peak, total, warp, lane);
        __syncthreads();
        float fade[MT][2];
        bool fades = false;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                fade[m][i] = s.fade[m * 16 + i * 8 + g];
                fades |= fade[m][i] != 1.f;
            }
        if (__any_sync(0xffffffffu, fades)) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[m][n][i] *= fade[m][i >> 1];
        }
        if (more)
            outputs<true, KEYS, MT>(s, stage, sum, warp, lane);
        else
            outputs<false, KEYS, MT>(s, stage, sum, warp, lane);
    }

#pragma unroll
    for (int j = 0; j < 2 * MT; ++j) {
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) total[j] += __shfl_xor_sync(0xffffffffu, total[j], step);
        const int head = warp * 2 * MT + j;
        if (lane == 0 && head0 + head < p.heads) {
            if (p.splits == 1) {
                s.last[head] = share(peak[j], total[j], p.sink[head0 + head]);
            } else {
                const int64_t place = (static_cast<int64_t>(split) * p.tokens + token) * p.heads + head0 + head;
                p.peaks[place] = peak[j];
                p.peaks[static_cast<int64_t>(p.splits) * p.tokens * p.heads + place] = total[j];
            }
        }
    }
    if (p.splits > 1 && high <= low) return; /* its peak says that there is nothing to add */
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = head0 + m * 16 + i * 8 + g;
            if (head >= p.heads) continue;
            if (p.splits > 1) {
                float *to = p.partial + ((static_cast<int64_t>(split) * p.tokens + token) * p.heads + head) * 512;
                to += warp * 64;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float *x = sum[m][2 * c] + 2 * i, *y = sum[m][2 * c + 1] + 2 * i;
                    if (warp < 7) {
                        *reinterpret_cast<float4 *>(to + c * 16 + 4 * t) = make_float4(x[0], y[0], x[1], y[1]);
                    } else {
                        *reinterpret_cast<float2 *>(to + c * 16 + 2 * t) = make_float2(x[0], x[1]);
                        *reinterpret_cast<float2 *>(to + c * 16 + 8 + 2 * t) = make_float2(y[0], y[1]);
                    }
                }
            } else {
                const float by = s.last[m * 16 + i * 8 + g];
                __nv_bfloat16 *to = p.out + token * p.out_token + head * p.out_head + warp * 64;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float *x = sum[m][2 * c] + 2 * i, *y = sum[m][2 * c + 1] + 2 * i;
                    if (warp < 7) {
                        *reinterpret_cast<uint2 *>(to + c * 16 + 4 * t) =
                            make_uint2(pack_bf16(x[0] * by, y[0] * by), pack_bf16(x[1] * by, y[1] * by));
                    } else {
                        float2 turn[2] = {};
                        if (p.cos_sin) turn[0] = turn_of(p, token, c * 8 + t), turn[1] = turn_of(p, token, c * 8 + 4 + t);
                        *reinterpret_cast<uint32_t *>(to + c * 16 + 2 * t) =
                            packed_pair(p, x[0] * by, x[1] * by, turn[0]);
                        *reinterpret_cast<uint32_t *>(to + c * 16 + 8 + 2 * t) =
                            packed_pair(p, y[0] * by, y[1] * by, turn[1]);
                    }
                }
            }
        }
}

} // namespace attention
