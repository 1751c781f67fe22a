/* Scores of several rows of one request a CTA, over all its keys. A warp makes its 32 keys fp16 once, in
 * registers, while it multiplies them by the first row, then by one row after the other, whose heads lie ready
 * in shared memory. Its next keys are on their way meanwhile, and a row's sums are added up while the next row
 * is multiplied. 157 to 162 registers; 4 KB of shared memory a warp and 8336 bytes a row. */
#include "../common/launch.hpp"
#include "scores.cuh"

namespace indexer {
namespace {

constexpr int PAIRS = EIGHTS / 2; /* of eights of heads: what a lane reads at once */
/* Of 16 bytes each: a row's B operands [pair][step][lane], of both eights of a pair; halves of its weights
 * [pair][t], of heads 2 t and 2 t + 1 of both; a note. */
constexpr int OPERANDS = PAIRS * STEPS * 32, WEIGHTS = PAIRS * 4, ROW = OPERANDS + WEIGHTS + 1;
static_assert(ROW * 16 == 8336 && KEYS * DIM == 4096); /* as launch_cuda.py counts on */
constexpr int STAGE = KEYS * DIM / 16; /* a warp's next keys, as they lie in their page */
constexpr int RUN = WARPS * KEYS;      /* keys that four warps take at once */

/* Warps of a CTA, by how many of those a multiprocessor holds. */
template <int HELD>
constexpr int TEAM = HELD == 1 ? 3 * WARPS : WARPS;

/* The last 16 bytes of a row: how many keys it sees. In the first row's, too, what is needed again while no
 * register is free for it. */
struct alignas(16) Note {
    int seen, part, owner, line;
};

__device__ __forceinline__ Note *note_of(uint4 *row) { return reinterpret_cast<Note *>(row + OPERANDS + WEIGHTS); }
__device__ __forceinline__ const Note *note_of(const uint4 *row) {
    return reinterpret_cast<const Note *>(row + OPERANDS + WEIGHTS);
}

__device__ __forceinline__ const int32_t *table_of(const indexer_scores_args &a, int owner) {
    return a.table + owner * static_cast<int>(a.table_row); /* api.cu: all of the table is an int's */
}

/* A thread's part, of 128, of a row's heads: half the dimension of a pair of eights. It alone writes there until they
 * are ready: four operands, of which the first two are their codes at first. */
__device__ __forceinline__ uint4 *part_of(uint4 *row, int tid) {
    return row + (tid >> 5) * (STEPS / 2 * 32) + (tid & 31);
}

/* Each 128 threads a row. */
template <int HELD>
__device__ __forceinline__ void copy_heads(uint4 *rows, const indexer_scores_args &a, int first, int count, int tid) {
    constexpr int STEP = TEAM<HELD> / WARPS;
    const int lane = tid & 31, pair = tid >> 6 & 1, half = tid >> 5 & 1, from = tid >> 7;
    const auto *q = static_cast<const uint8_t *>(a.q) + (first + from) * static_cast<int64_t>(HEADS * DIM) +
                    (16 * pair + (lane >> 2)) * DIM + half * 64 + (lane & 3) * 16;
#pragma unroll 1
    for (int i = from; i < count; i += STEP, q += STEP * HEADS * DIM) {
        const uint32_t to = shared_address(part_of(rows + i * ROW, tid & 127));
        copy16(to, q, true), copy16(to + 512, q + 8 * DIM, true);
    }
    copy_commit();
}

/* After its copies have arrived. */
template <int HELD>
__device__ __forceinline__ void prepare_heads(uint4 *rows, int count, int tid) {
#pragma unroll 1
    for (int i = tid >> 7; i < count; i += TEAM<HELD> / WARPS) {
        uint4 *to = part_of(rows + i * ROW, tid & 127);
        const uint4 v = to[0], w = to[32];
        to[0] = make_uint4(odd(v.x), even(v.x), odd(w.x), even(w.x));
        to[32] = make_uint4(odd(v.y), even(v.y), odd(w.y), even(w.y));
        to[64] = make_uint4(odd(v.z), even(v.z), odd(w.z), even(w.z));
        to[96] = make_uint4(odd(v.w), even(v.w), odd(w.w), even(w.w));
    }
}

template <int HELD>
__device__ __forceinline__ void prepare_weights(uint4 *rows, const indexer_scores_args &a, int first, int count,
                                                int tid) {
#pragma unroll 1
    for (int i = tid; i < count * HEADS; i += 32 * TEAM<HELD>) {
        const int head = i & (HEADS - 1); /* bits: pair, upper eight, t (two), c */
        const int place = (head & 16) + (head >> 1 & 3) * 4 + (head >> 3 & 1) * 2 + (head & 1);
        auto *weights = reinterpret_cast<float *>(rows + i / HEADS * ROW + OPERANDS);
        weights[place] = a.weights[first * static_cast<int64_t>(HEADS) + i] * (UNDO / 2);
    }
}

/* A lane's part of a warp's keys, to where it alone reads it: [eight][half of the dimension][lane]. Zeros,
 * where `there` is false. */
__device__ __forceinline__ void copy_keys(uint4 *stage, const uint8_t *keys, bool there, int lane) {
    const uint8_t *key = keys + (lane >> 2) * DIM + (lane & 3) * 16;
    const uint32_t to = shared_address(stage + lane);
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
        for (int half = 0; half < 2; ++half) copy16(to + (2 * e + half) * 512, key + 8 * e * DIM + half * 64, there);
    copy_commit();
}

__device__ __forceinline__ void take_keys(uint4 (&keys)[2][STEPS], const uint4 *stage, int lane) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        uint4 raw[2][2];
#pragma unroll
        for (int up = 0; up < 2; ++up)
#pragma unroll
            for (int half = 0; half < 2; ++half) raw[up][half] = stage[((2 * m + up) * 2 + half) * 32 + lane];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) keys[m][s] = operand(word(raw[0], s), word(raw[1], s));
    }
}

/* sums[m][up] as `summed` takes them. */
__device__ __forceinline__ void multiply(float (&sums)[2][2], const uint4 (&keys)[2][STEPS], const uint4 *row,
                                         int lane) {
    const auto *weights = reinterpret_cast<const float4 *>(row + OPERANDS + (lane & 3));
    row += lane;
#pragma unroll
    for (int m = 0; m < 2; ++m) sums[m][0] = sums[m][1] = 0.f;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        float acc[2][2][4] = {}; /* [m][upper eight] */
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const uint4 b = row[(p * STEPS + s) * 32];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                mma_fp16(acc[m][0], keys[m][s], b.x, b.y);
                mma_fp16(acc[m][1], keys[m][s], b.z, b.w);
            }
        }
        const float4 weight = weights[p * 4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            add_heads(sums[m], acc[m][0], make_float2(weight.x, weight.y));
            add_heads(sums[m], acc[m][1], make_float2(weight.z, weight.w));
        }
    }
}

/* A warp's first key. Fours of warps that share a scheduler's time end together: they take keys as CTAs do. */
__device__ __forceinline__ int first_key(int split, int splits, int warp) {
    return ((warp >> 2) * splits + split) * RUN + (warp & 3) * KEYS;
}

/* A load that stays where it is, before the branch behind which its value is needed. */
__device__ __forceinline__ int asked(const int32_t *at) { return *static_cast<const volatile int32_t *>(at); }

/* What lane 2 by + n finds out before it is known how far rows see, if 2^by CTAs share them: which part of
 * them this CTA takes and which split of their keys; the page of a warp's keys in round n (0, 1). */
struct Guess {
    int which, split, id;
};

template <int HELD>
__device__ __forceinline__ Guess guess(const indexer_scores_args &a, int owner, int warp, int lane) {
    const int splits = max(1, static_cast<int>(gridDim.y) >> (lane >> 1 & 3));
    const int which = static_cast<int>(blockIdx.y) / splits, split = static_cast<int>(blockIdx.y) - which * splits;
    const int position = first_key(split, splits, warp) + (lane & 1) * splits * (TEAM<HELD> * KEYS);
    const int page = min(position >> shift_of(a), static_cast<int>(a.table_row) - 1);
    return {which, split, asked(table_of(a, owner) + page)};
}

/* What a CTA takes of a group: rows first .. first + count, and of their keys one split of `splits`; the pages
 * of a warp's first two rounds. */
struct Share {
    int first, count, split, splits, id, next_id;
};

/* Where a group's keys are too few for all CTAs, those take fewer rows each: 2^by (2, 4 or 8) share the rows. */
template <int HELD>
__device__ __forceinline__ Share share_of(const Guess &guess, int count, int bound) {
    const int all = static_cast<int>(gridDim.y), needed = max(1, (bound + RUN - 1) / RUN);
    int by = 0;
#pragma unroll
    for (int i = 1; i < 4; ++i) by += 1 << i < 2 * count && needed <= (all >> i) * (TEAM<HELD> / WARPS);
    const int which = __shfl_sync(0xffffffffu, guess.which, 2 * by);
    const int split = __shfl_sync(0xffffffffu, guess.split, 2 * by);
    const int id = __shfl_sync(0xffffffffu, guess.id, 2 * by);
    const int next_id = __shfl_sync(0xffffffffu, guess.id, 2 * by + 1);
    const int each = (count + (1 << by) - 1) >> by;
    return {which * each, min(each, count - which * each), split, all >> by, id, next_id};
}

/* `HELD` CTAs on a multiprocessor at once: 1 of twelve warps, 3 of four. */
template <int HELD>
__global__ void __launch_bounds__(32 * TEAM<HELD>, HELD)
    rows_at_once(const __grid_constant__ indexer_step step, const __grid_constant__ indexer_scores_args a) {
    extern __shared__ __align__(16) uint8_t memory[];
    let_next_start();
    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
    uint4 *stage = reinterpret_cast<uint4 *>(memory) + warp * STAGE;
    uint4 *rows = reinterpret_cast<uint4 *>(memory) + TEAM<HELD> * STAGE;
    Note &note = *note_of(rows);
    int owner = static_cast<int>(blockIdx.x) / a.parts, part = static_cast<int>(blockIdx.x) % a.parts;
    for (;; part += a.parts) { /* once, as a rule */
        const int begin = asked(step.starts + owner), end = asked(step.starts + owner + 1);
        const int length = asked(step.lengths + owner);
        const Guess guessed = guess<HELD>(a, owner, warp, lane);
        const int high = min(end, step.rows), group = max(begin, step.first_row) + part * a.group;
        if (group >= high) break;
        const int last = min(group + a.group, high) - 1;
        const Share mine = share_of<HELD>(guessed, last + 1 - group, visible(step, length, end, last));
        const int first = group + mine.first, count = mine.count, stride = mine.splits * (TEAM<HELD> * KEYS);
        const int bound = visible(step, length, end, first + count - 1); /* the last sees most */
        if (count <= 0 || mine.split * RUN >= bound) continue; /* the whole CTA */
        int start = first_key(mine.split, mine.splits, warp);
        int next_id = start + stride < bound ? mine.next_id : -1;
        int tid = static_cast<int>(threadIdx.x);
        asm volatile("" : "+r"(tid)); /* so that nothing made of it is held while rows are multiplied */
        copy_heads<HELD>(rows, a, first, count, tid);
        bool there; /* the page of the keys that are on their way */
        float scale;
        const auto fetch = [&](int id, int from) { /* without a branch: rows are multiplied on either side */
            there = is_page(a, id);
            const float *at;
            copy_keys(stage, keys_in(a, there ? id : 0, from, key_of(lane), at), there, lane);
            scale = __ldg(at);
        };
        fetch(start < bound ? mine.id : -1, start);
        prepare_weights<HELD>(rows, a, first, count, tid);
        if (tid < count) note_of(rows + tid * ROW)->seen = visible(step, length, end, first + tid);
        if (tid == 0) note.part = part, note.owner = owner, note.line = first - step.first_row;
        copy_wait<1>();
        prepare_heads<HELD>(rows, count, tid);
        __syncthreads();
        for (; start < bound; start += stride) {
            uint4 keys[2][STEPS];
            copy_wait_all();
            take_keys(keys, stage, lane);
            const float by = scale;
            const int column = start + key_of(lane), position = there ? column : INT32_MAX;
            const auto fetch_next = [&] {
                fetch(next_id, start + stride);
                const int after = start + 2 * stride;
                const int id = table_of(a, note.owner)[after < bound ? after >> shift_of(a) : 0];
                next_id = after < bound ? id : -1;
            };
            Target to = target_of(a, note.line, column);
            const uint4 *row = rows;
            float sums[2][2]; /* of the row before the one that is multiplied */
            int seen;
            const auto finish = [&] {
                const float value = summed(sums, lane) * by;
                store(to, a.fan, column, seen, position < seen ? value : -INFINITY);
                to.out += static_cast<int>(a.out_row), to.top += static_cast<int>(a.tops_row);
            };
            fetch_next();
            multiply(sums, keys, row, lane); /* keys are made fp16 meanwhile */
            seen = note_of(row)->seen;
#pragma unroll 1
            for (int i = 1; i < count; ++i) {
                row += ROW;
                float more[2][2];
                multiply(more, keys, row, lane);
                finish();
                seen = note_of(row)->seen;
#pragma unroll
                for (int m = 0; m < 2; ++m) sums[m][0] = more[m][0], sums[m][1] = more[m][1];
            }
            finish();
        }
        copy_wait_all();
        part = note.part, owner = note.owner;
        __syncthreads(); /* nobody reads these rows any more */
    }
}

template <int HELD>
cudaError_t launch(const indexer_step &step, const indexer_scores_args &args, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(step.requests) * args.parts, args.splits);
    const int bytes = (TEAM<HELD> * STAGE + args.group * ROW) * 16;
    int most = 0;
    cudaError_t error = call::most_shared(most);
    if (error || (error = call::allow_shared(rows_at_once<HELD>, most))) return error;
    error = cudaFuncSetAttribute(
        rows_at_once<HELD>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error) return error;
    rows_at_once<HELD><<<grid, 32 * TEAM<HELD>, bytes, stream>>>(step, args);
    return cudaGetLastError();
}

} // namespace

cudaError_t launch_rows(const indexer_step &step, const indexer_scores_args &args, cudaStream_t stream) {
    return args.held == 1 ? launch<1>(step, args, stream) : launch<3>(step, args, stream);
}

} // namespace indexer
