/* Experts in two launches: A (gate, up, activation), B (down, sum over a token's slots).
 *
 * The grid is sized by slots. The CTAs of a slot serve the slot's expert for all rows that chose it
 * if the slot is the expert's first; otherwise they leave at once. A "row" is a slot, or
 * slots + token for the shared expert.
 */
#pragma once

#include "engine.cuh"
#include "expert.cuh"

namespace exl3 {

constexpr int MAX_SLOTS = 128;

struct ExpertsLaunch {
    const __nv_bfloat16 *x;
    const void *ids;
    const float *weights;
    const int64_t *table;
    void *y;
    float *partial;   /* [row][gate, up][split of A][inter] */
    __half *act;      /* [row][inter], rotated, as operands: see put_operand */
    float *out;       /* [row][split of B][hidden], times the routing weight */
    int *counters_a;  /* [slot][group of A] */
    int *counters_b;  /* [group of B] */
    int64_t x_stride, y_stride;
    int32_t id_bytes, tokens, topk, slots, experts, first_id, shared, fp32;
    int32_t hidden_blocks, inter_blocks;
    float limit;
    int32_t warps, chunks, groups, kblocks, splits; /* of this launch */
    Stand stand[2];                                 /* of all groups, of the last */
    uint32_t by_topk, by_splits; /* for divide() */
    int32_t ring_words;
};

/* Where the table tells of scales that an expert's ends want: gate's svh, up's svh, down's suh. */
__device__ __forceinline__ const int64_t *table_scale(const ExpertsLaunch &p, int which, int expert) {
    return p.table + (static_cast<int64_t>(which) * (p.experts + p.shared) + expert) * 4 + (which < 2 ? 2 : 1);
}

__device__ __forceinline__ Matrix table_entry(const ExpertsLaunch &p, int which, int expert) {
    return matrix_at(reinterpret_cast<const longlong2 *>(
        p.table + (static_cast<int64_t>(which) * (p.experts + p.shared) + expert) * 4));
}

/* What a warp at `at` reads of a trellis of `width` chunks: its chunk behind `first`, k-blocks from `block0`
 * on. `x` is the kernel's to say. */
__device__ __forceinline__ Stream stream_at(const char *trellis, int width, int k2, int block0, int first, const Place &at,
                                            uint32_t *ring) {
    Stream stream;
    stream.stride = static_cast<int64_t>(width) * 128 * k2;
    stream.from = trellis + (8 * block0 + at.tile0) * stream.stride + static_cast<int64_t>(first + at.chunk) * 128 * k2;
    stream.count = at.tile1 - at.tile0;
    stream.ring = ring;
    return stream;
}

/* Table entry of a slot, or -1. */
__device__ __forceinline__ int slot_expert(const ExpertsLaunch &p, int slot) {
    const int64_t id = p.id_bytes == 8 ? __ldcg(static_cast<const long long *>(p.ids) + slot)
                                       : __ldcg(static_cast<const int *>(p.ids) + slot);
    const int64_t local = id - p.first_id;
    return local >= 0 && local < p.experts ? static_cast<int>(local) : -1;
}

/* The rows of slot `slot`'s expert into `list` (one a warp: every warp finds them by itself). Their
 * number; 0 if the slot is not the first of its expert. `slot` == slots is the shared expert. */
__device__ __forceinline__ int find_rows(const ExpertsLaunch &p, int slot, int expert, int lane, uint8_t *list) {
    if (slot == p.slots) {
        for (int t = lane; t < p.tokens; t += 32) list[t] = static_cast<uint8_t>(p.slots + t);
        __syncwarp();
        return p.tokens;
    }
    /* All of them are asked for before the first is looked at. */
    int experts[MAX_SLOTS / 32];
#pragma unroll
    for (int i = 0; i < MAX_SLOTS / 32; ++i)
        experts[i] = 32 * i + lane < p.slots ? slot_expert(p, 32 * i + lane) : -1;
    int count = 0;
#pragma unroll
    for (int i = 0; i < MAX_SLOTS / 32; ++i) {
        const bool same = experts[i] == expert;
        const uint32_t mask = __ballot_sync(~0u, same);
        const int before = slot - 32 * i; /* slots of these 32 that come before this one */
        if (before >= 32 ? mask : before > 0 ? mask & ((1u << before) - 1u) : 0u) return 0;
        if (same) list[count + __popc(mask & ((1u << lane) - 1u))] = static_cast<uint8_t>(32 * i + lane);
        count += __popc(mask);
    }
    __syncwarp();
    return count;
}

__device__ __forceinline__ int row_token(const ExpertsLaunch &p, int row) {
    return row < p.slots ? static_cast<int>(divide(row, p.by_topk)) : row - p.slots;
}

/* Rotated inputs of B lie within 16 values as a lane of an operand wants them: its four values
 * (2q, 2q + 1, 2q + 8, 2q + 9) side by side. Values 4 * lane.. of a chunk go there as two pairs. */
__device__ __forceinline__ void put_operand(__half *row, float4 v, int lane) {
    const int group = lane >> 2, first = 4 * (lane & 3); /* of 16; the first value's place in it */
    uint32_t *at = reinterpret_cast<uint32_t *>(row + 16 * group) + (first & 7) + (first >> 3);
    at[0] = pack_fp16(v.x, v.y);
    at[2] = pack_fp16(v.z, v.w);
}

} // namespace exl3
