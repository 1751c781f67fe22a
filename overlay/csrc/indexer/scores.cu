/* Scores of one row a CTA: over all its keys, or over its candidate blocks. The row's heads stay in
 * registers; a warp's next keys are on their way while it multiplies. 168 registers, of candidates up to
 * 216; no shared memory. */
#include "scores.cuh"

namespace indexer {
namespace {

template <bool CANDIDATES>
__global__ void __launch_bounds__(THREADS, CANDIDATES ? CANDIDATE_CTAS : CTAS)
    one_row(const __grid_constant__ indexer_step step, const __grid_constant__ indexer_scores_args a) {
    let_next_start();
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
    const int part = static_cast<int>(blockIdx.x) % a.parts, owner = static_cast<int>(blockIdx.x) / a.parts;
    const int begin = step.starts[owner], end = step.starts[owner + 1], length = step.lengths[owner];
    const int worker = static_cast<int>(blockIdx.y) * WARPS + (static_cast<int>(threadIdx.x) >> 5);
    const int workers = static_cast<int>(gridDim.y) * WARPS;
    const int32_t *table = a.table + owner * a.table_row;
    for (int row = begin + part; row < min(end, step.rows); row += a.parts) {
        if (row < step.first_row) continue;
        const int seen = visible(step, length, end, row);
        const int bound = CANDIDATES ? min((seen + 7) / 8, a.chosen_count) * 8 : seen;
        const int32_t *picks = CANDIDATES ? a.chosen + row * a.chosen_row : nullptr;
        const int64_t line = row - step.first_row;
        int start = worker * KEYS;
        if (start >= bound) continue;
        uint4 codes[EIGHTS][2]; /* of head 8 e + g, as of a key */
        float2 weight[EIGHTS];
        const auto *q = static_cast<const uint8_t *>(a.q) + row * static_cast<int64_t>(HEADS * DIM) + t * 16;
        const float *weights = a.weights + row * static_cast<int64_t>(HEADS) + 2 * t;
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            codes[e][0] = load16(q + (8 * e + g) * DIM), codes[e][1] = load16(q + (8 * e + g) * DIM + 64);
            weight[e] = make_float2(weights[8 * e] * (UNDO / 2), weights[8 * e + 1] * (UNDO / 2));
        }
        const int stride = workers * KEYS;
        const int first_id = CANDIDATES ? -1 : id_of(a, table, start, bound);
        int next_id = CANDIDATES ? -1 : id_of(a, table, start + stride, bound);
        Place<CANDIDATES> at = place_of<CANDIDATES>(a, table, picks, first_id, start, bound, lane);
        uint4 raw[EIGHTS][2];
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) load(raw[e], at, e, lane);
        float scale = scale_of(at);
        uint32_t heads[EIGHTS][STEPS][2];
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const uint32_t w = word(codes[e], s);
                heads[e][s][0] = odd(w), heads[e][s][1] = even(w);
            }
        for (; start < bound; start += stride) {
            const bool shown = at.scale && at.position < seen;
            const float by = scale;
            at = place_of<CANDIDATES>(a, table, picks, next_id, start + stride, bound, lane);
            if (!CANDIDATES) next_id = id_of(a, table, start + 2 * stride, bound);
            float sums[2][2] = {};
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                float acc[EIGHTS][4] = {};
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    const uint4 keys = operand(word(raw[2 * m], s), word(raw[2 * m + 1], s));
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e) mma_fp16(acc[e], keys, heads[e][s][0], heads[e][s][1]);
                }
                load(raw[2 * m], at, 2 * m, lane), load(raw[2 * m + 1], at, 2 * m + 1, lane);
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e) add_heads(sums[m], acc[e], weight[e]);
            }
            scale = scale_of(at);
            const float value = summed(sums, lane) * by;
            const int column = start + key_of(lane);
            store(target_of(a, line, column), a.fan, column, bound, shown ? value : -INFINITY);
        }
    }
}

} // namespace

cudaError_t launch_scores(const indexer_step &step, const indexer_scores_args &args, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(step.requests) * args.parts, args.splits);
    if (args.chosen)
        one_row<true><<<grid, THREADS, 0, stream>>>(step, args);
    else
        one_row<false><<<grid, THREADS, 0, stream>>>(step, args);
    return cudaGetLastError();
}

} // namespace indexer
