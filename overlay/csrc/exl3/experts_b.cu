#include "experts.cuh"
#include "launch.hpp"

namespace exl3 {

/* B: grid [group of chunks of hidden][split of inter][slot]. The last of a group, spare CTAs included,
 * adds every token's slots. */
static __global__ void __launch_bounds__(32 * MAX_WARPS, 2) experts_b_kernel(const __grid_constant__ ExpertsLaunch p) {
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ uint8_t lists[MAX_WARPS][MAX_SLOTS];
    __shared__ int flag;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int slot = static_cast<int>(blockIdx.z), split = static_cast<int>(blockIdx.y);
    const int group = static_cast<int>(blockIdx.x);
    const Stand &stand = p.stand[group == p.groups - 1];
    const int here = stand.chunks;
    const int hidden = p.hidden_blocks * CHUNK, inter = p.inter_blocks * CHUNK;
    uint8_t *const list = lists[warp];
    EXL3_MARK(0);
    const int expert = slot == p.slots ? p.experts : slot_expert(p, slot);
    int count = 0;
    if (expert >= 0) {
        const Entry entry = table_entry(p, 2, expert);
        count = find_rows(p, slot, expert, lane, list);
        if (count) {
            const int k2 = entry.k2;
            const int block0 = split * p.kblocks, blocks = min(p.kblocks, p.inter_blocks - block0);
            const Place at = place_of(stand, warp, blocks);
            const int chunk = group * p.chunks + at.chunk;
            uint32_t *const x = shared + p.warps * p.ring_words;
            float *const red = reinterpret_cast<float *>(shared);
            Stream stream;
            stream.stride = static_cast<int64_t>(p.hidden_blocks) * 128 * k2;
            stream.from = entry.trellis + (8 * block0 + at.tile0) * stream.stride + static_cast<int64_t>(chunk) * 128 * k2;
            stream.count = at.tile1 - at.tile0;
            stream.ring = shared + warp * p.ring_words;
            if (static_cast<int>(threadIdx.x) < 2 * here)
                prefetch(entry.svh + CHUNK * p.chunks * group + 64 * threadIdx.x);
            /* The rows lie one after the other, as in `act`, each a little more than a multiple of 128
               bytes from the last: no bank conflicts. Rows that are not there read the first one's. */
            const int row_words = blocks * 64 + 8;
            const auto row_at = [&](int r) { return p.act + static_cast<int64_t>(list[r]) * inter + CHUNK * block0; };
            for (int base = 0; base < count; base += 8) {
                const int some = min(8, count - base);
#define EXL3_START(K2) stream_start<K2>(stream, k2, lane)
                EXL3_FOR_RATE(k2, entry.codebook, EXL3_START)
#undef EXL3_START
                EXL3_MARK(1);
                if (base == 0) wait_for_previous();
                EXL3_MARK(2);
                for (int r = 0; r < some; ++r) {
                    const uint4 *from = reinterpret_cast<const uint4 *>(row_at(base + r));
                    for (int i = threadIdx.x; i < 16 * blocks; i += 32 * p.warps)
                        copy_async(shared_address(x + r * row_words + 4 * i), from + i);
                }
                copy_commit();
                const int r = lane >> 2 < some ? lane >> 2 : 0;
                stream.x = reinterpret_cast<const uint2 *>(x + r * row_words + at.tile0 * 8) + (lane & 3);
                copy_wait<0>();
                __syncthreads();
                EXL3_MARK(3);
                Sums<1> sums = {};
#define EXL3_RUN(K2) stream_run<K2, 1, 4>(stream, k2, entry.codebook, lane, sums)
                EXL3_FOR_RATE(k2, entry.codebook, EXL3_RUN)
#undef EXL3_RUN
                __syncthreads();
                EXL3_MARK(4);
                if (at.works) put_sums<1>(sums, 0, red + warp * RED_WARP, lane);
                __syncthreads();
                for (int task = warp; task < some * here; task += p.warps) {
                    const int row_here = divide(task, stand.by_chunks), c = group * p.chunks + task - row_here * here;
                    const int row = list[base + row_here];
                    const float4 svh = scales_of(entry.svh + c * CHUNK, lane);
                    const float weight = row < p.slots ? __ldcg(p.weights + row) : 1.0f;
                    float4 v = take_sums(red, task - row_here * here, here, stand.lanes, row_here, lane);
                    v = finish(v, svh, lane);
                    v = make_float4(v.x * weight, v.y * weight, v.z * weight, v.w * weight);
                    float *const to = p.out + (static_cast<int64_t>(row) * p.splits + split) * hidden + c * CHUNK;
                    __stcg(reinterpret_cast<float4 *>(to) + lane, v);
                }
                __syncthreads();
            }
        }
    }
    if (!count) wait_for_previous();
    EXL3_MARK(5);
    if (!arrive(p.counters_b + group, (p.slots + p.shared) * p.splits, &flag)) return;
    EXL3_MARK(6);
    /* Rows that a token's slots have in `out`, one after the other: those of invalid ids are not there. */
    uint32_t valid[MAX_SLOTS / 32];
#pragma unroll
    for (int i = 0; i < MAX_SLOTS / 32; ++i)
        valid[i] = __ballot_sync(~0u, 32 * i + lane < p.slots && slot_expert(p, 32 * i + lane) >= 0);
    const int rows = p.topk * p.splits, all = rows + p.shared * p.splits;
    for (int task = warp; task < p.tokens * here; task += p.warps) {
        const int token = divide(task, stand.by_chunks), c = group * p.chunks + task - token * here;
        const float *const own = p.out + static_cast<int64_t>(token) * rows * hidden + c * CHUNK;
        const float *const shared_own = p.out + (static_cast<int64_t>(p.slots) + token) * p.splits * hidden + c * CHUNK;
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int base = 0; base < all; base += 8) {
            float4 v[8];
            bool there[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int at = base + i, of = token * p.topk + static_cast<int>(divide(at, p.by_splits));
                const uint32_t mask = of < 64 ? (of < 32 ? valid[0] : valid[1]) : of < 96 ? valid[2] : valid[3];
                there[i] = at < all && (at >= rows || (mask >> (of & 31) & 1u));
                const float *const from = at < rows ? own + static_cast<int64_t>(at) * hidden
                                                    : shared_own + static_cast<int64_t>(at - rows) * hidden;
                if (there[i]) v[i] = __ldcg(reinterpret_cast<const float4 *>(from) + lane);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (there[i]) add_four(total, v[i]);
        }
        store_four(p.y, token * p.y_stride + c * CHUNK + 4 * lane, p.fp32, total);
    }
    EXL3_MARK(7);
}

/* May start while A still ends, where the chip can: it waits for A before it reads what A wrote. */
cudaError_t launch_experts_b(const ExpertsLaunch &p, int bytes, bool early, cudaStream_t stream) {
    const dim3 grid(p.groups, p.splits, p.slots + p.shared);
    return launch_early(experts_b_kernel, p, grid, bytes, early, stream);
}

} // namespace exl3
