/* Experts in two launches: A (gate, up, activation), B (down, sum over a token's slots).
 *
 * The grid is sized by slots. The CTAs of a slot serve the slot's expert for all rows that chose it
 * if the slot is the expert's first; otherwise they leave at once. A "row" is a slot, or
 * slots + token for the shared expert.
 */
#pragma once

#include "engine.cuh"

namespace exl3 {

struct ExpertsLaunch {
    const __nv_bfloat16 *x;
    const void *ids;
    const float *weights;
    const int64_t *table;
    void *y;
    float *partial;   /* [row][gate, up][split][inter] */
    __half *act;      /* [row][inter], rotated, as operands: see put_operand */
    float *out;       /* [row][hidden], times the routing weight */
    int *counters_a;  /* [slot][group of A] */
    int *counters_b;  /* [group of B] */
    int64_t x_stride, y_stride;
    int32_t id_bytes, tokens, topk, slots, experts, first_id, shared, fp32;
    int32_t hidden_blocks, inter_blocks;
    float limit;
    int32_t warps, chunks, groups, kblocks, splits; /* of this launch */
    Stand stand[2];                                 /* of all groups, of the last */
    uint32_t by_topk;
    int32_t ring_words;
};

struct Entry {
    const char *trellis;
    const __half *suh;
    const __half *svh;
    int k2, codebook;
};

__device__ __forceinline__ Entry table_entry(const ExpertsLaunch &p, int which, int expert) {
    const longlong2 *at = reinterpret_cast<const longlong2 *>(
        p.table + (static_cast<int64_t>(which) * (p.experts + p.shared) + expert) * 4);
    const longlong2 a = __ldg(at), b = __ldg(at + 1);
    return Entry{reinterpret_cast<const char *>(a.x), reinterpret_cast<const __half *>(a.y),
                 reinterpret_cast<const __half *>(b.x), static_cast<int>(b.y & 0xff),
                 static_cast<int>(b.y >> 8 & 0xff)};
}

/* Table entry of a slot, or -1. */
__device__ __forceinline__ int slot_expert(const ExpertsLaunch &p, int slot) {
    const int64_t id = p.id_bytes == 8 ? __ldg(static_cast<const long long *>(p.ids) + slot)
                                       : __ldg(static_cast<const int *>(p.ids) + slot);
    const int64_t local = id - p.first_id;
    return local >= 0 && local < p.experts ? static_cast<int>(local) : -1;
}

/* The rows of slot `slot`'s expert into `list` (one a warp: every warp finds them by itself). Their
 * number; 0 if the slot is not the first of a valid expert. `slot` == slots is the shared expert. */
__device__ __forceinline__ int find_rows(const ExpertsLaunch &p, int slot, int lane, uint8_t *list,
                                         int &expert) {
    if (slot == p.slots) {
        expert = p.experts;
        for (int t = lane; t < p.tokens; t += 32) list[t] = static_cast<uint8_t>(p.slots + t);
        __syncwarp();
        return p.tokens;
    }
    expert = slot_expert(p, slot);
    if (expert < 0) return 0;
    int count = 0;
    for (int from = 0; from < p.slots; from += 32) {
        const bool same = from + lane < p.slots && slot_expert(p, from + lane) == expert;
        const uint32_t mask = __ballot_sync(~0u, same);
        if (from + 32 <= slot ? mask : from <= slot ? mask & ((1u << (slot - from)) - 1u) : 0u) return 0;
        if (same) list[count + __popc(mask & ((1u << lane) - 1u))] = static_cast<uint8_t>(from + lane);
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
    at[0] = pack_half(v.x, v.y);
    at[2] = pack_half(v.z, v.w);
}

__device__ __forceinline__ float activation(float gate, float up, float limit) {
    if (limit > 0.0f) {
        /* As torch.clamp, NaN stays NaN. */
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
    }
    return gate / (1.0f + __expf(-gate)) * up;
}

/* A: grid [group of chunks, gate or up][split][slot]. The last of a (slot, group) finishes it. */
template <int NB>
__global__ void __launch_bounds__(32 * MAX_WARPS, 2) experts_a_kernel(const __grid_constant__ ExpertsLaunch p) {
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ uint8_t lists[MAX_WARPS][128];
    __shared__ int flag;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int slot = static_cast<int>(blockIdx.z), split = static_cast<int>(blockIdx.y);
    const int group = static_cast<int>(blockIdx.x >> 1), which = static_cast<int>(blockIdx.x & 1);
    let_next_start();
    uint8_t *const list = lists[warp];
    int expert;
    const int count = find_rows(p, slot, lane, list, expert);
    if (count == 0) return;

    const Entry entry = table_entry(p, which, expert);
    const int k2 = entry.k2;
    const int block0 = split * p.kblocks, blocks = min(p.kblocks, p.hidden_blocks - block0);
    const Stand &stand = p.stand[group == p.groups - 1];
    const int here = stand.chunks;
    const Place at = place_of(stand, warp, blocks);
    const int chunk = group * p.chunks + at.chunk;
    const int inter = p.inter_blocks * CHUNK;
    prefetch(entry.suh + 128 * block0, 256 * blocks, 0);
    prefetch(entry.svh + CHUNK * p.chunks * group, 256 * here, 32);
    if (which == 0) prefetch(table_entry(p, 2, expert).suh + CHUNK * p.chunks * group, 256 * here, 48);
    uint32_t *const x = shared + p.warps * p.ring_words;
    float *const red = reinterpret_cast<float *>(shared);
    const auto partial_at = [&](int row, int proj, int part, int c) {
        return p.partial + ((static_cast<int64_t>(row) * 2 + proj) * p.splits + part) * inter +
               c * CHUNK;
    };
    Stream stream;
    stream.stride = static_cast<int64_t>(p.inter_blocks) * 128 * k2;
    stream.from = entry.trellis + (8 * block0 + at.tile0) * stream.stride + static_cast<int64_t>(chunk) * 128 * k2;
    stream.count = at.tile1 - at.tile0;
    stream.ring = shared + warp * p.ring_words;
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        stream.x[nb] = reinterpret_cast<const uint2 *>(x) + (at.tile0 * NB + nb) * 32 + lane;
        stream.x_step[nb] = 32 * NB;
    }
    for (int base = 0; base < count; base += 8 * NB) {
        Sums<NB> sums = {};
#define EXL3_START(K2) stream_start<K2>(stream, k2, lane)
        EXL3_FOR_RATE(k2, entry.codebook, EXL3_START)
#undef EXL3_START
        {
            const __nv_bfloat16 *from[NB];
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                const int row = base + 8 * nb + (lane >> 2);
                from[nb] = row < count ? p.x + row_token(p, list[row]) * p.x_stride + 128 * block0 : nullptr;
            }
            for (int block = warp; block < blocks; block += p.warps)
                rotate_block<NB>(from, 128 * block, entry.suh + 128 * (block0 + block), lane,
                                 x + block * (block_bytes(NB) / 4));
        }
        __syncthreads();
#define EXL3_RUN(K2) stream_run<K2, NB>(stream, k2, entry.codebook, lane, sums)
        EXL3_FOR_RATE(k2, entry.codebook, EXL3_RUN)
#undef EXL3_RUN
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
            __syncthreads();
            if (at.works) put_sums<NB>(sums, nb, red + warp * RED_WARP, lane);
            __syncthreads();
            const int some = min(8, count - base - 8 * nb);
            for (int task = warp; task < some * here; task += p.warps) {
                const int row = divide(task, stand.by_chunks), c = task - row * here;
                const float4 v = take_sums(red, c, here, stand.lanes, row, lane);
                __stcg(reinterpret_cast<float4 *>(partial_at(list[base + 8 * nb + row], which, split,
                                                             group * p.chunks + c)) + lane, v);
            }
        }
        __syncthreads(); /* the sums lie where the next pass streams to */
    }
    if (!arrive(p.counters_a + slot * p.groups + group, 2 * p.splits, &flag)) return;

    const __half *const gate_svh = table_entry(p, 0, expert).svh;
    const __half *const up_svh = table_entry(p, 1, expert).svh;
    const __half *const down_suh = table_entry(p, 2, expert).suh;
    for (int task = warp; task < count * here; task += p.warps) {
        const int r = divide(task, stand.by_chunks), c = group * p.chunks + task - r * here, row = list[r];
        float4 gate = sum_partials(partial_at(row, 0, 0, c), inter, p.splits, lane);
        float4 up = sum_partials(partial_at(row, 1, 0, c), inter, p.splits, lane);
        gate = finish(gate, gate_svh + c * CHUNK, lane);
        up = finish(up, up_svh + c * CHUNK, lane);
        const uint2 s = __ldg(reinterpret_cast<const uint2 *>(down_suh + c * CHUNK + 4 * lane));
        const float2 s0 = __half22float2(*reinterpret_cast<const __half2 *>(&s.x));
        const float2 s1 = __half22float2(*reinterpret_cast<const __half2 *>(&s.y));
        float4 v;
        /* 1/8 as the other rotated inputs have it. */
        v.x = activation(gate.x, up.x, p.limit) * s0.x * 0.125f;
        v.y = activation(gate.y, up.y, p.limit) * s0.y * 0.125f;
        v.z = activation(gate.z, up.z, p.limit) * s1.x * 0.125f;
        v.w = activation(gate.w, up.w, p.limit) * s1.y * 0.125f;
        put_operand(p.act + static_cast<int64_t>(row) * inter + c * CHUNK, hadamard(v, lane), lane);
    }
}

/* B: grid [group of chunks of hidden][slot], all of inter. The last of a group, spare CTAs
 * included, adds every token's slots. */
template <int NB>
__global__ void __launch_bounds__(32 * MAX_WARPS, 2) experts_b_kernel(const __grid_constant__ ExpertsLaunch p) {
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ uint8_t lists[MAX_WARPS][128];
    __shared__ int flag;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int slot = static_cast<int>(blockIdx.y), group = static_cast<int>(blockIdx.x);
    const Stand &stand = p.stand[group == p.groups - 1];
    const int here = stand.chunks;
    const int hidden = p.hidden_blocks * CHUNK, inter = p.inter_blocks * CHUNK;
    uint8_t *const list = lists[warp];
    int expert;
    const int count = find_rows(p, slot, lane, list, expert);
    if (count) {
        const Entry entry = table_entry(p, 2, expert);
        const int k2 = entry.k2;
        const Place at = place_of(stand, warp, p.inter_blocks);
        const int chunk = group * p.chunks + at.chunk;
        prefetch(entry.svh + CHUNK * p.chunks * group, 256 * here, 0);
        uint32_t *const x = shared + p.warps * p.ring_words;
        float *const red = reinterpret_cast<float *>(shared);
        Stream stream;
        stream.stride = static_cast<int64_t>(p.hidden_blocks) * 128 * k2;
        stream.from = entry.trellis + at.tile0 * stream.stride + static_cast<int64_t>(chunk) * 128 * k2;
        stream.count = at.tile1 - at.tile0;
        stream.ring = shared + warp * p.ring_words;
        for (int base = 0; base < count; base += 8 * NB) {
            Sums<NB> sums = {};
#define EXL3_START(K2) stream_start<K2>(stream, k2, lane)
            EXL3_FOR_RATE(k2, entry.codebook, EXL3_START)
#undef EXL3_START
            /* The rows lie one after the other, as in `act`; lanes of rows that are not there read
               zeros. A row more than a multiple of 128 bytes apart: no bank conflicts. */
            const int here_rows = min(8 * NB, count - base), row_words = inter / 2 + 8;
            if (base == 0) wait_for_previous();
            for (int r = warp; r < here_rows; r += p.warps) {
                const uint4 *from = reinterpret_cast<const uint4 *>(p.act + static_cast<int64_t>(list[base + r]) * inter);
                for (int i = lane; i < inter / 8; i += 32) copy_async(shared_address(x + r * row_words + 4 * i), from + i);
            }
            if (threadIdx.x < 4) reinterpret_cast<uint2 *>(x + 8 * NB * row_words)[threadIdx.x] = make_uint2(0u, 0u);
            copy_commit();
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                const int r = 8 * nb + (lane >> 2);
                const bool there = r < here_rows;
                stream.x[nb] = reinterpret_cast<const uint2 *>(x + (there ? r * row_words + at.tile0 * 8 : 8 * NB * row_words)) + (lane & 3);
                stream.x_step[nb] = there ? 4 : 0;
            }
            copy_wait<0>();
            __syncthreads();
#define EXL3_RUN(K2) stream_run<K2, NB>(stream, k2, entry.codebook, lane, sums)
            EXL3_FOR_RATE(k2, entry.codebook, EXL3_RUN)
#undef EXL3_RUN
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                __syncthreads();
                if (at.works) put_sums<NB>(sums, nb, red + warp * RED_WARP, lane);
                __syncthreads();
                const int some = min(8, count - base - 8 * nb);
                for (int task = warp; task < some * here; task += p.warps) {
                    const int r = divide(task, stand.by_chunks), c = group * p.chunks + task - r * here;
                    const int row = list[base + 8 * nb + r];
                    float4 v = take_sums(red, task - r * here, here, stand.lanes, r, lane);
                    v = finish(v, entry.svh + c * CHUNK, lane);
                    const float weight = row < p.slots ? __ldg(p.weights + row) : 1.0f;
                    v = make_float4(v.x * weight, v.y * weight, v.z * weight, v.w * weight);
                    __stcg(reinterpret_cast<float4 *>(p.out + static_cast<int64_t>(row) * hidden + c * CHUNK) + lane, v);
                }
            }
            __syncthreads();
        }
    }
    if (!count) wait_for_previous();
    if (!arrive(p.counters_b + group, p.slots + p.shared, &flag)) return;
    for (int task = warp; task < p.tokens * here; task += p.warps) {
        const int token = divide(task, stand.by_chunks), c = group * p.chunks + task - token * here;
        const float *const from = p.out + c * CHUNK;
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 6
        for (int j = 0; j < p.topk; ++j) {
            const int row = token * p.topk + j;
            if (slot_expert(p, row) >= 0)
                add_four(total, __ldcg(reinterpret_cast<const float4 *>(from + static_cast<int64_t>(row) * hidden) + lane));
        }
        if (p.shared)
            add_four(total, __ldcg(reinterpret_cast<const float4 *>(from + static_cast<int64_t>(p.slots + token) * hidden) + lane));
        store_four(p.y, token * p.y_stride + c * CHUNK + 4 * lane, p.fp32, total);
    }
}

} // namespace exl3
