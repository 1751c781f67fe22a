/* Scores of one row a CTA: over all its keys, or over its candidate blocks. The row's heads stay in
 * registers; a warp's next keys are on their way while it multiplies. 167 registers, of candidates up to
 * 194; no shared memory. */
#include "scores.cuh"

namespace indexer {
namespace {

/* Where a warp's 32 keys lie: dense, one run of one page; candidates, four blocks of eight. Null: no such
 * page. */
template <bool CANDIDATES>
struct Place {
    const uint8_t *keys[CANDIDATES ? NT : 1];
    const float *scale; /* of this lane's key, which is at `position` */
    int position;
};

/* Keys from `position` on, and the scale of this lane's, `mine` behind it. */
__device__ __forceinline__ const uint8_t *keys_at(const indexer_scores_args &a, int id, int position, int mine,
                                                  const float *&scale) {
    const int state = position & (a.states - 1);
    if (id < 0 || id >= a.blocks) return nullptr;
    const uint8_t *page = static_cast<const uint8_t *>(a.cache) + id * a.stride;
    scale = reinterpret_cast<const float *>(page + a.states * DIM) + state + mine;
    return page + state * DIM;
}

__device__ __forceinline__ int id_of(const indexer_scores_args &a, const int32_t *table, int position, int bound) {
    return position < bound ? table[position >> shift_of(a)] : -1;
}

/* `id`: of the page, where the keys are one run. */
template <bool CANDIDATES>
__device__ __forceinline__ Place<CANDIDATES> place_of(const indexer_scores_args &a, const int32_t *table,
                                                      const int32_t *picks, int id, int start, int bound, int lane) {
    Place<CANDIDATES> found;
    found.scale = nullptr, found.position = INT32_MAX;
    if constexpr (CANDIDATES) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int column = start + 8 * n, block = column < bound ? picks[column / 8] : -1;
            const float *scale = nullptr;
            found.keys[n] = block >= 0 && 8 * block < a.table_row << shift_of(a)
                                ? keys_at(a, table[8 * block >> shift_of(a)], 8 * block, key_of(lane) & 7, scale)
                                : nullptr;
            if (n == lane >> 3) found.scale = scale, found.position = 8 * block + (key_of(lane) & 7);
        }
    } else {
        found.keys[0] = keys_at(a, id, start, key_of(lane), found.scale);
        found.position = start + key_of(lane);
    }
    return found;
}

template <bool CANDIDATES>
__device__ __forceinline__ void load(uint4 (&raw)[2], const Place<CANDIDATES> &at, int n, int lane) {
    const uint8_t *keys = at.keys[CANDIDATES ? n : 0];
    raw[0] = raw[1] = make_uint4(0, 0, 0, 0);
    if (keys) {
        const uint8_t *key = keys + ((CANDIDATES ? 0 : 8 * n) + (lane >> 2)) * DIM + (lane & 3) * 16;
        raw[0] = load16(key), raw[1] = load16(key + 64);
    }
}

template <bool CANDIDATES>
__device__ __forceinline__ float scale_of(const Place<CANDIDATES> &at) {
    return at.scale ? __ldg(at.scale) : 0.f;
}

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
        uint4 codes[2][2][2]; /* [m][upper half of the heads][half of the dimension] */
        float weight[2][2];
        const auto *q = static_cast<const uint8_t *>(a.q) + row * static_cast<int64_t>(HEADS * DIM) + t * 16;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int up = 0; up < 2; ++up) {
                const int head = 16 * m + 8 * up + g;
                codes[m][up][0] = load16(q + head * DIM), codes[m][up][1] = load16(q + head * DIM + 64);
                weight[m][up] = a.weights[row * static_cast<int64_t>(HEADS) + head] * UNDO;
            }
        const int stride = workers * KEYS;
        const int first_id = CANDIDATES ? -1 : id_of(a, table, start, bound);
        int next_id = CANDIDATES ? -1 : id_of(a, table, start + stride, bound);
        Place<CANDIDATES> at = place_of<CANDIDATES>(a, table, picks, first_id, start, bound, lane);
        uint4 raw[NT][2];
#pragma unroll
        for (int n = 0; n < NT; ++n) load(raw[n], at, n, lane);
        float scale = scale_of(at);
        uint4 heads[2][STEPS];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const uint32_t v = word(codes[m][0], s), w = word(codes[m][1], s);
                heads[m][s] = make_uint4(odd(v), odd(w), even(v), even(w));
            }
        for (; start < bound; start += stride) {
            const bool shown = at.scale && at.position < seen;
            const float by = scale;
            at = place_of<CANDIDATES>(a, table, picks, next_id, start + stride, bound, lane);
            if (!CANDIDATES) next_id = id_of(a, table, start + 2 * stride, bound);
            float sums[NT][2] = {};
#pragma unroll
            for (int pair = 0; pair < NT; pair += 2) {
                float acc[2][2][4] = {};
#pragma unroll
                for (int s = 0; s < STEPS; ++s)
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const uint32_t w = word(raw[pair + n], s), b0 = odd(w), b1 = even(w);
                        mma_fp16(acc[0][n], heads[0][s], b0, b1);
                        mma_fp16(acc[1][n], heads[1][s], b0, b1);
                    }
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    load(raw[pair + n], at, pair + n, lane);
#pragma unroll
                    for (int m = 0; m < 2; ++m)
#pragma unroll
                        for (int c = 0; c < 2; ++c)
                            sums[pair + n][c] += weight[m][0] * fmaxf(acc[m][n][c], 0.f) +
                                                 weight[m][1] * fmaxf(acc[m][n][c + 2], 0.f);
                }
            }
            scale = scale_of(at);
            const float value = summed(sums, lane) * by;
            store(a, line, start, bound, shown ? value : -INFINITY, lane);
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
