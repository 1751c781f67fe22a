/* The best of a row's values, a CTA a row: positions by their scores, candidate blocks by their best,
 * positions of candidate blocks. Where values are many, first the blocks of `fan` whose best are best: each
 * that is not chosen has nothing that goes before their bests. 64 registers; 47 KB of shared memory, and where
 * values are more than registers hold (INDEXER_DIRECT) four bytes of each, if a CTA may have so many: up to
 * 46080 values on an H200, 29696 on an A100, none where a CTA has 99 KB. Else they are read from L2 each time. */
#include "../common/launch.hpp"
#include "../common/ptx.cuh"
#include "launch.hpp"
#include "rows.cuh"
#include "select.cuh"

namespace indexer {

using namespace ptx;

namespace {

constexpr int QUADS = INDEXER_DIRECT / 4 / CHOOSERS;
constexpr uint4 NOTHING = {NONE, NONE, NONE, NONE};

__device__ __forceinline__ void hold(Held<QUADS> &held, const float *values, int n, int apart) {
    float4 v[QUADS];
    held.n = n;
#pragma unroll
    for (int c = 0; c < QUADS; ++c) {
        const int quad = c * CHOOSERS + static_cast<int>(threadIdx.x);
        if (4 * quad < n) v[c] = read(values, quad);
    }
#pragma unroll
    for (int c = 0; c < QUADS; ++c) {
        const int quad = c * CHOOSERS + static_cast<int>(threadIdx.x);
        held.quads[c] = NOTHING;
        if (4 * quad < n) held.quads[c] = keys_of(v[c], quad, n, apart);
    }
}

/* Values of the chosen blocks alone: place i is value i % (1 << shift) of block s.blocks[i >> shift]. */
__device__ __forceinline__ void gather(Held<QUADS> &held, const Shared &s, const float *values, int picked, int shift,
                                       int entries) {
    float4 v[QUADS];
    held.n = picked << shift;
    int from[QUADS]; /* the quad; entries: none */
#pragma unroll
    for (int c = 0; c < QUADS; ++c) {
        const int place = 4 * (c * CHOOSERS + static_cast<int>(threadIdx.x));
        from[c] = entries;
        if (place >> shift >= picked) continue;
        from[c] = ((s.blocks[place >> shift] << shift) + (place & ((1 << shift) - 1))) >> 2;
        if (4 * from[c] < entries) v[c] = read(values, from[c]);
    }
#pragma unroll
    for (int c = 0; c < QUADS; ++c) {
        held.quads[c] = NOTHING;
        if (4 * from[c] < entries) held.quads[c] = keys_of(v[c], from[c], entries, -1);
    }
}

/* `room`: values whose keys dynamic shared memory has room for, a multiple of WARP_VALUES. */
__global__ void __launch_bounds__(CHOOSERS, 1)
    choose(const __grid_constant__ indexer_step step, const __grid_constant__ indexer_choose_args a, int room) {
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ Shared s;
    let_next_start();
    const int row = step.first_row + static_cast<int>(blockIdx.x), tid = static_cast<int>(threadIdx.x);
    const int live = step.starts[step.requests], owner = step.request[row];
    int seen = 0;
    if (row < min(live, step.rows)) seen = visible(step, step.lengths[owner], step.starts[owner + 1], row);
    wait_for_previous();
    if (seen == 0) {
        for (int i = tid; i < a.count; i += CHOOSERS) a.final[row * a.final_row + i] = -1;
        return;
    }
    const float *values = a.values + blockIdx.x * a.values_row;
    const bool blocks = a.kind == INDEXER_BLOCKS, candidates = a.kind == INDEXER_CANDIDATES;
    int entries = seen;
    if (blocks) entries = (seen + a.size - 1) / a.size;
    if (candidates) entries = min((seen + a.size - 1) / a.size, a.chosen_count) * a.size;
    const int newest = blocks ? entries - 1 : -1, count = blocks ? a.count - 1 : a.count;
    const int by = a.fan == 16 ? 4 : 3; /* a block's scores, as a shift */
    /* First of all values, or of the bests of blocks. */
    const bool twice = !blocks && entries > INDEXER_DIRECT;
    const float *first = twice ? a.tops + blockIdx.x * a.tops_row : values;
    int n = twice ? (entries + a.fan - 1) >> by : entries, picked = 0;
    Held<QUADS> held;
    const auto best_of = [&](const auto &once, const auto &from) {
        clear(s, (n + 31) / 32);
        const Range range = bounds(s, once, from, count); /* a barrier */
        if (tid == 0 && newest >= 0) s.bits[newest / 32] = 1u << (newest % 32);
        const int most = twice ? min(ROOM, INDEXER_DIRECT >> by) : count;
        return Range{choose_best(s, from, n, count, most, range), range.hi};
    };
    Range range;
    if (n <= INDEXER_DIRECT) {
        hold(held, first, n, newest);
        range = best_of(held, held);
    } else {
        const Streamed from{first, n, newest};
        auto *kept = reinterpret_cast<uint4 *>(memory);
        range = n <= room ? best_of(Keeping{from, kept}, Kept{kept, n}) : best_of(from, from);
    }
    if (twice) {
        picked = in_turn(s, s.bits, (n + 31) / 32, [&](int rank, int place) { s.blocks[rank] = place; });
        __syncthreads();
        if (picked < count) range.lo = NONE + 1; /* all blocks with anything: their bests bound nothing */
        gather(held, s, values, picked, by, entries);
        n = picked << by;
        clear(s, (n + 31) / 32);
        __syncthreads();
        choose_best(s, held, n, count, count, range);
    }
    int32_t *final = a.final + row * a.final_row;
    const int32_t *chosen = candidates ? a.chosen + row * a.chosen_row : nullptr;
    const int found = in_turn(s, s.bits, (n + 31) / 32, [&](int rank, int place) {
        if (picked) place = (s.blocks[place >> by] << by) + (place & (a.fan - 1));
        if (candidates) place = chosen[place / a.size] * a.size + place % a.size;
        final[rank] = place;
    });
    for (int i = found + tid; i < a.count; i += CHOOSERS) final[i] = -1;
}

} // namespace

cudaError_t launch_choose(const indexer_step &step, const indexer_choose_args &args, bool early, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(step.rows - step.first_row));
    const bool twice = args.kind == INDEXER_POSITIONS && args.entries > INDEXER_DIRECT;
    const int values = twice ? (args.entries + args.fan - 1) / args.fan : args.entries;
    int room = 0;
    if (values > INDEXER_DIRECT) {
        /* As much as there is where it is too little: `entries` of a graph is the longest a row may get. */
        if (const cudaError_t error = call::most_shared(room)) return error;
        room = (room - static_cast<int>(sizeof(Shared))) / 4 / WARP_VALUES * WARP_VALUES;
        if (room > 0)
            if (const cudaError_t error = call::allow_shared(choose, 4 * room)) return error;
        room = min(room, (values + WARP_VALUES - 1) / WARP_VALUES * WARP_VALUES);
        if (room <= INDEXER_DIRECT) room = 0; /* those are held */
    }
    return call::launch_early(choose, grid, CHOOSERS, 4 * room, early, stream, step, args, room);
}

} // namespace indexer
