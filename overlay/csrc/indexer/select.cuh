/* The best of a CTA's values, without sorting them.
 *
 * A value is an integer of the same order (0: none). As many disjoint groups of values as are wanted have
 * their largest at `lo` or above, so every one chosen is there; those are counted in bins of equal width,
 * and the bin is found in which the last one lies. If that holds a few, they are compared with each other;
 * else it is cut again, by the upper bits of how far above its least a value lies, at most three times.
 * What is chosen are bits in shared memory, so that places come out in order. */
#pragma once

#include <cstdint>

namespace indexer {

constexpr int CHOOSERS = 1024, BINS = 2048, FEW = 256, MOST_WORDS = 4096, ROOM = 1024;
constexpr uint32_t ALL = 0xffffffffu;

struct Shared {
    uint32_t counts[BINS];
    uint32_t bits[MOST_WORDS], ties[MOST_WORDS];
    int32_t blocks[ROOM];
    uint32_t keys[FEW];
    int32_t places[FEW];
    uint32_t groups[32], least[32], most[32], sums[32];
    int32_t bin, beyond, inside, listed;
};

/* float32 -> uint32 of the same order: zeros are equal, -inf is 0, every number more. */
__device__ __forceinline__ uint32_t in_order(float value) {
    const int32_t bits = value == 0.f ? 0 : __float_as_int(value);
    return value == -INFINITY ? 0u : static_cast<uint32_t>(bits ^ ((bits >> 31) | INT32_MIN));
}

__device__ __forceinline__ float value_of(uint32_t key) {
    return __int_as_float(static_cast<int32_t>(key & 0x80000000u ? key ^ 0x80000000u : ~key));
}

/* Values from `lo` to `hi` cut into BINS, in order. */
struct Cut {
    uint32_t lo, hi;
    int shift;
    float low, by; /* by 0: bins of 1 << shift keys */

    __device__ __forceinline__ void evenly() {
        low = value_of(lo);
        const float wide = value_of(hi) - low;
        by = wide > 0.f && wide < INFINITY ? (BINS - 1) / wide : 0.f;
        if (!(by < INFINITY)) by = 0.f;
        shift = max(0, 21 - __clz(hi - lo));
    }
    __device__ __forceinline__ void by_bits() { by = 0.f, shift = max(0, 21 - __clz(hi - lo)); }
    __device__ __forceinline__ bool holds(uint32_t key) const { return key >= lo && key <= hi; }
    __device__ __forceinline__ int bin(uint32_t key) const {
        if (by > 0.f) return min(BINS - 1, static_cast<int>((value_of(key) - low) * by));
        return static_cast<int>((key - lo) >> shift);
    }
};

/* Keys of the four values from 4 * quad on; 0 from `n` on and of the place `apart`. */
__device__ __forceinline__ uint4 keys_of(float4 v, int quad, int n, int apart) {
    const int i = 4 * quad;
    return {i < n && i != apart ? in_order(v.x) : 0u, i + 1 < n && i + 1 != apart ? in_order(v.y) : 0u,
            i + 2 < n && i + 2 != apart ? in_order(v.z) : 0u, i + 3 < n && i + 3 != apart ? in_order(v.w) : 0u};
}

/* Values that stay in registers: quad c * CHOOSERS + thread is quads[c]. */
template <int QUADS>
struct Held {
    uint4 quads[QUADS];

    template <typename Do>
    __device__ __forceinline__ void each(Do &&work) const {
#pragma unroll
        for (int c = 0; c < QUADS; ++c) work(c * CHOOSERS + static_cast<int>(threadIdx.x), quads[c]);
    }
};

/* What a launch before this one wrote. */
__device__ __forceinline__ float4 read(const float4 *at) {
#ifdef INDEXER_L1
    return *at;
#else
    return __ldcg(at);
#endif
}

/* Values that are read each time. */
struct Streamed {
    const float4 *values;
    int n, apart;

    template <typename Do>
    __device__ __forceinline__ void each(Do &&work) const {
        const int all = (n + 3) / 4;
        for (int begin = static_cast<int>(threadIdx.x); begin < all; begin += 4 * CHOOSERS) {
            float4 v[4];
#pragma unroll
            for (int c = 0; c < 4; ++c)
                v[c] = begin + c * CHOOSERS < all ? read(values + begin + c * CHOOSERS) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int c = 0; c < 4; ++c) work(begin + c * CHOOSERS, keys_of(v[c], begin + c * CHOOSERS, n, apart));
        }
    }
};

/* Of every thread's number, the sum of those before it. */
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
    __syncthreads();
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

/* Marks the best of `from` in s.bits: at least `count`, at most `room` (all there are, where fewer). Of
 * equals the first. `extra`: a place that is marked besides, or -1. */
template <typename From>
__device__ void choose_best(Shared &s, const From &from, int n, int count, int room, int extra) {
    const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5, words = (n + 31) / 32;
    for (int w = tid; w < words; w += CHOOSERS) s.bits[w] = s.ties[w] = 0;
    for (int w = tid; w < BINS; w += CHOOSERS) s.counts[w] = 0;
    if (tid == 0) s.listed = 0;
    uint4 top = {0, 0, 0, 0};
    uint32_t lowest = ALL; /* less one: 0 is none */
    from.each([&](int, uint4 k) {
        top = {max(top.x, k.x), max(top.y, k.y), max(top.z, k.z), max(top.w, k.w)};
        lowest = min(lowest, min(min(k.x - 1, k.y - 1), min(k.z - 1, k.w - 1)));
    });
    const uint32_t two = max(top.x, top.y), more = max(top.z, top.w), mine = max(two, more);
    uint32_t group = count > CHOOSERS ? min(two, more) : mine;
    if (count <= CHOOSERS / 2) group = max(group, __shfl_xor_sync(ALL, group, 1));
    group = __reduce_min_sync(ALL, group);
    lowest = __reduce_min_sync(ALL, lowest);
    const uint32_t highest = __reduce_max_sync(ALL, mine);
    if (lane == 0) s.groups[warp] = group, s.least[warp] = lowest, s.most[warp] = highest;
    __syncthreads();
    if (tid == 0 && extra >= 0) s.bits[extra / 32] = 1u << (extra % 32);
    Cut cut{__reduce_min_sync(ALL, s.groups[lane]), __reduce_max_sync(ALL, s.most[lane])};
    if (cut.lo == 0) cut.lo = __reduce_min_sync(ALL, s.least[lane]) + 1; /* 0 again, where there is none */
    if (cut.hi == 0) {
        __syncthreads();
        return;
    }
    cut.evenly();
    int beyond = 0, inside = 0; /* values above the cut; in the bin of the last one chosen */
    while (true) {
        from.each([&](int, uint4 k) {
            const auto add = [&](uint32_t key) {
                if (cut.holds(key)) atomicAdd(&s.counts[cut.bin(key)], 1u);
            };
            add(k.x), add(k.y), add(k.z), add(k.w);
        });
        __syncthreads();
        /* Bins from the highest on, two a thread. */
        const int upper_bin = BINS - 1 - 2 * tid;
        const uint32_t upper = s.counts[upper_bin], lower = s.counts[upper_bin - 1];
        uint32_t total;
        const uint32_t above = before(s, upper + lower, total);
        const auto need = static_cast<uint32_t>(count - beyond);
        if (above < need && need <= above + upper + lower) {
            const bool first = need <= above + upper;
            s.bin = first ? upper_bin : upper_bin - 1;
            s.beyond = beyond + static_cast<int>(first ? above : above + upper);
            s.inside = static_cast<int>(first ? upper : lower);
        }
        s.counts[upper_bin] = s.counts[upper_bin - 1] = 0;
        __syncthreads();
        const bool all = total < need; /* fewer than wanted */
        const int bin = all ? 0 : s.bin;
        if (!all) beyond = s.beyond, inside = s.inside;
        const auto above_bin = [&](uint32_t key) { return key > cut.hi || (key >= cut.lo && cut.bin(key) > bin); };
        const auto in_bin = [&](uint32_t key) { return cut.holds(key) && cut.bin(key) == bin; };
        if (all || beyond + inside <= room) {
            from.each([&](int quad, uint4 k) {
                mark(s.bits, quad, nibble(k, [&](uint32_t key) { return above_bin(key) || in_bin(key); }));
            });
            break;
        }
        const bool few = inside <= FEW;
        if (few || (cut.by == 0.f && cut.shift == 0)) {
            from.each([&](int quad, uint4 k) {
                mark(s.bits, quad, nibble(k, above_bin));
                const uint32_t last = nibble(k, in_bin);
                if (!few) mark(s.ties, quad, last);
                for (uint32_t left = few ? last : 0u; left; left &= left - 1) {
                    const int j = __ffs(left) - 1, at = atomicAdd(&s.listed, 1);
                    s.keys[at] = j == 0 ? k.x : j == 1 ? k.y : j == 2 ? k.z : k.w;
                    s.places[at] = 4 * quad + j;
                }
            });
            __syncthreads();
            if (few && tid < inside) {
                const uint32_t key = s.keys[tid];
                const int place = s.places[tid];
                int rank = 0;
                for (int i = 0; i < inside; ++i) rank += s.keys[i] > key || (s.keys[i] == key && s.places[i] < place);
                if (rank < count - beyond) atomicOr(&s.bits[place / 32], 1u << (place % 32));
            }
            if (!few)
                in_turn(s, s.ties, words, [&](int rank, int place) {
                    if (rank < count - beyond) atomicOr(&s.bits[place / 32], 1u << (place % 32));
                });
            break;
        }
        if (cut.by > 0.f) { /* the least and the most in the bin: no other value lies between */
            uint32_t least = ALL, most = 0;
            from.each([&](int, uint4 k) {
                const auto see = [&](uint32_t key) {
                    if (in_bin(key)) least = min(least, key), most = max(most, key);
                };
                see(k.x), see(k.y), see(k.z), see(k.w);
            });
            least = __reduce_min_sync(ALL, least), most = __reduce_max_sync(ALL, most);
            if (lane == 0) s.least[warp] = least, s.most[warp] = most;
            __syncthreads();
            cut.lo = __reduce_min_sync(ALL, s.least[lane]), cut.hi = __reduce_max_sync(ALL, s.most[lane]);
        } else {
            cut.lo += static_cast<uint32_t>(bin) << cut.shift;
            cut.hi = cut.lo + min(cut.hi - cut.lo, (1u << cut.shift) - 1);
        }
        cut.by_bits();
    }
    __syncthreads();
}

} // namespace indexer
