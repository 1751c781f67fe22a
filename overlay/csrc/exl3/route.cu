/* Sorting by expert, rotated inputs of a wave, and the sum over a token's experts. */
#include "route.cuh"
#include "many.hpp"

namespace exl3 {

constexpr int ROUTE_THREADS = 512, ROUTE_WARPS = ROUTE_THREADS / 32;
constexpr int GATHER_WARPS = 4;

/* Exclusive sums of v[0..n) in place, v[n] the total; by the whole CTA. */
__device__ __forceinline__ void exclusive_sums(int *v, int n, int *warps) {
    const int each = (n + ROUTE_THREADS - 1) / ROUTE_THREADS, first = static_cast<int>(threadIdx.x) * each;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int own = 0;
    for (int i = first; i < min(first + each, n); ++i) own += v[i];
    int upto = own;
    for (int m = 1; m < 32; m *= 2) {
        const int other = __shfl_up_sync(~0u, upto, m);
        if (lane >= m) upto += other;
    }
    if (lane == 31) warps[warp] = upto;
    __syncthreads();
    if (warp == 0) {
        int total = lane < ROUTE_WARPS ? warps[lane] : 0;
        for (int m = 1; m < 32; m *= 2) {
            const int other = __shfl_up_sync(~0u, total, m);
            if (lane >= m) total += other;
        }
        if (lane < ROUTE_WARPS) warps[lane] = total;
    }
    __syncthreads();
    int at = upto - own + (warp ? warps[warp - 1] : 0);
    for (int i = first; i < min(first + each, n); ++i) {
        const int here = v[i];
        v[i] = at;
        at += here;
    }
    if (threadIdx.x == 0) v[n] = warps[ROUTE_WARPS - 1];
    __syncthreads();
}

/* The last place i of 0..n-1 with v[i] <= at. */
__device__ __forceinline__ int find(const int *v, int n, int at) {
    int low = 0, high = n;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (v[middle] <= at ? low : high) = middle;
    }
    return low;
}

/* One more for counter[entry] of each lane whose entry is not negative; the lane's place. All rows may
 * be of one entry: lanes that all agree ask together. */
__device__ __forceinline__ int count_one(int *counter, int entry) {
    const int lane = threadIdx.x & 31;
    int place = 0;
    if (__all_sync(~0u, entry == __shfl_sync(~0u, entry, 0))) {
        if (entry >= 0 && lane == 0) place = atomicAdd(counter + entry, 32);
        return __shfl_sync(~0u, place, 0) + lane;
    }
    if (entry >= 0) place = atomicAdd(counter + entry, 1);
    return place;
}

/* take(slot, entry or -1) for every slot, by whole warps; ids are loaded eight at a time. */
template <typename Take>
__device__ __forceinline__ void for_slots(const RouteLaunch &p, Take take) {
    constexpr int EACH = 8;
    for (int base = static_cast<int>(threadIdx.x) & ~31; base < p.slots; base += EACH * ROUTE_THREADS) {
        const int first = base + static_cast<int>(threadIdx.x & 31);
        int entry[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int slot = first + i * ROUTE_THREADS;
            entry[i] = slot < p.slots ? slot_entry(p, slot) : -1;
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (base + i * ROUTE_THREADS < p.slots) take(first + i * ROUTE_THREADS, entry[i]);
    }
}

__device__ __forceinline__ int ceil_by(int a, int b) { return (a + b - 1) / b; }

/* Items of groups [first, first + groups): cut at waves, each piece into equal parts of at most
 * `most`. Calls item(number, first, groups); returns their number. */
template <typename Item>
__device__ __forceinline__ int for_items(int first, int groups, int wave, int most, Item item) {
    int number = 0;
    const int end = first + groups;
    while (first < end) {
        const int piece = min(end, (first / wave + 1) * wave) - first, parts = ceil_by(piece, most);
        for (int i = 0; i < parts; ++i) {
            const int from = piece * i / parts;
            item(number++, first + from, piece * (i + 1) / parts - from);
        }
        first += piece;
    }
    return number;
}

/* One CTA. The order of an entry's rows is whatever it turns out; no row's result depends on it. */
__global__ void __launch_bounds__(ROUTE_THREADS, 2) route_kernel(const __grid_constant__ RouteLaunch p) {
    /* Place 0 is the shared entry, place 1 + e expert e. */
    __shared__ int counts[MAX_ENTRIES + 1], groups[MAX_ENTRIES + 2], items[MAX_ENTRIES + 2], warps[ROUTE_WARPS];
    const int tid = static_cast<int>(threadIdx.x), entries = p.experts + 1;
    for (int i = tid; i < entries; i += ROUTE_THREADS) counts[i] = i == 0 && p.shared ? p.tokens : 0;
    __syncthreads();
    for_slots(p, [&](int, int entry) { count_one(counts + 1, entry); });
    __syncthreads();
    for (int i = tid; i < entries; i += ROUTE_THREADS) groups[i] = (counts[i] + 7) / 8;
    __syncthreads();
    exclusive_sums(groups, entries, warps);
    const auto nothing = [](int, int, int) {};
    for (int i = tid; i < entries; i += ROUTE_THREADS)
        items[i] = for_items(groups[i], groups[i + 1] - groups[i], p.wave, p.most, nothing);
    __syncthreads();
    exclusive_sums(items, entries, warps);
    const int all = groups[entries], total = items[entries];
    if (tid == 0) {
        p.head->groups = all;
        p.head->items = total;
    }
    for (int i = tid; i < MAX_WAVES + 4; i += ROUTE_THREADS)
        if (i * p.wave >= all) p.head->wave_item[i] = total;
    for (int i = tid; i < entries; i += ROUTE_THREADS) {
        const int entry = i ? i - 1 : p.experts, base = items[i];
        for_items(groups[i], groups[i + 1] - groups[i], p.wave, p.most, [&](int number, int first, int count) {
            p.items[base + number] = make_int4(entry, first, count, 0);
            if (first % p.wave == 0) p.head->wave_item[first / p.wave] = base + number;
        });
    }
    for (int g = tid; g < all; g += ROUTE_THREADS) {
        const int i = find(groups, entries, g), rows = counts[i] - 8 * (g - groups[i]);
        p.entry_of[g] = i ? i - 1 : p.experts;
        for (int row = 0; row < 8; ++row)
            if (row >= rows || i == 0)
                p.slot_of[8 * g + row] = row < rows ? p.slots + 8 * (g - groups[i]) + row : -1;
    }
    __syncthreads(); /* all have read the counts */
    for (int i = tid; i < entries; i += ROUTE_THREADS) counts[i] = 0;
    __syncthreads();
    for_slots(p, [&](int slot, int entry) {
        const int place = count_one(counts + 1, entry);
        if (entry >= 0) p.slot_of[8 * groups[1 + entry] + place] = slot;
    });
}

/* A CTA one group, for gate and up; its warps share out the k-blocks. Grid: groups of a wave. */
__global__ void __launch_bounds__(32 * GATHER_WARPS, 4) gather_kernel(const __grid_constant__ RouteLaunch p, int first) {
    __shared__ float sums[2][GATHER_WARPS][8];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, q = lane & 3;
    const int local = static_cast<int>(blockIdx.x), group = first + local;
    if (group >= p.head->groups) return;
    const int entry = p.entry_of[group], slot = p.slot_of[8 * group + (lane >> 2)];
    const int token = slot < p.slots ? slot / p.topk : slot - p.slots;
    const int entries = p.experts + p.shared;
    const auto suh_of = [&](int which) {
        const int64_t at = __ldg(reinterpret_cast<const long long *>(p.table) + 4 * (which * entries + entry) + 1);
        return reinterpret_cast<const __half *>(at) + 4 * q;
    };
    const __half *const gate = suh_of(0), *const up = suh_of(1);
    const __nv_bfloat16 *const x = p.x + token * p.x_stride + 4 * q;
    const Hadamard16 had(lane);
    const uint32_t ones[4] = {0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u};
    float s[2][4] = {};
#pragma unroll 1
    for (int block = warp; block < p.blocks; block += GATHER_WARPS) {
        uint32_t a[8][4];
#pragma unroll
        for (int hi = 0; hi < 8; ++hi) {
            const int at = 128 * block + 16 * hi;
            const uint2 v = slot >= 0 ? __ldg(reinterpret_cast<const uint2 *>(x + at)) : make_uint2(0u, 0u);
            scale_four(v, __ldg(reinterpret_cast<const uint2 *>(gate + at)), a[hi][0], a[hi][2]);
            scale_four(v, __ldg(reinterpret_cast<const uint2 *>(up + at)), a[hi][1], a[hi][3]);
        }
        uint32_t b[8][2][2];
        rotate_operands(a, had, b);
#pragma unroll
        for (int nb = 0; nb < 2; ++nb) {
            uint2 *const to = p.inputs + ((static_cast<int64_t>(nb) * (p.wave + SPARE_GROUPS) + local) * p.blocks + block) * 256 + lane;
#pragma unroll
            for (int hi = 0; hi < 8; ++hi) {
                to[32 * hi] = make_uint2(b[hi][nb][0], b[hi][nb][1]);
                mma_fp16(s[nb], ones, b[hi][nb][0], b[hi][nb][1]);
            }
        }
    }
    if (lane < 4)
        for (int nb = 0; nb < 2; ++nb) {
            sums[nb][warp][2 * lane] = s[nb][0];
            sums[nb][warp][2 * lane + 1] = s[nb][1];
        }
    __syncthreads();
    if (threadIdx.x < 16) {
        const int nb = threadIdx.x >> 3, row = threadIdx.x & 7;
        float total = 0.0f;
        for (int i = 0; i < GATHER_WARPS; ++i) total += sums[nb][i][row];
        p.sums[static_cast<int64_t>(nb) * p.wave * 8 + 8 * local + row] = total;
    }
}

/* A CTA one token; `out` fp32 [slots + tokens][chunks * 128] are the experts' outputs of the chunks
 * from `chunk` on. Slots in their order, then the shared expert. */
__global__ void __launch_bounds__(256) combine_kernel(const __grid_constant__ RouteLaunch p, const float *out,
                                                      int chunk, int chunks) {
    const int token = static_cast<int>(blockIdx.x), width = 32 * chunks;
    for (int i = threadIdx.x; i < width; i += 256) {
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 6
        for (int j = 0; j < p.topk; ++j) {
            const int slot = token * p.topk + j;
            if (slot_entry(p, slot) >= 0)
                add_four(total, __ldcs(reinterpret_cast<const float4 *>(out) + static_cast<int64_t>(slot) * width + i));
        }
        if (p.shared)
            add_four(total, __ldcs(reinterpret_cast<const float4 *>(out) + static_cast<int64_t>(p.slots + token) * width + i));
        store_four(p.y, token * p.y_stride + CHUNK * chunk + 4 * i, p.fp32, total);
    }
}

cudaError_t launch_route(const RouteLaunch &p, cudaStream_t stream) {
    route_kernel<<<1, ROUTE_THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

cudaError_t launch_gather(const RouteLaunch &p, int first, int groups, cudaStream_t stream) {
    gather_kernel<<<groups, 32 * GATHER_WARPS, 0, stream>>>(p, first);
    return cudaGetLastError();
}

cudaError_t launch_combine(const RouteLaunch &p, const float *out, int chunk, int chunks, cudaStream_t stream) {
    combine_kernel<<<p.tokens, 256, 0, stream>>>(p, out, chunk, chunks);
    return cudaGetLastError();
}

} // namespace exl3
