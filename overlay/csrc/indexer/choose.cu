/* The best of a row's values, a CTA a row: positions by their scores, candidate blocks by their best,
 * positions of candidate blocks. Where values are many, first the blocks of `fan` whose best are best: each
 * that is not chosen has nothing that goes before their bests. Positions go by short lists (listed.cuh), where
 * those hold what may be chosen, else, and blocks always, by bits (select.cuh).
 * 512 threads of up to 128 registers: what every warp does once costs half of what it would by 1024. 47 KB of
 * shared memory; where values are more than registers hold (INDEXER_DIRECT), and for blocks, four bytes of each,
 * if a CTA may have so many: up to 46208 values on an H200, 29824 on an A100, 13440 where a CTA has 99 KB. Else
 * they are read from L2 each time. */
#include "../common/launch.hpp"
#include "../common/ptx.cuh"
#include "launch.hpp"
#include "listed.cuh"
#include "rows.cuh"

namespace indexer {

using namespace ptx;

namespace {

/* One row's choice: what to read, and where the places go. */
struct Row {
    const indexer_choose_args &args;
    const float *values, *tops;
    const int32_t *chosen; /* candidates alone */
    int32_t *final;
    int entries, count, room; /* room: values whose keys dynamic shared memory has room for */
    int by, size;             /* a block's scores, a candidate's positions, as shifts */

    /* Whether first the blocks are chosen whose bests are best. */
    __device__ __forceinline__ bool twice() const { return args.kind != INDEXER_BLOCKS && entries > INDEXER_DIRECT; }
    /* Blocks that are chosen, at most. */
    __device__ __forceinline__ int most() const { return min(ROOM, INDEXER_DIRECT >> by); }

    /* The position of a value, of the chosen blocks' where there are any. */
    __device__ __forceinline__ int position(const Shared &s, int place) const {
        if (twice()) place = (s.blocks[place >> by] << by) + (place & ((1 << by) - 1));
        if (chosen) place = (chosen[place >> size] << size) + (place & ((1 << size) - 1));
        return place;
    }

    /* What is chosen of first. */
    __device__ __forceinline__ Source first() const {
        return twice() ? Source{tops, (entries + args.fan - 1) >> by, nullptr, 0} : Source{values, entries, nullptr, 0};
    }

    /* Values of the chosen blocks, the last of which may have fewer. */
    __device__ __forceinline__ Source of_blocks(const Shared &s, int all) const {
        const int n = all ? ((all - 1) << by) + min(1 << by, entries - (s.blocks[all - 1] << by)) : 0;
        return {values, n, s.blocks, by - 2};
    }
};

/* Whether `n` values are kept in dynamic shared memory. */
__device__ __forceinline__ bool keeps(const Row &row, int n) { return n <= row.room; }

/* Blocks whose bests, more than are held, reach a bound, to s.blocks; returns how many there are. Ends with a
 * barrier. */
__device__ __forceinline__ int list_blocks(const Row &row, const Source &from, Shared &s, uint8_t *memory,
                                           Range &range) {
    const int whole = from.n / 4, words = (from.n + 31) / 32; /* quads */
    auto *kept = reinterpret_cast<float4 *>(memory);
    const bool keep = keeps(row, from.n);
    if (keep) { /* a thread copies what it reads */
        for (int quad = thread(); 4 * quad < from.n; quad += CHOOSERS)
            copy16(shared_address(kept + quad), from.values + 4 * quad, true);
        copy_commit();
    }
    clear(s, words);
    copy_wait_all();
    const auto each = [&](auto &&work) {
        const auto if_whole = [&](int quad, const float4 &v) {
            if (quad < whole) work(quad, v);
        };
        if (keep)
            by_several<float4>(whole, [&](int quad) { return kept[quad]; }, if_whole);
        else
            by_several<float4, 8>(whole, [&](int quad) { return from.first(quad); }, if_whole);
        if (from.n % 4 && thread() == whole % CHOOSERS)
            work(whole, before_end(keep ? kept[whole] : from.first(whole), whole, from.n));
    };
    float4 top = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    each([&](int, const float4 &v) { top = larger(top, v); });
    range = bounds(s, in_order(top), row.count);
    const float least = from_order(range.lo);
    each([&](int quad, const float4 &v) {
        mark(s.bits, quad, nibble(v, [&](float value) { return value >= least; }));
    });
    __syncthreads();
    const int all = in_turn(s, s.bits, words, [&](int rank, int place) {
        if (rank < ROOM) s.blocks[rank] = place;
    });
    __syncthreads();
    return all;
}

/* By lists of what reaches a bound (listed.cuh). Returns how many were written; -1, where too much reaches it. */
__device__ __forceinline__ int choose_listed(const Row &row, Source from, Shared &s, uint8_t *memory) {
    Range range;
    const auto take_blocks = [&](int all) {
        if (all < row.count) range.lo = NONE + 1; /* all with anything: their bests bound nothing */
        from = row.of_blocks(s, all);
    };
    if (from.n > INDEXER_DIRECT) {
        const int all = list_blocks(row, from, s, memory, range);
        if (all > row.most()) return -1;
        take_blocks(all);
    }
#pragma unroll 1
    for (;;) {
        Held held;
        hold(held, from);
        const bool last = from.blocks || !row.twice();
        const int most = last ? row.count : row.most();
        int listed = LISTED + 1;
        for (bool bound = from.blocks; listed > LISTED; bound = false) {
            /* Blocks whose scores are alike have more that reaches their bests' bound than reaches its own. */
            if (!bound) range = bounds(s, top_of(held), row.count);
            listed = list_quads(s, held, range.lo);
            if (listed > LISTED && !bound) return -1;
        }
        Taken taken = take(s, listed);
        uint32_t bits = 0, rank = 0, all = static_cast<uint32_t>(listed);
        if (listed <= most) bits = reaching(taken, range.lo), rank = before(s, __popc(bits), &all);
        if (static_cast<int>(all) > most) {
            if (!pick(s, taken, row.count, most, range, bits)) return -1;
            rank = before(s, __popc(bits), &all);
        }
        if (last)
            for (int &place : taken.places) place = row.position(s, place);
        int32_t *to = last ? row.final : s.blocks;
        taken.each([&](int k, float) {
            if (bits >> k & 1) to[rank++] = taken.places[k / 4] + k % 4;
        });
        if (last) return static_cast<int>(all);
        __syncthreads();
        take_blocks(static_cast<int>(all));
    }
}

/* By bits in shared memory (select.cuh), however much reaches the bound. Returns how many were written. */
__device__ __forceinline__ int choose_any(const Row &row, Source from, Shared &s, uint8_t *memory) {
    Range range;
#pragma unroll 1
    for (;;) {
        const bool last = from.blocks || !row.twice();
        const int words = (from.n + 31) / 32, most = last ? row.count : row.most();
        const bool keep = keeps(row, from.n);
        auto *kept = reinterpret_cast<uint4 *>(memory);
        clear(s, words);
        const uint4 top = top_of(Keeping{from, keep ? kept : nullptr});
        if (!from.blocks) range = bounds(s, top, row.count);
        __syncthreads();
        if (keep)
            range.lo = choose_best(s, Kept{kept, from.n}, from.n, row.count, most, range);
        else
            range.lo = choose_best(s, Streamed{from}, from.n, row.count, most, range);
        int32_t *to = last ? row.final : s.blocks;
        const int all = in_turn(s, s.bits, words, [&](int rank, int place) {
            to[rank] = last ? row.position(s, place) : place;
        });
        if (last) return all;
        __syncthreads();
        if (all < row.count) range.lo = NONE + 1; /* as above */
        from = row.of_blocks(s, all);
    }
}

/* `room`: values whose keys dynamic shared memory has room for, a multiple of WARP_VALUES. */
__global__ void __launch_bounds__(CHOOSERS, 1)
    choose(const __grid_constant__ indexer_step step, const __grid_constant__ indexer_choose_args a, int room) {
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ Shared s;
    let_next_start();
    const int row = step.first_row + static_cast<int>(blockIdx.x);
    /* Asked at once; a row of no request may name any. */
    const int live = step.starts[step.requests];
    const auto owner = min(static_cast<unsigned>(step.request[row]), static_cast<unsigned>(step.requests) - 1);
    const int visible_keys = visible(step, step.lengths[owner], step.starts[owner + 1], row);
    const int seen = row < min(live, step.rows) ? visible_keys : 0;
    const bool blocks = a.kind == INDEXER_BLOCKS, candidates = a.kind == INDEXER_CANDIDATES;
    const int size = 31 - __clz(a.size), all = (seen + a.size - 1) >> size;
    int32_t *final = a.final + row * a.final_row;
    const Row choice{a,
                     a.values + blockIdx.x * a.values_row,
                     a.tops + blockIdx.x * a.tops_row,
                     candidates ? a.chosen + row * a.chosen_row : nullptr,
                     final,
                     blocks ? all - 1 : candidates ? min(all, a.chosen_count) << size : seen,
                     blocks ? a.count - 1 : a.count,
                     room,
                     a.fan == 16 ? 4 : 3,
                     size};
    const Source first = choice.first();
    reinterpret_cast<uint4 *>(s.counts)[thread()] = uint4{0, 0, 0, 0};
    wait_for_previous();
    int found = 0;
    if (seen) {
        found = blocks ? -1 : choose_listed(choice, first, s, memory);
        if (found < 0) {
            __syncthreads();
            found = choose_any(choice, first, s, memory);
        }
        if (blocks) { /* the newest, too */
            if (thread() == 0) final[found] = all - 1;
            ++found;
        }
    }
#pragma unroll 1
    for (int i = found + thread(); i < a.count; i += CHOOSERS) final[i] = -1;
}

} // namespace

cudaError_t launch_choose(const indexer_step &step, const indexer_choose_args &args, bool early, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(step.rows - step.first_row));
    const bool twice = args.kind == INDEXER_POSITIONS && args.entries > INDEXER_DIRECT;
    const int values = twice ? (args.entries + args.fan - 1) / args.fan : args.entries;
    int room = 0;
    if (values > INDEXER_DIRECT || args.kind == INDEXER_BLOCKS) {
        /* As much as there is where it is too little: `entries` of a graph is the longest a row may get. */
        if (const cudaError_t error = call::most_shared(room)) return error;
        room = (room - static_cast<int>(sizeof(Shared))) / 4 / WARP_VALUES * WARP_VALUES;
        if (room > 0)
            if (const cudaError_t error = call::allow_shared(choose, 4 * room)) return error;
        room = min(room, (values + WARP_VALUES - 1) / WARP_VALUES * WARP_VALUES);
    }
    return call::launch_early(choose, grid, CHOOSERS, 4 * room, early, stream, step, args, room);
}

} // namespace indexer
