/* The projection: 24 coefficients of a group's rows, K shared out over warps and CTAs.
 *
 * A warp takes 16 columns. Weights are A operands, rows B operands of m16n8k16: lane (g, t) = (lane / 4,
 * lane % 4) reads columns 4 t to 4 t + 3 of coefficients g, 8 + g and 16 + g and of row g, which are four k
 * of both, permuted alike. So weights come in sixteens of bytes, new streams are made where they are
 * multiplied, and no operand is moved between lanes. A float32 goes as two bf16, whose sum has 16 bits; of the
 * last eight coefficients both lie in one operand. */
#pragma once

#include "streams.cuh"

namespace mhc {

constexpr int PADDED = COLUMNS + 4; /* of a row in shared memory: rows 2 t of a column, in other banks */

/* Pairs of four columns of one coefficient: upper and lower eight bits. */
struct Limbs {
    uint2 high, low;
};

__device__ __forceinline__ uint32_t rest(float x, float y, uint32_t high) {
    return pack_bf16(x - lower(high), y - upper(high));
}

__device__ __forceinline__ Limbs limbs_of(uint4 bits) {
    const float x = __uint_as_float(bits.x), y = __uint_as_float(bits.y);
    const float z = __uint_as_float(bits.z), w = __uint_as_float(bits.w);
    const uint2 high = make_uint2(pack_bf16(x, y), pack_bf16(z, w));
    return {high, make_uint2(rest(x, y, high.x), rest(z, w, high.y))};
}

/* Shares of `TILES` eights of rows in a warp's lanes. */
template <int TILES>
struct Sums {
    float high[TILES][4] = {}, low[TILES][4] = {}, last[TILES][4] = {}, squares[TILES] = {};
};

/* A stream's 16 columns into the sums: of weights w[0..2], of rows' new values. */
template <int TILES>
__device__ __forceinline__ void multiply(Sums<TILES> &sums, const uint4 (&w)[3], const uint2 (&rows)[TILES]) {
    const Limbs one = limbs_of(w[0]), two = limbs_of(w[1]), three = limbs_of(w[2]);
    const uint32_t high[4] = {one.high.x, two.high.x, one.high.y, two.high.y};
    const uint32_t low[4] = {one.low.x, two.low.x, one.low.y, two.low.y};
    const uint32_t last[4] = {three.high.x, three.low.x, three.high.y, three.low.y};
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        mma_bf16(sums.high[i], high, rows[i].x, rows[i].y);
        mma_bf16(sums.low[i], low, rows[i].x, rows[i].y);
        mma_bf16(sums.last[i], last, rows[i].x, rows[i].y);
    }
}

/* A warp's weights: of `EACH` streams from `first` on, 16 columns. Constants: read before the launch in front has
 * ended. */
template <int EACH>
__device__ __forceinline__ void take_weights(uint4 (&w)[EACH][3], const mhc_args &a, int first, int column, int lane) {
    const float *at = a.fn + static_cast<int64_t>((lane >> 2) * STREAMS + first) * a.hidden + column + 4 * (lane & 3);
#pragma unroll
    for (int s = 0; s < EACH; ++s)
#pragma unroll
        for (int i = 0; i < 3; ++i) w[s][i] = load16(at + (8 * i * STREAMS + s) * a.hidden);
}

/* A warp's share of the projections of the rows from `row` on. */
template <int TILES, int EACH, bool POST>
__device__ __forceinline__ Sums<TILES> share_of(const mhc_args &a, const uint4 (&w)[EACH][3], int row, int first,
                                                int column, int lane) {
    const int g = lane >> 2, h = column + 4 * (lane & 3);
    uint2 rows[EACH][TILES];
    Sums<TILES> sums;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const int mine = row + 8 * i + g;
        const bool there = mine < a.tokens;
        if constexpr (POST) {
            const Mix<EACH> mix = mix_of<EACH>(a, mine, first, there);
            const Old old = old_of<true>(a, mine, h, there);
#pragma unroll
            for (int s = 0; s < EACH; ++s) rows[s][i] = renewed(mix, s, old);
        } else {
#pragma unroll
            for (int s = 0; s < EACH; ++s)
                rows[s][i] = four_of(a.residual, mine * STREAMS + first + s, a.hidden, h, there);
        }
#pragma unroll
        for (int s = 0; s < EACH; ++s) sums.squares[i] += squares_of(rows[s][i]);
    }
#pragma unroll
    for (int s = 0; s < EACH; ++s) multiply(sums, w[s], rows[s]);
    return sums;
}

/* To a warp's [8 TILES][PADDED]; columns behind SQUARES are zeros. */
template <int TILES>
__device__ __forceinline__ void put(float *tile, const Sums<TILES> &sums, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        float squares = sums.squares[i];
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        tile[(8 * i + g) * PADDED + SQUARES + t] = t == 0 ? squares : 0.f;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float *row = tile + (8 * i + 2 * t + j) * PADDED;
            row[g] = sums.high[i][j] + sums.low[i][j];
            row[8 + g] = sums.high[i][2 + j] + sums.low[i][2 + j];
            row[16 + g] = sums.last[i][j] + sums.last[i][2 + j];
        }
    }
}

} // namespace mhc
