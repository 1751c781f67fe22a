/* The best of a CTA's values, without sorting them.
 *
 * A value is an integer of the same order. As many disjoint groups of values as are wanted have their
 * largest at `lo` or above, so every one chosen is there; those are counted by the upper eleven bits of how
 * far above, the bin is found in which the last one lies, and so on within it, at most three times. What is
 * chosen are bits in shared memory, so that places come out in order. One CTA's instructions are what it
 * takes, so a value costs few of them. */
#pragma once

#include <cstdint>

namespace indexer {

constexpr int CHOOSERS = 1024, BINS = 2048, FEW = 256, MOST_WORDS = 4096, ROOM = 1024;
constexpr int WARP_VALUES = 128; /* of a warp's quads */
constexpr uint32_t ALL = 0xffffffffu, NONE = 0x007fffffu; /* the key of -inf; every number's is more */

struct Shared {
    uint32_t counts[BINS];
    uint32_t bits[MOST_WORDS], ties[MOST_WORDS];
    int32_t blocks[ROOM];
    uint64_t list[FEW]; /* see `listed_as` */
    uint32_t groups[32], least[32], most[32], sums[32];
    int32_t bin, beyond, inside, listed;
};

/* Every key chosen lies from `lo` to `hi`. */
struct Range {
    uint32_t lo, hi;
};

/* float32 -> uint32 of the same order; zeros are equal. */
__device__ __forceinline__ uint32_t in_order(float value) {
    const int32_t bits = __float_as_int(value + 0.f);
    return static_cast<uint32_t>(bits ^ ((bits >> 31) | INT32_MIN));
}

/* Keys of the four values from 4 * quad on; none from `n` on and of the place `apart`. */
__device__ __forceinline__ uint4 keys_of(float4 v, int quad, int n, int apart) {
    if (4 * quad + 4 > n || quad == apart >> 2) {
        const int i = 4 * quad;
        v.x = i < n && i != apart ? v.x : -INFINITY, v.y = i + 1 < n && i + 1 != apart ? v.y : -INFINITY;
        v.z = i + 2 < n && i + 2 != apart ? v.z : -INFINITY, v.w = i + 3 < n && i + 3 != apart ? v.w : -INFINITY;
    }
    return {in_order(v.x), in_order(v.y), in_order(v.z), in_order(v.w)};
}

/* What a launch before this one wrote. */
__device__ __forceinline__ float4 read(const float *values, int quad) {
    return __ldcg(reinterpret_cast<const float4 *>(values) + quad);
}

/* Values that stay in registers: quad c * CHOOSERS + thread is quads[c], of the first `n`. */
template <int QUADS>
struct Held {
    uint4 quads[QUADS];
    int n;

    template <typename Do>
    __device__ __forceinline__ void each(Do &&work) const {
#pragma unroll
        for (int c = 0; c < QUADS; ++c)
            if (4 * c * CHOOSERS < n) work(c * CHOOSERS + static_cast<int>(threadIdx.x), quads[c]);
    }
};

/* A thread's quads of the first `all`, five under way at once: work(quad, what `get` gave, which is nothing
 * from `all` on), by whole warps. */
template <typename Quad, typename Get, typename Do>
__device__ __forceinline__ void by_fives(int all, Get &&get, Do &&work) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    for (int begin = static_cast<int>(threadIdx.x); begin - lane < all; begin += 5 * CHOOSERS) {
        Quad v[5];
#pragma unroll
        for (int c = 0; c < 5; ++c)
            if (begin + c * CHOOSERS < all) v[c] = get(begin + c * CHOOSERS);
#pragma unroll
        for (int c = 0; c < 5; ++c)
            if (begin + c * CHOOSERS - lane < all) work(begin + c * CHOOSERS, v[c]);
    }
}

/* Values that are read each time; `work` is called by whole warps, as of those that are held. */
struct Streamed {
    const float *values;
    int n, apart;

    template <typename Do>
    __device__ __forceinline__ void each(Do &&work) const {
        const int all = (n + 3) / 4;
        by_fives<float4>(all, [&](int quad) { return read(values, quad); }, [&](int quad, const float4 &v) {
            work(quad, quad < all ? keys_of(v, quad, n, apart) : uint4{NONE, NONE, NONE, NONE});
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
        by_fives<uint4>(all, [&](int quad) { return quads[quad]; }, work);
    }
};

/* Values that are read once, and kept. */
struct Keeping {
    Streamed from;
    uint4 *quads;

    template <typename Do>
    __device__ __forceinline__ void each(Do &&work) const {
        from.each([&](int quad, uint4 k) {
            quads[quad] = k;
            work(quad, k);
        });
    }
};

/* Of every thread's number, the sum of those before it. A barrier must lie between two of these. */
__device__ __forceinline__ uint32_t before(Shared &s, uint32_t mine, uint32_t &total) {
    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
    uint32_t upto = mine;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const uint32_t other = __shfl_up_sync(ALL, upto, by);
        if (lane >= by) upto += other;
    }
    if (lane == 31) s.sums[warp] = upto;
    __syncthreads();
    const uint32_t each = s.sums[lane];
    total = __reduce_add_sync(ALL, each);
    const uint32_t earlier = __reduce_add_sync(ALL, lane < warp ? each : 0u);
    return earlier + upto - mine;
}

/* Every place whose bit is set among the first `words`, in order: work(rank, place). Returns how many. */
template <typename Do>
__device__ __forceinline__ int in_turn(Shared &s, const uint32_t *bits, int words, Do &&work) {
    const int each = (words + CHOOSERS - 1) / CHOOSERS, first = static_cast<int>(threadIdx.x) * each;
    uint32_t mine = 0, total;
    for (int w = first; w < min(first + each, words); ++w) mine += __popc(bits[w]);
    uint32_t rank = before(s, mine, total);
    for (int w = first; w < min(first + each, words); ++w)
        for (uint32_t left = bits[w]; left; left &= left - 1) work(static_cast<int>(rank++), 32 * w + __ffs(left) - 1);
    return static_cast<int>(total);
}

template <typename Test>
__device__ __forceinline__ uint32_t nibble(uint4 k, Test &&test) {
    return (test(k.x) ? 1u : 0u) | (test(k.y) ? 2u : 0u) | (test(k.z) ? 4u : 0u) | (test(k.w) ? 8u : 0u);
}

__device__ __forceinline__ void mark(uint32_t *bits, int quad, uint32_t which) {
    if (which) atomicOr(bits + quad / 8, which << (quad % 8 * 4));
}

/* A key and its place as one number: the larger goes first, of equals the first. */
__device__ __forceinline__ uint64_t listed_as(uint32_t key, int place) {
    return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(place);
}
__device__ __forceinline__ int place_of(uint64_t listed) { return static_cast<int>(~static_cast<uint32_t>(listed)); }

/* Those of a warp's quads that `which` names, to the list; one atomic a warp. */
__device__ __forceinline__ void list(Shared &s, uint4 k, int quad, uint32_t which) {
    if (!__any_sync(ALL, which != 0)) return;
    const int lane = static_cast<int>(threadIdx.x) & 31, mine = __popc(which);
    const uint32_t ones = __ballot_sync(ALL, mine & 1), twos = __ballot_sync(ALL, mine & 2),
                   fours = __ballot_sync(ALL, mine & 4), earlier = (1u << lane) - 1;
    int at = 0;
    if (lane == 0) at = atomicAdd(&s.listed, __popc(ones) + 2 * __popc(twos) + 4 * __popc(fours));
    at = __shfl_sync(ALL, at, 0) + __popc(ones & earlier) + 2 * __popc(twos & earlier) + 4 * __popc(fours & earlier);
    for (uint32_t left = which; left; left &= left - 1) {
        const int j = __ffs(left) - 1;
        s.list[at++] = listed_as(j == 0 ? k.x : j == 1 ? k.y : j == 2 ? k.z : k.w, 4 * quad + j);
    }
}

/* Nothing marked, nothing counted, for `words` words of places; before the next barrier. */
__device__ __forceinline__ void clear(Shared &s, int words) {
    const int tid = static_cast<int>(threadIdx.x);
    for (int w = tid; w < words; w += CHOOSERS) s.bits[w] = s.ties[w] = 0;
    for (int w = tid; w < BINS; w += CHOOSERS) s.counts[w] = 0;
    if (tid == 0) s.listed = 0;
}

/* From a bound that at least `count` of `from` reach (or all there are) to the largest. `first` is passed
 * over once, before `from`: the same values. */
template <typename First, typename From>
__device__ __forceinline__ Range bounds(Shared &s, const First &first, const From &from, int count) {
    const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5;
    uint4 top = {NONE, NONE, NONE, NONE};
    first.each([&](int, uint4 k) { top = {max(top.x, k.x), max(top.y, k.y), max(top.z, k.z), max(top.w, k.w)}; });
    const uint32_t two = max(top.x, top.y), more = max(top.z, top.w), mine = max(two, more);
    uint32_t group = count > CHOOSERS ? min(two, more) : mine;
    if (count <= CHOOSERS / 2) group = max(group, __shfl_xor_sync(ALL, group, 1));
    group = __reduce_min_sync(ALL, group);
    const uint32_t highest = __reduce_max_sync(ALL, mine);
    if (lane == 0) s.groups[warp] = group, s.most[warp] = highest;
    __syncthreads();
    Range found{__reduce_min_sync(ALL, s.groups[lane]), __reduce_max_sync(ALL, s.most[lane])};
    if (found.lo <= NONE) { /* of all threads: too few values for so many groups, so that all may be chosen */
        uint32_t lowest = ALL; /* above NONE */
        from.each([&](int, uint4 k) {
            lowest = min(lowest, min(min(k.x - (NONE + 1), k.y - (NONE + 1)), min(k.z - (NONE + 1), k.w - (NONE + 1))));
        });
        lowest = __reduce_min_sync(ALL, lowest);
        if (lane == 0) s.least[warp] = lowest;
        __syncthreads();
        found.lo = __reduce_min_sync(ALL, s.least[lane]) + (NONE + 1);
    }
    return found;
}

/* Marks the best of `from` in s.bits: at least `count`, at most `room` (all there are, where fewer), all of
 * them within `range`. Of equals the first. Returns the least that was marked, or a bound of it. After
 * `clear` and a barrier; ends with one. */
template <typename From>
__device__ uint32_t choose_best(Shared &s, const From &from, int n, int count, int room, Range range) {
    const int tid = static_cast<int>(threadIdx.x), words = (n + 31) / 32;
    uint32_t lo = range.lo, hi = range.hi;
    int beyond = 0, inside = 0; /* values above hi; from lo to hi */
    while (hi > NONE) {
        const int shift = max(0, 21 - __clz(hi - lo));
        from.each([&](int, uint4 k) {
            const auto add = [&](uint32_t key) {
                if (key >= lo && key <= hi) atomicAdd(&s.counts[(key - lo) >> shift], 1u);
            };
            add(k.x), add(k.y), add(k.z), add(k.w);
        });
        __syncthreads();
        /* Bins from the highest on, two a thread. */
        const int bin = BINS - 1 - 2 * tid;
        const uint32_t upper = s.counts[bin], lower = s.counts[bin - 1];
        uint32_t total;
        const uint32_t above = before(s, upper + lower, total);
        const auto need = static_cast<uint32_t>(count - beyond);
        if (above < need && need <= above + upper + lower) {
            const bool first = need <= above + upper;
            s.bin = first ? bin : bin - 1;
            s.beyond = beyond + static_cast<int>(first ? above : above + upper);
            s.inside = static_cast<int>(first ? upper : lower);
        }
        s.counts[bin] = s.counts[bin - 1] = 0;
        __syncthreads();
        if (total < need) break; /* fewer than wanted: all */
        lo += static_cast<uint32_t>(s.bin) << shift;
        hi = lo + min(hi - lo, (1u << shift) - 1);
        beyond = s.beyond, inside = s.inside;
        if (beyond + inside <= room) break;
        if (inside <= FEW || shift == 0) {
            const bool few = inside <= FEW;
            from.each([&](int quad, uint4 k) {
                mark(s.bits, quad, nibble(k, [&](uint32_t key) { return key > hi; }));
                const uint32_t last = nibble(k, [&](uint32_t key) { return key >= lo && key <= hi; });
                if (few)
                    list(s, k, quad, last);
                else
                    mark(s.ties, quad, last);
            });
            __syncthreads();
            if (few) {
                constexpr int SHARE = CHOOSERS / FEW; /* threads that hold one of the list against the others */
                const int which = tid / SHARE;
                if (which - which % (32 / SHARE) < inside) {
                    const uint64_t mine = s.list[which];
                    int rank = 0;
#pragma unroll 4
                    for (int i = tid % SHARE; i < inside; i += SHARE) rank += s.list[i] > mine;
#pragma unroll
                    for (int by = 1; by < SHARE; by *= 2) rank += __shfl_xor_sync(ALL, rank, by);
                    const int place = place_of(mine);
                    if (which < inside && tid % SHARE == 0 && rank < count - beyond)
                        atomicOr(&s.bits[place / 32], 1u << (place % 32));
                }
            }
            if (!few)
                in_turn(s, s.ties, words, [&](int rank, int place) {
                    if (rank < count - beyond) atomicOr(&s.bits[place / 32], 1u << (place % 32));
                });
            __syncthreads();
            return lo;
        }
    }
    if (hi > NONE)
        from.each([&](int quad, uint4 k) { mark(s.bits, quad, nibble(k, [&](uint32_t key) { return key >= lo; })); });
    __syncthreads();
    return lo;
}

} // namespace indexer
