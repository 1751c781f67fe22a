/* The best of what reaches a bound, where that is little of a CTA's values: their quads go to a list in shared
 * memory, in order, and only those few are counted, compared and written. Of scores drawn alike a quad has one that
 * reaches the bound; of those that lie together it has up to four, so that the list holds more of them. */
#pragma once

#include "select.cuh"

namespace indexer {

constexpr int TAKEN = LISTED / CHOOSERS; /* quads of the list that a thread takes, one behind the other */

struct Taken {
    float4 quads[TAKEN];
    int places[TAKEN]; /* the quads' first values' */

    /* work(which of the 4 * TAKEN, value) */
    template <typename Do>
    __device__ __forceinline__ void each(Do &&work) const {
#pragma unroll
        for (int e = 0; e < TAKEN; ++e) {
            work(4 * e, quads[e].x), work(4 * e + 1, quads[e].y);
            work(4 * e + 2, quads[e].z), work(4 * e + 3, quads[e].w);
        }
    }
};

/* The largest of each quarter of a thread's values. */
__device__ __forceinline__ uint4 top_of(const Held &held) {
    float4 top = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    held.each([&](int c) { top = larger(top, held.quads[c]); });
    return in_order(top);
}

/* The quads with a value that reaches `lo`, to the list in order, where it holds them all; returns how many there
 * are. Ends with a barrier. */
__device__ __forceinline__ int list_quads(Shared &s, const Held &held, uint32_t lo) {
    const float least = from_order(lo);
    uint32_t lanes[QUADS]; /* that have one */
    int mine = 0;
    const auto ask = [&](int c) {
        const float4 &v = held.quads[c];
        const bool reaches = v.x >= least || v.y >= least || v.z >= least || v.w >= least;
        lanes[c] = __ballot_sync(ALL, reaches && held.there(c));
        mine += __popc(lanes[c]);
    };
#pragma unroll
    for (int step = 0; step < QUADS / 2; ++step)
        if (held.any(step)) ask(2 * step), ask(2 * step + 1);
    if (lane() == 0) s.sums[warp()] = static_cast<uint32_t>(mine);
    uint32_t all;
    int at = static_cast<int>(warps_before(s, &all));
    const uint32_t me = 1u << lane();
    const auto add = [&](int c) {
        if (lanes[c] & me) {
            const int place = at + __popc(lanes[c] & (me - 1));
            s.quads[place] = held.quads[c];
            s.places[place] = static_cast<uint16_t>(held.first + 32 * c);
        }
        at += __popc(lanes[c]);
    };
    if (all <= LISTED) {
#pragma unroll
        for (int step = 0; step < QUADS / 2; ++step)
            if (held.any(step)) add(2 * step), add(2 * step + 1);
    }
    __syncthreads();
    return static_cast<int>(all);
}

__device__ __forceinline__ Taken take(const Shared &s, int listed) {
    Taken taken;
#pragma unroll
    for (int e = 0; e < TAKEN; ++e) {
        const int i = TAKEN * thread() + e;
        taken.quads[e] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, taken.places[e] = 0;
        if (i < listed) taken.quads[e] = s.quads[i], taken.places[e] = 4 * s.places[i];
    }
    return taken;
}

/* Those that reach `lo`, as bits. */
__device__ __forceinline__ uint32_t reaching(const Taken &taken, uint32_t lo) {
    const float least = from_order(lo);
    uint32_t bits = 0;
    taken.each([&](int k, float value) { bits |= value >= least ? 1u << k : 0u; });
    return bits;
}

/* A value that lies `far` below the largest, and which of those taken it is, as one number: the smaller goes first. */
__device__ __forceinline__ uint64_t listed_as(uint32_t far, uint32_t which) {
    return static_cast<uint64_t>(far) << 32 | which;
}

/* Of those that `range` holds, more than `most`, the best as bits: at least `count`, at most `most`; of equals
 * the first. Makes `range` those. False: too many lie where the last one does. Ends with a barrier. */
__device__ __forceinline__ bool pick(Shared &s, const Taken &taken, int count, int most, Range &range, uint32_t &bits) {
    const uint32_t wide = range.hi - range.lo, first = 4 * TAKEN * threadIdx.x;
    const int shift = max(0, 21 - __clz(wide));
    uint32_t far[4 * TAKEN];
    /* Those beside them, too: they lie behind. What lies in no bin meets no other lane's. */
    const auto beside = static_cast<uint32_t>(BINS + lane());
    taken.each([&](int k, float value) {
        far[k] = range.hi - in_order(value);
        atomicAdd(&s.counts[min(far[k] >> shift, beside)], 1u);
    });
    if (thread() == 0) s.listed = 0;
    __syncthreads();
    const Found last = find(s, count);
    const uint32_t begin = static_cast<uint32_t>(last.bin) << shift, end = begin + min(wide - begin, (1u << shift) - 1);
    uint64_t cut = listed_as(end, ALL);
    if (last.beyond + last.inside > most) {
        if (last.inside > FEW) return false;
        taken.each([&](int k, float) {
            if (far[k] >> shift == static_cast<uint32_t>(last.bin))
                s.list[atomicAdd(&s.listed, 1)] = listed_as(far[k], first + k);
        });
        __syncthreads();
        if (thread() < last.inside) {
            const uint64_t mine = s.list[thread()];
            int rank = 0;
#pragma unroll 4
            for (int i = 0; i < last.inside; ++i) rank += s.list[i] < mine;
            if (rank == count - last.beyond - 1) s.cut = mine;
        }
        __syncthreads();
        cut = s.cut;
    }
    bits = 0;
    taken.each([&](int k, float) { bits |= listed_as(far[k], first + k) <= cut ? 1u << k : 0u; });
    range.lo = range.hi - end;
    return true;
}

} // namespace indexer
