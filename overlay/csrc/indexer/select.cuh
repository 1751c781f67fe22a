/* The best of a CTA's values, without sorting them.
 *
 * As many disjoint groups of values as are wanted have their largest at some bound or above, so every one
 * chosen is there (`bounds`). Values from there on are counted by how far they lie below the largest, in BINS,
 * the bin is found in which the last one lies, and so on within it, at most three times. What is chosen are
 * bits in shared memory, so that places come out in order. Few values from the bound on go a shorter way:
 * listed.cuh. One CTA's instructions are what it takes, so a value costs few of them. */
#pragma once

#include "values.cuh"

namespace indexer {

constexpr int BINS = 2048, MOST_WORDS = 4096, ROOM = 1024;
constexpr int LISTED = 1024, FEW = 256; /* see listed.cuh */

/* The bin in which the last of those wanted lies, how many lie before it and in it: none, where there are fewer. */
struct alignas(16) Found {
    int32_t bin, beyond, inside;
};

struct alignas(16) Shared {
    uint32_t counts[BINS + 32]; /* zero but between counting and `find`; then of what lies in none, by lanes */
    union {
        uint32_t ties[MOST_WORDS];
        float4 quads[LISTED];
    };
    union {
        uint32_t bits[MOST_WORDS];
        uint16_t places[LISTED];
    };
    int32_t blocks[ROOM];
    uint64_t list[FEW], cut; /* see listed.cuh */
    Found found;
    uint32_t most[CHOOSER_WARPS], sums[CHOOSER_WARPS];
    int32_t listed;
};

/* Every key chosen lies from `lo` to `hi`; `lo` is above NONE. */
struct Range {
    uint32_t lo, hi;
};

/* ---- counts ------------------------------------------------------------------------------------ */

/* Of every warp's number in s.sums, the sum of those before this warp's; their total, where it is asked for.
 * Begins with a barrier; another must lie between two of these. */
__device__ __forceinline__ uint32_t warps_before(Shared &s, uint32_t *total) {
    __syncthreads();
    const uint32_t each = lane() < CHOOSER_WARPS ? s.sums[lane()] : 0u;
    if (total) *total = __reduce_add_sync(ALL, each);
    return __reduce_add_sync(ALL, lane() < warp() ? each : 0u);
}

/* Of every thread's number, the sum of those before it. As `warps_before`. */
__device__ __forceinline__ uint32_t before(Shared &s, uint32_t mine, uint32_t *total) {
    uint32_t upto = mine;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const uint32_t other = __shfl_up_sync(ALL, upto, by);
        if (lane() >= by) upto += other;
    }
    if (lane() == 31) s.sums[warp()] = upto;
    return warps_before(s, total) + upto - mine;
}

/* After a barrier behind what was counted: where the one that is `need`-th from bin 0 on lies. Leaves nothing
 * counted; ends with a barrier. */
__device__ __forceinline__ Found find(Shared &s, int need) {
    static_assert(BINS == 4 * CHOOSERS);
    uint4 *mine = reinterpret_cast<uint4 *>(s.counts) + thread();
    const uint4 n = *mine;
    const auto wanted = static_cast<uint32_t>(need);
    if (thread() == 0) s.found.inside = 0;
    const uint32_t none = before(s, n.x + n.y + n.z + n.w, nullptr);
    *mine = uint4{0, 0, 0, 0};
    const uint32_t one = none + n.x, two = one + n.y, three = two + n.z;
    if (none < wanted && wanted <= three + n.w) {
        Found here{4 * thread(), static_cast<int>(none), static_cast<int>(n.x)};
        if (wanted > one) here.bin += 1, here.beyond = static_cast<int>(one), here.inside = static_cast<int>(n.y);
        if (wanted > two) here.bin += 1, here.beyond = static_cast<int>(two), here.inside = static_cast<int>(n.z);
        if (wanted > three) here.bin += 1, here.beyond = static_cast<int>(three), here.inside = static_cast<int>(n.w);
        s.found = here;
    }
    __syncthreads();
    return s.found;
}

/* A bin for any distance, 1/64 of it wide at most: as fine as what lies there is near. */
__device__ __forceinline__ uint32_t bin_of(uint32_t far) {
    const int shift = max(0, 25 - __clz(far));
    return (static_cast<uint32_t>(shift) << 6) + (far >> shift);
}
/* The largest distance in a bin. */
__device__ __forceinline__ uint32_t end_of(uint32_t bin) {
    const int shift = max(0, static_cast<int>(bin >> 6) - 1);
    return ((bin - (static_cast<uint32_t>(shift) << 6) + 1) << shift) - 1;
}

/* From a bound that at least `count` values reach (or all there are) to the largest: the four of `top` are
 * the largest of four disjoint groups of a thread's values. Of 2048 groups of equal draws of a distribution some
 * 9/8 * count values reach the bound where a quarter of the groups is wanted. Ends with a barrier. */
__device__ __forceinline__ Range bounds(Shared &s, uint4 top, int count) {
    const uint32_t highest = __reduce_max_sync(ALL, max(max(top.x, top.y), max(top.z, top.w)));
    if (lane() == 0) s.most[warp()] = highest;
    __syncthreads();
    Range range{NONE + 1, __reduce_max_sync(ALL, s.most[lane() & (CHOOSER_WARPS - 1)])};
    const auto add = [&](uint32_t key) {
        if (key > NONE) atomicAdd(&s.counts[bin_of(range.hi - key)], 1u);
    };
    add(top.x), add(top.y), add(top.z), add(top.w);
    __syncthreads();
    const Found last = find(s, count);
    const uint32_t far = end_of(static_cast<uint32_t>(last.bin));
    if (last.inside && far < range.hi - NONE) range.lo = range.hi - far;
    return range;
}

/* ---- bits -------------------------------------------------------------------------------------- */

/* Every place whose bit is set among the first `words`, in order: work(rank, place). Returns how many. */
template <typename Do>
__device__ __forceinline__ int in_turn(Shared &s, const uint32_t *bits, int words, Do &&work) {
    const int each = (words + CHOOSERS - 1) / CHOOSERS, first = thread() * each;
    uint32_t mine = 0, total;
#pragma unroll 1
    for (int w = first; w < min(first + each, words); ++w) mine += __popc(bits[w]);
    uint32_t rank = before(s, mine, &total);
#pragma unroll 1
    for (int w = first; w < min(first + each, words); ++w)
        for (uint32_t left = bits[w]; left; left &= left - 1) work(static_cast<int>(rank++), 32 * w + __ffs(left) - 1);
    return static_cast<int>(total);
}

template <typename Quad, typename Test>
__device__ __forceinline__ uint32_t nibble(const Quad &k, Test &&test) {
    return (test(k.x) ? 1u : 0u) | (test(k.y) ? 2u : 0u) | (test(k.z) ? 4u : 0u) | (test(k.w) ? 8u : 0u);
}

__device__ __forceinline__ void mark(uint32_t *bits, int quad, uint32_t which) {
    const auto at = static_cast<uint32_t>(quad);
    if (which) atomicOr(bits + at / 8, which << (at % 8 * 4));
}

/* Nothing marked, for `words` words of places; before the next barrier. */
__device__ __forceinline__ void clear(Shared &s, int words) {
#pragma unroll 1
    for (int w = thread(); w < words; w += CHOOSERS) s.bits[w] = s.ties[w] = 0;
}

/* The largest of each quarter of a thread's values. */
template <typename From>
__device__ __forceinline__ uint4 top_of(const From &from) {
    uint4 top = {NONE, NONE, NONE, NONE};
    from.each([&](int, uint4 k) { top = {max(top.x, k.x), max(top.y, k.y), max(top.z, k.z), max(top.w, k.w)}; });
    return top;
}

/* Marks the best of `from` in s.bits: at least `count`, at most `room` (all there are, where fewer), all of
 * them within `range`. Of equals the first. Returns the least that was marked, or a bound of it. After
 * `clear` and a barrier; ends with one. */
template <typename From>
__device__ __forceinline__ uint32_t choose_best(Shared &s, const From &from, int n, int count, int room, Range range) {
    uint32_t lo = range.lo, hi = range.hi;
    int beyond = 0, wanted = INT32_MAX; /* values above hi; of those from lo to hi */
#pragma unroll 1
    while (hi > NONE) {
        const int shift = max(0, 21 - __clz(hi - lo));
        from.each([&](int, uint4 k) {
            const auto add = [&](uint32_t key) {
                if (hi - key <= hi - lo) atomicAdd(&s.counts[(hi - key) >> shift], 1u);
            };
            add(k.x), add(k.y), add(k.z), add(k.w);
        });
        __syncthreads();
        const Found last = find(s, count - beyond);
        if (!last.inside) break; /* fewer than wanted: all */
        hi -= static_cast<uint32_t>(last.bin) << shift;
        lo = hi - min(hi - lo, (1u << shift) - 1);
        beyond += last.beyond;
        if (beyond + last.inside <= room) break;
        if (shift == 0) {
            wanted = count - beyond;
            break;
        }
    }
    const bool all = wanted == INT32_MAX;
    from.each([&](int quad, uint4 k) {
        mark(s.bits, quad, nibble(k, [&](uint32_t key) { return key > hi || (all && key >= lo); }));
        if (!all) mark(s.ties, quad, nibble(k, [&](uint32_t key) { return key == lo; }));
    });
    __syncthreads();
    if (!all) {
        in_turn(s, s.ties, (n + 31) / 32, [&](int rank, int place) {
            if (rank < wanted) atomicOr(&s.bits[place / 32], 1u << (place % 32));
        });
        __syncthreads();
    }
    return lo;
}

} // namespace indexer
