/* The best of a row's values, a CTA a row: positions by their scores, candidate blocks by their best,
 * positions of candidate blocks. Where values are many, first the blocks of `fan` whose best are best: each
 * that is not chosen has nothing that goes before their bests. */
#include "launch.hpp"
#include "ptx.cuh"
#include "rows.cuh"
#include "select.cuh"

namespace indexer {
namespace {

constexpr int QUADS = INDEXER_DIRECT / 4 / CHOOSERS;

__device__ __forceinline__ void hold(Held<QUADS> &held, const float *values, int n, int apart) {
    float4 v[QUADS];
#pragma unroll
    for (int c = 0; c < QUADS; ++c) {
        const int quad = c * CHOOSERS + static_cast<int>(threadIdx.x);
        v[c] = 4 * quad < n ? read(reinterpret_cast<const float4 *>(values) + quad) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int c = 0; c < QUADS; ++c)
        held.quads[c] = keys_of(v[c], c * CHOOSERS + static_cast<int>(threadIdx.x), n, apart);
}

/* Values of the chosen blocks alone: place i is value i % fan of block s.blocks[i / fan]. */
__device__ __forceinline__ void gather(Held<QUADS> &held, const Shared &s, const float *values, int picked, int fan,
                                       int entries) {
    float4 v[QUADS];
    int first[QUADS];
#pragma unroll
    for (int c = 0; c < QUADS; ++c) {
        const int place = 4 * (c * CHOOSERS + static_cast<int>(threadIdx.x));
        first[c] = place < picked * fan ? s.blocks[place / fan] * fan + place % fan : entries;
        v[c] = first[c] < entries ? read(reinterpret_cast<const float4 *>(values + first[c])) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int c = 0; c < QUADS; ++c) held.quads[c] = keys_of(v[c], first[c] / 4, entries, -1);
}

__global__ void __launch_bounds__(CHOOSERS, 1)
    choose(const __grid_constant__ indexer_step step, const __grid_constant__ indexer_choose_args a) {
    __shared__ Shared s;
    let_next_start();
    const int row = step.first_row + static_cast<int>(blockIdx.x), tid = static_cast<int>(threadIdx.x);
    int32_t *final = a.final + row * a.final_row;
    const int live = step.starts[step.requests], owner = step.request[row];
    int seen = 0;
    if (row < min(live, step.rows)) seen = visible(step, step.lengths[owner], step.starts[owner + 1], row);
    wait_for_previous();
    if (seen == 0) {
        for (int i = tid; i < a.count; i += CHOOSERS) final[i] = -1;
        return;
    }
    const float *values = a.values + blockIdx.x * a.values_row;
    const bool blocks = a.kind == INDEXER_BLOCKS, candidates = a.kind == INDEXER_CANDIDATES;
    const int32_t *chosen = candidates ? a.chosen + row * a.chosen_row : nullptr;
    int entries = seen;
    if (blocks) entries = (seen + a.size - 1) / a.size;
    if (candidates) entries = min((seen + a.size - 1) / a.size, a.chosen_count) * a.size;
    const int newest = blocks ? entries - 1 : -1, count = blocks ? a.count - 1 : a.count;
    int n = entries, picked = 0;
    Held<QUADS> held;
    if (entries <= INDEXER_DIRECT) {
        hold(held, values, entries, newest);
        choose_best(s, held, n, count, count, newest);
    } else if (blocks) {
        const Streamed from{reinterpret_cast<const float4 *>(values), entries, newest};
        choose_best(s, from, n, count, count, newest);
    } else {
        const int tops = (entries + a.fan - 1) / a.fan;
        const Streamed from{reinterpret_cast<const float4 *>(a.tops + blockIdx.x * a.tops_row), tops, -1};
        choose_best(s, from, tops, count, min(ROOM, INDEXER_DIRECT / a.fan), -1);
        picked = in_turn(s, s.bits, (tops + 31) / 32, [&](int rank, int place) { s.blocks[rank] = place; });
        __syncthreads();
        gather(held, s, values, picked, a.fan, entries);
        n = picked * a.fan;
        choose_best(s, held, n, count, count, -1);
    }
    const int found = in_turn(s, s.bits, (n + 31) / 32, [&](int rank, int place) {
        if (picked) place = s.blocks[place / a.fan] * a.fan + place % a.fan;
        if (candidates) place = chosen[place / a.size] * a.size + place % a.size;
        final[rank] = place;
    });
    for (int i = found + tid; i < a.count; i += CHOOSERS) final[i] = -1;
}

} // namespace

cudaError_t launch_choose(const indexer_step &step, const indexer_choose_args &args, bool early, cudaStream_t stream) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(step.rows - step.first_row));
    config.blockDim = dim3(CHOOSERS);
    config.stream = stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, choose, step, args);
}

} // namespace indexer
