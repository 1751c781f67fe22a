#include "experts.cuh"
#include "launch.hpp"

namespace exl3 {

/* B: grid [group of chunks of hidden][split of inter][slot]. The last of a group, spare CTAs included,
 * adds every token's slots. */
static __global__ void __launch_bounds__(32 * MAX_WARPS, 2) experts_b_kernel(const __grid_constant__ ExpertsLaunch p) {
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ uint8_t lists[MAX_WARPS][MAX_SLOTS];
    __shared__ const __half *scales; /* of the expert's outputs */
    __shared__ int flag;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int slot = static_cast<int>(blockIdx.z), split = static_cast<int>(blockIdx.y);
    const int group = static_cast<int>(blockIdx.x);
    const Stand &stand = p.stand[group == p.groups - 1];
    const int here = stand.chunks;
    const int hidden = p.hidden_blocks * CHUNK, inter = p.inter_blocks * CHUNK;
    uint8_t *const list = lists[warp];
    const int expert = slot == p.slots ? p.experts : slot_expert(p, slot);
    int count = 0;
    if (expert >= 0) {
        Matrix entry = table_entry(p, 2, expert);
        count = find_rows(p, slot, expert, lane, list);
        if (count) {
            const int block0 = split * p.kblocks, blocks = min(p.kblocks, p.inter_blocks - block0);
            uint32_t *const x = shared + p.warps * p.ring_words;
            float *const red = reinterpret_cast<float *>(shared);
            if (threadIdx.x == 0) scales = entry.svh;
            if (static_cast<int>(threadIdx.x) < 2 * here)
                prefetch(entry.svh + CHUNK * p.chunks * group + 64 * threadIdx.x);
            /* The rows lie one after the other, as in `act`, each a little more than a multiple of 128
               bytes from the last: no bank conflicts. Rows that are not there read the first one's. */
            const int row_words = blocks * 64 + 8;
            const auto row_at = [&](int r) { return p.act + static_cast<int64_t>(list[r]) * inter + CHUNK * block0; };
            for (int base = 0; base < count; base += 8) {
                const int some = min(8, count - base);
                if (base) entry = table_entry(p, 2, expert); /* rather than to keep it: registers are few */
                const int k2 = entry.k2;
                const Place at = place_of(stand, warp, blocks);
                Stream stream = stream_at(entry.trellis, p.hidden_blocks, k2, block0, group * p.chunks, at,
                                          shared + warp * p.ring_words);
                start_stream(stream, k2, entry.codebook, lane);
                if (base == 0) wait_for_previous();
                for (int r = 0; r < some; ++r) {
                    const uint4 *from = reinterpret_cast<const uint4 *>(row_at(base + r));
                    for (int i = threadIdx.x; i < 16 * blocks; i += 32 * p.warps)
                        copy16(shared_address(x + r * row_words + 4 * i), from + i);
                }
                copy_commit();
                const int r = lane >> 2 < some ? lane >> 2 : 0;
                stream.x = reinterpret_cast<const uint2 *>(x + r * row_words + at.tile0 * 8) + (lane & 3);
                copy_wait<0>();
                __syncthreads();
                Sums<1> sums = {};
                run_stream<1, 4>(stream, k2, entry.codebook, lane, sums);
                /* What the first task of this warp wants of memory, while the sums are put together. */
                const auto scale_at = [&](int task, int row_here) {
                    return scales + (group * p.chunks + task - row_here * here) * CHUNK;
                };
                const auto weight_of = [&](int row) { return row < p.slots ? __ldcg(p.weights + row) : 1.0f; };
                float4 svh = {};
                float weight = 0.0f;
                if (warp < some * here) {
                    const int row_here = divide(warp, stand.by_chunks);
                    svh = scales_of(scale_at(warp, row_here), lane);
                    weight = weight_of(list[base + row_here]);
                }
                __syncthreads();
                if (at.works) put_sums<1>(sums, 0, red + warp * RED_WARP, lane);
                __syncthreads();
                for (int task = warp; task < some * here; task += p.warps) {
                    const int row_here = divide(task, stand.by_chunks), c = group * p.chunks + task - row_here * here;
                    const int row = list[base + row_here];
                    if (task != warp) svh = scales_of(scale_at(task, row_here), lane), weight = weight_of(row);
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
    if (!count) {
        wait_for_previous();
        /* A slot without an expert of ours has a row of zeros. */
        if (expert < 0)
            for (int c = warp; c < here; c += p.warps)
                __stcg(reinterpret_cast<float4 *>(p.out + (static_cast<int64_t>(slot) * p.splits + split) * hidden +
                                                  (group * p.chunks + c) * CHUNK) + lane,
                       make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
    if (!arrive(p.counters_b + group, (p.slots + p.shared) * p.splits, &flag)) return;
    const int rows = p.topk * p.splits;
    for (int task = warp; task < p.tokens * here; task += p.warps) {
        const int token = divide(task, stand.by_chunks), c = group * p.chunks + task - token * here;
        float4 total = sum_partials<8>(p.out + static_cast<int64_t>(token) * rows * hidden + c * CHUNK, hidden, rows, lane);
        if (p.shared) {
            const float *const own = p.out + (static_cast<int64_t>(p.slots) + token) * p.splits * hidden + c * CHUNK;
            add_four(total, sum_partials<8>(own, hidden, p.splits, lane));
        }
        store_four(p.y, token * p.y_stride + c * CHUNK + 4 * lane, p.fp32, total);
    }
}

/* May start while A still ends, where the chip can: it waits for A before it reads what A wrote. */
cudaError_t launch_experts_b(const ExpertsLaunch &p, int bytes, bool early, cudaStream_t stream) {
    const dim3 grid(p.groups, p.splits, p.slots + p.shared);
    return launch_warps(experts_b_kernel, p, grid, bytes, early, stream);
}

} // namespace exl3
