/* Scores: scale_n * sum_h w_h relu(q_h . k_n), keys read from their pages.
 *
 * A warp takes 32 keys at once, straight from memory into registers: lane (g, t) = (lane / 4, lane % 4)
 * reads bytes 16 t and 64 + 16 t of the keys g, 8 + g, ... whose four codes of a word, as fp16, are the
 * two registers of a B operand. The heads of a row are the A operand's rows, permuted alike. So nothing is
 * moved between lanes but the sums over heads.
 *
 * A code s eeee mmm as the fp16 s 0eeee mmm0000000 is the value / 256, subnormals too; both operands'
 * factors are given back by the heads' weights (UNDO). A NaN code reads as +-480; none is stored. */
#pragma once

#include "../common/ptx.cuh"
#include "launch.hpp"
#include "rows.cuh"

namespace indexer {

using namespace ptx;

constexpr int THREADS = 128, WARPS = THREADS / 32, DIM = 128, HEADS = INDEXER_HEADS, KEYS = 32, NT = KEYS / 8, STEPS = 8;
constexpr int CTAS = 3, CANDIDATE_CTAS = 2; /* on a multiprocessor at once */
constexpr float UNDO = 65536.f;

/* Codes 1 and 3 of a word, codes 0 and 2. */
__device__ __forceinline__ uint32_t odd(uint32_t w) { return ((w >> 1) & 0x3f803f80u) | (w & 0x80008000u); }
__device__ __forceinline__ uint32_t even(uint32_t w) { return ((w << 7) & 0x3f803f80u) | ((w << 8) & 0x80008000u); }

__device__ __forceinline__ uint32_t word(const uint4 (&raw)[2], int step) {
    const uint4 &v = raw[step >> 2];
    return (step & 3) == 0 ? v.x : (step & 3) == 1 ? v.y : (step & 3) == 2 ? v.z : v.w;
}

/* Keys of a page are a power of two. */
__device__ __forceinline__ int shift_of(const indexer_scores_args &a) { return 31 - __clz(a.states); }

/* The key of the 32 whose score a lane ends up with: see `summed`. */
__device__ __forceinline__ int key_of(int lane) {
    return (lane >> 3) * 8 + 2 * (lane & 3) + ((lane >> 2) & 1);
}

/* sums[n][c], of key 8 n + 2 t + c over the heads of g: added over the eight g; each lane gets one. */
__device__ __forceinline__ float summed(const float (&sums)[NT][2], int lane) {
    float four[2][2], two[2];
    const bool upper = lane & 16, next = lane & 8, last = lane & 4;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float keep = upper ? sums[n + 2][c] : sums[n][c], give = upper ? sums[n][c] : sums[n + 2][c];
            four[n][c] = keep + __shfl_xor_sync(0xffffffffu, give, 16);
        }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const float keep = next ? four[1][c] : four[0][c], give = next ? four[0][c] : four[1][c];
        two[c] = keep + __shfl_xor_sync(0xffffffffu, give, 8);
    }
    const float keep = last ? two[1] : two[0], give = last ? two[0] : two[1];
    return keep + __shfl_xor_sync(0xffffffffu, give, 4);
}

/* The best of each `fan` of the 32 keys, in every lane of those. */
__device__ __forceinline__ float best(float value, int fan) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 4));
    if (fan == 16) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 8));
    return value;
}

__device__ __forceinline__ void store(const indexer_scores_args &a, int64_t line, int start, int bound, float value,
                                      int lane) {
    const int column = start + key_of(lane);
    if (column < bound) a.out[line * a.out_row + column] = value;
    const float top = best(value, a.fan);
    const int by = a.fan == 16 ? 4 : 3, first = start + (lane >> by << by);
    if ((lane & (a.fan - 1)) == 0 && first < bound) a.tops[line * a.tops_row + (first >> by)] = top;
}

} // namespace indexer
