/* A row's values as a CTA goes over them, four at a time (a quad): held in registers, read from L2 each time or
 * kept in shared memory. A value's key is an integer of the same order. */
#pragma once

#include <cstdint>

#include "api.h"

namespace indexer {

constexpr int CHOOSERS = 512, CHOOSER_WARPS = CHOOSERS / 32, QUADS = INDEXER_DIRECT / 4 / CHOOSERS;
constexpr int WARP_VALUES = 128; /* of a warp's quads */
constexpr uint32_t ALL = 0xffffffffu, NONE = 0x007fffffu; /* the key of -inf; every number's is more */

__device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int lane() { return thread() & 31; }
__device__ __forceinline__ int warp() { return thread() >> 5; }

/* float32 -> uint32 of the same order; zeros are equal. */
__device__ __forceinline__ uint32_t in_order(float value) {
    const int32_t bits = __float_as_int(value + 0.f);
    return static_cast<uint32_t>(bits ^ ((bits >> 31) | INT32_MIN));
}
__device__ __forceinline__ uint4 in_order(float4 v) {
    return {in_order(v.x), in_order(v.y), in_order(v.z), in_order(v.w)};
}

__device__ __forceinline__ float4 larger(float4 v, float4 w) {
    return {fmaxf(v.x, w.x), fmaxf(v.y, w.y), fmaxf(v.z, w.z), fmaxf(v.w, w.w)};
}

/* What has this key. */
__device__ __forceinline__ float from_order(uint32_t key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : ALL));
}

/* Of the four values from 4 * quad on those before `n`, else -inf. */
__device__ __forceinline__ float4 before_end(float4 v, int quad, int n) {
    if (4 * quad + 4 > n) {
        const int i = 4 * quad;
        v.x = i < n ? v.x : -INFINITY, v.y = i + 1 < n ? v.y : -INFINITY;
        v.z = i + 2 < n ? v.z : -INFINITY, v.w = i + 3 < n ? v.w : -INFINITY;
    }
    return v;
}

/* `n` values that a launch before this one wrote: of a row from its first on, or of its `blocks` alone. */
struct Source {
    const float *values;
    int n;
    const int32_t *blocks; /* or null */
    int shift;             /* of a block's quads */

    __device__ __forceinline__ float4 first(int quad) const {
        return __ldcg(reinterpret_cast<const float4 *>(values) + quad);
    }
    __device__ __forceinline__ float4 of_block(int quad) const {
        return first((blocks[quad >> shift] << shift) + (quad & ((1 << shift) - 1)));
    }
};

/* Values that stay in registers: a warp has a run of quads, a lane every 32nd of the run. */
struct Held {
    float4 quads[QUADS];
    int first, end, run; /* the lane's first quad; where the warp's run ends; how many are a run */

    /* Whether a step of two quads has any, which all warps have alike. */
    __device__ __forceinline__ bool any(int step) const { return 64 * step < run; }
    __device__ __forceinline__ bool there(int c) const { return first + 32 * c < end; }

    /* work(c) of the quads that are there */
    template <typename Do>
    __device__ __forceinline__ void each(Do &&work) const {
#pragma unroll
        for (int step = 0; step < QUADS / 2; ++step)
            if (any(step)) {
                if (there(2 * step)) work(2 * step);
                if (there(2 * step + 1)) work(2 * step + 1);
            }
    }
};

__device__ __forceinline__ void hold(Held &held, const Source &from) {
    const int quads = (from.n + 3) / 4, run = (quads + CHOOSER_WARPS - 1) / CHOOSER_WARPS;
    held.run = run, held.end = min(warp() * run + run, quads), held.first = warp() * run + lane();
    if (from.blocks) { /* a step leads to the same place in a later block */
        const int in_step = 32 >> from.shift, in_block = held.first & ((1 << from.shift) - 1);
        const int32_t *block = from.blocks + (held.first >> from.shift);
        int at[QUADS];
#pragma unroll
        for (int c = 0; c < QUADS; ++c)
            if (held.any(c / 2)) at[c] = (block[c * in_step] << from.shift) + in_block;
        held.each([&](int c) { held.quads[c] = from.first(at[c]); });
    } else
        held.each([&](int c) { held.quads[c] = from.first(held.first + 32 * c); });
    if (from.n % 4 && held.end == quads)
        held.each([&](int c) { held.quads[c] = before_end(held.quads[c], held.first + 32 * c, from.n); });
}

/* A thread's quads of the first `all`, several under way at once: work(quad, what `get` gave, which is nothing
 * from `all` on), by whole warps. */
template <typename Quad, int UNDER_WAY = 4, typename Get, typename Do>
__device__ __forceinline__ void by_several(int all, Get &&get, Do &&work) {
#pragma unroll 1
    for (int begin = thread(); begin - lane() < all; begin += UNDER_WAY * CHOOSERS) {
        Quad v[UNDER_WAY];
#pragma unroll
        for (int c = 0; c < UNDER_WAY; ++c)
            if (begin + c * CHOOSERS < all) v[c] = get(begin + c * CHOOSERS);
#pragma unroll
        for (int c = 0; c < UNDER_WAY; ++c)
            if (begin + c * CHOOSERS - lane() < all) work(begin + c * CHOOSERS, v[c]);
    }
}

/* Keys of values that are read each time. */
struct Streamed {
    const Source &from;

    template <typename Do>
    __device__ __forceinline__ void each(Do &&work) const {
        const int all = (from.n + 3) / 4;
        const auto get = [&](int quad) { return from.blocks ? from.of_block(quad) : from.first(quad); };
        by_several<float4>(all, get, [&](int quad, const float4 &v) {
            work(quad, in_order(before_end(v, quad, from.n)));
        });
    }
};

/* Keys in shared memory, whole warps of quads (WARP_VALUES): a thread reads what it wrote. */
struct Kept {
    const uint4 *quads;
    int n;

    template <typename Do>
    __device__ __forceinline__ void each(Do &&work) const {
        const int all = (n + WARP_VALUES - 1) / WARP_VALUES * 32;
        by_several<uint4>(all, [&](int quad) { return quads[quad]; }, work);
    }
};

/* Keys of values that are read once, and kept where there is room. */
struct Keeping {
    Streamed from;
    uint4 *quads; /* or null */

    template <typename Do>
    __device__ __forceinline__ void each(Do &&work) const {
        from.each([&](int quad, uint4 k) {
            if (quads) quads[quad] = k;
            work(quad, k);
        });
    }
};

} // namespace indexer
