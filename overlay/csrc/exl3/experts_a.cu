#include "experts.cuh"
#include "launch.hpp"

namespace exl3 {

/* A: grid [group of chunks, gate or up][split][slot]. The last of a (slot, group) finishes it. */
static __global__ void __launch_bounds__(32 * MAX_WARPS, 2) experts_a_kernel(const __grid_constant__ ExpertsLaunch p) {
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ uint8_t lists[MAX_WARPS][MAX_SLOTS];
    __shared__ const __half *scales[3]; /* of gate's and up's outputs, of down's inputs */
    __shared__ int flag;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int slot = static_cast<int>(blockIdx.z), split = static_cast<int>(blockIdx.y);
    const int group = static_cast<int>(blockIdx.x >> 1), which = static_cast<int>(blockIdx.x & 1);
    wait_for_previous(); /* ids and rows are what it wrote */
    let_next_start();
    uint8_t *const list = lists[warp];
    const int expert = slot == p.slots ? p.experts : slot_expert(p, slot);
    if (expert < 0) return;
    /* The table's answer is on its way while the rows are looked for. */
    Matrix entry = table_entry(p, which, expert);
    const bool fetches = warp == p.warps - 1; /* the scales' addresses, for whichever CTA ends the group */
    if (fetches && lane < 3) copy8(shared_address(scales + lane), table_scale(p, lane, expert));
    copy_commit();
    const int count = find_rows(p, slot, expert, lane, list);
    if (count == 0) return;

    const int block0 = split * p.kblocks, blocks = min(p.kblocks, p.hidden_blocks - block0);
    const Stand &stand = p.stand[group == p.groups - 1];
    const int here = stand.chunks;
    const int inter = p.inter_blocks * CHUNK;
    uint32_t *const x = shared + p.warps * p.ring_words;
    float *const red = reinterpret_cast<float *>(shared);
    const auto partial_at = [&](int row, int proj, int part, int c) {
        return p.partial + ((static_cast<int64_t>(row) * 2 + proj) * p.splits + part) * inter +
               c * CHUNK;
    };
    /* Ahead of the weights, behind which they would wait. */
    for (int i = threadIdx.x; i < 2 * blocks; i += 32 * p.warps) prefetch(entry.suh + 128 * block0 + 64 * i);
    for (int base = 0; base < count; base += 8) {
        const int some = min(8, count - base);
        if (base) entry = table_entry(p, which, expert); /* rather than to keep it: registers are few */
        const int k2 = entry.k2;
        const Place at = place_of(stand, warp, blocks);
        Stream stream = stream_at(entry.trellis, p.inter_blocks, k2, block0, group * p.chunks, at, shared + warp * p.ring_words);
        stream.x = reinterpret_cast<const uint2 *>(x) + at.tile0 * 32 + lane;
        start_stream(stream, k2, entry.codebook, lane);
        const auto row_at = [&](int row) { return p.x + row_token(p, list[base + row]) * p.x_stride + 128 * block0; };
        rotate_rows<1>(row_at, some, blocks, entry.suh + 128 * block0, warp, p.warps, lane, x);
        if (fetches && base == 0) {
            copy_wait<2>(); /* all but the first stages of weights */
            __syncwarp();
            for (int i = lane; i < 6 * here; i += 32) {
                const int line = divide(i, 21846u); /* by 3 */
                prefetch(scales[i - 3 * line] + CHUNK * p.chunks * group + 64 * line);
            }
        }
        __syncthreads();
        Sums<1> sums = {};
        run_stream<1, 32>(stream, k2, entry.codebook, lane, sums);
        __syncthreads();
        if (at.works) put_sums<1>(sums, 0, red + warp * RED_WARP, lane);
        __syncthreads();
        for (int task = warp; task < some * here; task += p.warps) {
            const int row = divide(task, stand.by_chunks), c = task - row * here;
            const float4 v = take_sums(red, c, here, stand.lanes, row, lane);
            __stcg(reinterpret_cast<float4 *>(partial_at(list[base + row], which, split, group * p.chunks + c)) + lane, v);
        }
        __syncthreads(); /* the sums lie where the next pass streams to */
    }
    if (!arrive(p.counters_a + slot * p.groups + group, 2 * p.splits, &flag)) return;

    for (int task = warp; task < count * here; task += p.warps) {
        const int r = divide(task, stand.by_chunks), c = group * p.chunks + task - r * here, row = list[r];
        const float4 gate_svh = scales_of(scales[0] + c * CHUNK, lane), up_svh = scales_of(scales[1] + c * CHUNK, lane);
        const float4 suh = scales_of(scales[2] + c * CHUNK, lane);
        float4 gate, up;
        sum_both(partial_at(row, 0, 0, c), partial_at(row, 1, 0, c), inter, p.splits, lane, gate, up);
        gate = finish(gate, gate_svh, lane);
        up = finish(up, up_svh, lane);
        float4 v;
        /* 1/8 as the other rotated inputs have it. */
        v.x = gated(gate.x, up.x, p.limit) * suh.x * 0.125f;
        v.y = gated(gate.y, up.y, p.limit) * suh.y * 0.125f;
        v.z = gated(gate.z, up.z, p.limit) * suh.z * 0.125f;
        v.w = gated(gate.w, up.w, p.limit) * suh.w * 0.125f;
        put_operand(p.act + static_cast<int64_t>(row) * inter + c * CHUNK, hadamard(v, lane), lane);
    }
}

/* May start while what comes before still ends, where the chip can: it waits before it reads anything. */
cudaError_t launch_experts_a(const ExpertsLaunch &p, int bytes, bool early, cudaStream_t stream) {
    const dim3 grid(2 * p.groups, p.splits, p.slots + p.shared);
    return launch_warps(experts_a_kernel, p, grid, bytes, early, stream);
}

} // namespace exl3
