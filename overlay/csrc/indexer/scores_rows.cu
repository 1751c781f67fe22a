/* Scores of several rows of one request a CTA, over all its keys. A warp makes its 32 keys fp16 once, in
 * registers, and multiplies them by one row after the other, whose heads lie ready in shared memory. Its next
 * keys are on their way meanwhile, and a row's sums are added up while the next row is multiplied. 149 to
 * 168 registers; 16 KB of shared memory and 8336 bytes a row. */
#include "../common/launch.hpp"
#include "scores.cuh"

namespace indexer {
namespace {

constexpr int PAIRS = EIGHTS / 2; /* of eights of heads: what a lane reads at once */
/* Of 16 bytes each: a row's B operands [pair][step][lane], of both eights of a pair; halves of its weights
 * [pair][t], of heads 2 t and 2 t + 1 of both; how many keys it sees. */
constexpr int OPERANDS = PAIRS * STEPS * 32, WEIGHTS = PAIRS * 4, ROW = OPERANDS + WEIGHTS + 1;
constexpr int STAGE = KEYS * DIM / 16, STAGES = WARPS * STAGE; /* a warp's next keys, as they lie in their page */

/* A thread's part of a row's heads: half the dimension of a pair of eights. It alone writes there until they
 * are ready: four operands, of which the first two are their codes at first. */
__device__ __forceinline__ uint4 *part_of(uint4 *row) {
    return row + (static_cast<int>(threadIdx.x) >> 5) * (STEPS / 2 * 32) + (static_cast<int>(threadIdx.x) & 31);
}

__device__ __forceinline__ void copy_heads(uint4 *rows, const indexer_scores_args &a, int first, int count) {
    const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, pair = tid >> 6, half = tid >> 5 & 1;
    const auto *q = static_cast<const uint8_t *>(a.q) + first * static_cast<int64_t>(HEADS * DIM) +
                    (16 * pair + (lane >> 2)) * DIM + half * 64 + (lane & 3) * 16;
#pragma unroll 1
    for (int i = 0; i < count; ++i, q += HEADS * DIM) {
        const uint32_t to = shared_address(part_of(rows + i * ROW));
        copy16(to, q, true), copy16(to + 512, q + 8 * DIM, true);
    }
    copy_commit();
}

/* After its copies have arrived. */
__device__ __forceinline__ void prepare_heads(uint4 *rows, int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        uint4 *to = part_of(rows + i * ROW);
        const uint4 v = to[0], w = to[32];
        to[0] = make_uint4(odd(v.x), even(v.x), odd(w.x), even(w.x));
        to[32] = make_uint4(odd(v.y), even(v.y), odd(w.y), even(w.y));
        to[64] = make_uint4(odd(v.z), even(v.z), odd(w.z), even(w.z));
        to[96] = make_uint4(odd(v.w), even(v.w), odd(w.w), even(w.w));
    }
}

__device__ __forceinline__ void prepare_weights(uint4 *rows, const indexer_scores_args &a, int first, int count) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count * HEADS; i += THREADS) {
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

/* What a CTA takes of a group: rows first .. first + count, and of their keys one split of `splits`. */
struct Share {
    int first, count, split, splits;
};

/* Where a group's keys are too few for all CTAs, those take fewer rows each: 2, 4 or 8 share the rows. */
__device__ __forceinline__ Share share_of(int count, int bound) {
    const int all = static_cast<int>(gridDim.y), needed = (bound + WARPS * KEYS - 1) / (WARPS * KEYS);
    int by = 0;
    while (1 << by < count && needed << (by + 1) <= all) ++by;
    const int splits = all >> by, which = static_cast<int>(blockIdx.y) / splits, each = (count + (1 << by) - 1) >> by;
    const int split = static_cast<int>(blockIdx.y) - which * splits;
    return {which * each, min(each, count - which * each), split, splits};
}

__global__ void __launch_bounds__(THREADS, CTAS)
    rows_at_once(const __grid_constant__ indexer_step step, const __grid_constant__ indexer_scores_args a) {
    extern __shared__ __align__(16) uint8_t memory[];
    let_next_start();
    const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5;
    const int part = static_cast<int>(blockIdx.x) % a.parts, owner = static_cast<int>(blockIdx.x) / a.parts;
    uint4 *stage = reinterpret_cast<uint4 *>(memory) + warp * STAGE;
    uint4 *rows = reinterpret_cast<uint4 *>(memory) + STAGES;
    const int32_t *table = a.table + owner * a.table_row;
    const int end = step.starts[owner + 1], length = step.lengths[owner];
    const int low = max(step.starts[owner], step.first_row), high = min(end, step.rows);
    for (int group = low + part * a.group; group < high; group += a.parts * a.group) {
        const int last = min(group + a.group, high) - 1;
        const Share mine = share_of(last + 1 - group, visible(step, length, end, last));
        const int first = group + mine.first, count = mine.count, stride = mine.splits * (WARPS * KEYS);
        const int bound = visible(step, length, end, first + count - 1); /* the last sees most */
        const int begin = mine.split * (WARPS * KEYS);
        if (count <= 0 || begin >= bound) continue; /* the whole CTA */
        int start = begin + warp * KEYS;
        const int first_id = id_of(a, table, start, bound);
        int next_id = id_of(a, table, start + stride, bound);
        copy_heads(rows, a, first, count);
        Place<false> at = place_of<false>(a, table, nullptr, first_id, start, bound, lane);
        const auto fetch = [&] {
            const auto *keys = at.scale ? at.keys[0] : static_cast<const uint8_t *>(a.cache);
            copy_keys(stage, keys, at.scale, lane);
        };
        fetch();
        float scale = scale_of(at);
        prepare_weights(rows, a, first, count);
        if (tid < count) rows[tid * ROW + OPERANDS + WEIGHTS].x = visible(step, length, end, first + tid);
        copy_wait<1>();
        prepare_heads(rows, count);
        __syncthreads();
        const Target origin = target_of(a, first - 1 - step.first_row, 0);
        for (; start < bound; start += stride) {
            uint4 keys[2][STEPS];
            copy_wait_all();
            take_keys(keys, stage, lane);
            const float by = scale;
            const int column = start + key_of(lane), position = at.scale ? column : INT32_MAX;
            at = place_of<false>(a, table, nullptr, next_id, start + stride, bound, lane);
            fetch();
            scale = scale_of(at);
            next_id = id_of(a, table, start + 2 * stride, bound);
            float before[2][2] = {}; /* of the row before */
            int seen = 0;
            Target to = {origin.out + column, origin.top + (column >> (a.fan == 16 ? 4 : 3))};
            const auto finish = [&] {
                const float value = summed(before, lane) * by;
                store(to, a.fan, column, seen, position < seen ? value : -INFINITY);
                to.out += a.out_row, to.top += a.tops_row;
            };
            const uint4 *row = rows;
#pragma unroll 1
            for (int i = 0; i < count; ++i, row += ROW) {
                float sums[2][2];
                multiply(sums, keys, row, lane);
                finish();
                seen = static_cast<int>(row[OPERANDS + WEIGHTS].x);
#pragma unroll
                for (int m = 0; m < 2; ++m) before[m][0] = sums[m][0], before[m][1] = sums[m][1];
            }
            finish();
        }
        copy_wait_all();
        __syncthreads(); /* nobody reads these rows any more */
    }
}

} // namespace

cudaError_t launch_rows(const indexer_step &step, const indexer_scores_args &args, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(step.requests) * args.parts, args.splits);
    const int bytes = (STAGES + args.group * ROW) * 16;
    if (const cudaError_t error = call::allow_shared(rows_at_once, bytes)) return error;
    const cudaError_t error = cudaFuncSetAttribute(rows_at_once, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                   cudaSharedmemCarveoutMaxShared);
    if (error) return error;
    rows_at_once<<<grid, THREADS, bytes, stream>>>(step, args);
    return cudaGetLastError();
}

} // namespace indexer
