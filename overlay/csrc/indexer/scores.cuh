/* Scores: scale_n * sum_h w_h relu(q_h . k_n), keys read from their pages.
 *
 * A warp takes 32 keys at once, straight from memory into registers: lane (g, t) = (lane / 4, lane % 4)
 * reads bytes 16 t and 64 + 16 t of the keys g, 8 + g, ... whose four codes of a word, as fp16, are two
 * registers of an A operand; the words of a row's heads are B operands, their dimension permuted alike. So
 * nothing is moved between lanes but the sums over heads, of which a lane adds eight by itself.
 *
 * A code s eeee mmm as the fp16 s 0eeee mmm0000000 is the value / 256, subnormals too; both operands'
 * factors are given back by the heads' weights (UNDO). A NaN code reads as +-480; none is stored. */
#pragma once

#include "../common/ptx.cuh"
#include "launch.hpp"
#include "rows.cuh"

namespace indexer {

using namespace ptx;

constexpr int THREADS = 128, WARPS = THREADS / 32, DIM = 128, HEADS = INDEXER_HEADS, KEYS = 32, STEPS = 8;
constexpr int EIGHTS = KEYS / 8; /* of keys; of heads there are as many */
constexpr int CTAS = 3, CANDIDATE_CTAS = 2; /* on a multiprocessor at once */
constexpr float UNDO = 65536.f;

static_assert(HEADS == KEYS);

/* Codes 1 and 3 of a word, codes 0 and 2. */
__device__ __forceinline__ uint32_t odd(uint32_t w) { return ((w >> 1) & 0x3f803f80u) | (w & 0x80008000u); }
__device__ __forceinline__ uint32_t even(uint32_t w) { return ((w << 7) & 0x3f803f80u) | ((w << 8) & 0x80008000u); }

__device__ __forceinline__ uint32_t word(const uint4 (&raw)[2], int step) {
    const uint4 &v = raw[step >> 2];
    return (step & 3) == 0 ? v.x : (step & 3) == 1 ? v.y : (step & 3) == 2 ? v.z : v.w;
}

/* Of two rows eight apart: one step of an A operand. */
__device__ __forceinline__ uint4 operand(uint32_t v, uint32_t w) {
    return make_uint4(odd(v), odd(w), even(v), even(w));
}

/* ---- where keys lie ---------------------------------------------------------------------------- */

/* Keys of a page are a power of two. */
__device__ __forceinline__ int shift_of(const indexer_scores_args &a) { return 31 - __clz(a.states); }

/* The key of the 32 whose score a lane ends up with: see `summed`. */
__device__ __forceinline__ int key_of(int lane) { return (lane & 3) * 8 + (lane >> 2); }

/* Where a warp's 32 keys lie: dense, one run of one page; candidates, four blocks of eight. Null: no such
 * page. */
template <bool CANDIDATES>
struct Place {
    const uint8_t *keys[CANDIDATES ? EIGHTS : 1];
    const float *scale; /* of this lane's key, which is at `position` */
    int position;
};

/* Whether a table's word names a page. */
__device__ __forceinline__ bool is_page(const indexer_scores_args &a, int id) { return id >= 0 && id < a.blocks; }

/* Keys from `position` on in page `id`, and the scale of this lane's, `mine` behind it. */
__device__ __forceinline__ const uint8_t *keys_in(const indexer_scores_args &a, int id, int position, int mine,
                                                  const float *&scale) {
    const int state = position & (a.states - 1);
    const uint8_t *page = static_cast<const uint8_t *>(a.cache) + id * a.stride;
    scale = reinterpret_cast<const float *>(page + a.states * DIM) + state + mine;
    return page + state * DIM;
}

/* As `keys_in`; null where there is no such page. */
__device__ __forceinline__ const uint8_t *keys_at(const indexer_scores_args &a, int id, int position, int mine,
                                                  const float *&scale) {
    return is_page(a, id) ? keys_in(a, id, position, mine, scale) : nullptr;
}

__device__ __forceinline__ int id_of(const indexer_scores_args &a, const int32_t *table, int position, int bound) {
    return position < bound ? table[position >> shift_of(a)] : -1;
}

/* `id`: of the page, where the keys are one run. */
template <bool CANDIDATES>
__device__ __forceinline__ Place<CANDIDATES> place_of(const indexer_scores_args &a, const int32_t *table,
                                                      const int32_t *picks, int id, int start, int bound, int lane) {
    Place<CANDIDATES> found;
    found.scale = nullptr, found.position = INT32_MAX;
    if constexpr (CANDIDATES) {
        const int mine = key_of(lane);
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const int column = start + 8 * e, block = column < bound ? picks[column / 8] : -1;
            const float *scale = nullptr;
            found.keys[e] = block >= 0 && 8 * block < a.table_row << shift_of(a)
                                ? keys_at(a, table[8 * block >> shift_of(a)], 8 * block, mine & 7, scale)
                                : nullptr;
            if (e == mine >> 3) found.scale = scale, found.position = 8 * block + (mine & 7);
        }
    } else {
        found.keys[0] = keys_at(a, id, start, key_of(lane), found.scale);
        found.position = start + key_of(lane);
    }
    return found;
}

/* A lane's part of eight keys. */
template <bool CANDIDATES>
__device__ __forceinline__ void load(uint4 (&raw)[2], const Place<CANDIDATES> &at, int e, int lane) {
    const uint8_t *keys = at.keys[CANDIDATES ? e : 0];
    raw[0] = raw[1] = make_uint4(0, 0, 0, 0);
    if (keys) {
        const uint8_t *key = keys + ((CANDIDATES ? 0 : 8 * e) + (lane >> 2)) * DIM + (lane & 3) * 16;
        raw[0] = load16(key), raw[1] = load16(key + 64);
    }
}

template <bool CANDIDATES>
__device__ __forceinline__ float scale_of(const Place<CANDIDATES> &at) {
    return at.scale ? __ldg(at.scale) : 0.f;
}

/* ---- sums and their places --------------------------------------------------------------------- */

/* Heads 2 t and 2 t + 1 of an eight, of keys g and 8 + g: their products to the sums of those keys. Half the
 * weight of twice what is above zero: an addition is cheaper than a maximum. */
__device__ __forceinline__ void add_heads(float (&sums)[2], const float (&acc)[4], float2 half_weight) {
#pragma unroll
    for (int up = 0; up < 2; ++up) {
        const float one = acc[2 * up], two = acc[2 * up + 1];
        sums[up] = fmaf(half_weight.x, one + fabsf(one), sums[up]);
        sums[up] = fmaf(half_weight.y, two + fabsf(two), sums[up]);
    }
}

/* sums[m][up], of key 16 m + 8 up + g over the heads of t: added over the four t; each lane gets one. */
__device__ __forceinline__ float summed(const float (&sums)[2][2], int lane) {
    float two[2];
    const bool later = lane & 2, last = lane & 1;
#pragma unroll
    for (int up = 0; up < 2; ++up) {
        const float keep = later ? sums[1][up] : sums[0][up], give = later ? sums[0][up] : sums[1][up];
        two[up] = keep + __shfl_xor_sync(0xffffffffu, give, 2);
    }
    const float keep = last ? two[1] : two[0], give = last ? two[0] : two[1];
    return keep + __shfl_xor_sync(0xffffffffu, give, 1);
}

/* The best of each `fan` of the 32 keys, in every lane of those. */
__device__ __forceinline__ float best(float value, int fan) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 4));
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 8));
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 16));
    if (fan == 16) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return value;
}

/* Where a lane's score of a row goes, and the best of the `fan` that begin with it. */
struct Target {
    float *out, *top;
};

__device__ __forceinline__ Target target_of(const indexer_scores_args &a, int64_t line, int column) {
    return {a.out + line * a.out_row + column, a.tops + line * a.tops_row + (column >> (a.fan == 16 ? 4 : 3))};
}

/* `column`: of this lane, as `start` + key_of(lane). */
__device__ __forceinline__ void store(const Target &to, int fan, int column, int bound, float value) {
    if (column < bound) *to.out = value;
    const float top = best(value, fan);
    if ((column & (fan - 1)) == 0 && column < bound) *to.top = top;
}

} // namespace indexer
