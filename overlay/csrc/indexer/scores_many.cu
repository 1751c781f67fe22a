/* Scores of up to eight rows of a request over all its keys. The rows' heads lie in shared memory as A
 * operands; a warp makes its 32 keys fp16 once and multiplies them by one row after the other. 179 to 190
 * registers; 8.3 KB of shared memory a row. */
#include "scores.cuh"

namespace indexer {

cudaError_t launch_one_row(const indexer_step &step, const indexer_scores_args &args, cudaStream_t stream);

namespace {

constexpr int ROW_BYTES = HEADS * DIM * 2;

__device__ __forceinline__ const uint8_t *page_of(const indexer_scores_args &a, const int32_t *table, int start, int bound) {
    const int id = start < bound ? table[start >> shift_of(a)] : -1;
    return id >= 0 && id < a.blocks ? static_cast<const uint8_t *>(a.cache) + id * a.stride : nullptr;
}

__device__ __forceinline__ void load(const indexer_scores_args &a, uint4 (&raw)[NT][2], float &scale, const uint8_t *page,
                                     int start, int lane) {
#pragma unroll
    for (int n = 0; n < NT; ++n) raw[n][0] = raw[n][1] = make_uint4(0, 0, 0, 0);
    scale = 0.f;
    if (page) {
        const int state = start & (a.states - 1);
        const uint8_t *key = page + (state + (lane >> 2)) * DIM + (lane & 3) * 16;
#pragma unroll
        for (int n = 0; n < NT; ++n) raw[n][0] = load16(key + 8 * n * DIM), raw[n][1] = load16(key + 8 * n * DIM + 64);
        scale = __ldg(reinterpret_cast<const float *>(page + a.states * DIM) + state + key_of(lane));
    }
}

/* The rows' heads as A operands: [row][m][step][lane]; and their weights [row][32]. */
__device__ __forceinline__ void take_heads(const indexer_scores_args &a, uint32_t *heads, float *weights, int first, int rows) {
    const auto *q = static_cast<const uint4 *>(a.q) + first * static_cast<int64_t>(HEADS * DIM / 16);
    for (int i = static_cast<int>(threadIdx.x); i < rows * HEADS * 8; i += THREADS) {
        const int head = (i >> 3) & 31, chunk = i & 7, row = i >> 8;
        const uint4 v = load16(q + i);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        uint32_t *to = heads + ((((row * 2 + (head >> 4)) * STEPS + (chunk >> 2) * 4) * 32) + (head & 7) * 4 + (chunk & 3)) * 4 +
                       ((head >> 3) & 1);
#pragma unroll
        for (int s = 0; s < 4; ++s) to[s * 128] = odd(words[s]), to[s * 128 + 2] = even(words[s]);
    }
    for (int i = static_cast<int>(threadIdx.x); i < rows * HEADS; i += THREADS)
        weights[i] = a.weights[first * static_cast<int64_t>(HEADS) + i] * UNDO;
}

__global__ void __launch_bounds__(THREADS, MANY_CTAS)
    many_rows(const __grid_constant__ indexer_step step, const __grid_constant__ indexer_scores_args a) {
    extern __shared__ __align__(16) uint8_t memory[];
    let_next_start();
    auto *heads = reinterpret_cast<uint4 *>(memory);
    auto *weights = reinterpret_cast<float *>(memory + a.group * ROW_BYTES);
    __shared__ int seen[INDEXER_MOST_ROWS];
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2;
    const int part = static_cast<int>(blockIdx.x) % a.parts, owner = static_cast<int>(blockIdx.x) / a.parts;
    const int begin = max(step.starts[owner], step.first_row), end = step.starts[owner + 1], length = step.lengths[owner];
    const int worker = static_cast<int>(blockIdx.y) * WARPS + (static_cast<int>(threadIdx.x) >> 5);
    const int stride = static_cast<int>(gridDim.y) * WARPS * KEYS;
    const int32_t *table = a.table + owner * a.table_row;
    const int last = min(end, step.rows);
    for (int first = begin + part * a.group; first < last; first += a.parts * a.group) {
        const int rows = min(a.group, last - first);
        const int bound = visible(step, length, end, first + rows - 1);
        if (static_cast<int>(blockIdx.y) * WARPS * KEYS >= bound) continue; /* the whole CTA */
        int start = worker * KEYS;
        uint4 raw[NT][2];
        float scale;
        const uint8_t *page = page_of(a, table, start, bound);
        load(a, raw, scale, page, start, lane);
        __syncthreads(); /* those before are done with the heads */
        take_heads(a, reinterpret_cast<uint32_t *>(heads), weights, first, rows);
        if (static_cast<int>(threadIdx.x) < rows)
            seen[threadIdx.x] = visible(step, length, end, first + static_cast<int>(threadIdx.x));
        __syncthreads();
        const uint8_t *later = page_of(a, table, start + stride, bound);
        for (; start < bound; start += stride) {
            uint32_t b[NT][STEPS][2];
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    const uint32_t w = word(raw[n], s);
                    b[n][s][0] = odd(w), b[n][s][1] = even(w);
                }
            const float by = scale;
            const bool there = page != nullptr;
            page = later;
            load(a, raw, scale, page, start + stride, lane);
            later = page_of(a, table, start + 2 * stride, bound);
#pragma unroll 1
            for (int row = 0; row < rows; ++row) {
                const uint4 *from = heads + row * (2 * STEPS * 32) + lane;
                const float *w = weights + row * HEADS + g;
                float acc[2][NT][4] = {}; /* of both halves of the heads: each waits for itself alone */
#pragma unroll
                for (int s = 0; s < STEPS; ++s)
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        const uint4 v = from[(m * STEPS + s) * 32];
#pragma unroll
                        for (int n = 0; n < NT; ++n) mma(acc[m][n], v, b[n][s][0], b[n][s][1]);
                    }
                float sums[NT][2] = {};
#pragma unroll
                for (int m = 0; m < 2; ++m) add_heads(sums, acc[m], w[16 * m], w[16 * m + 8]);
                const float value = summed(sums, lane) * by;
                store(a, first + row - step.first_row, start, bound,
                      there && start + key_of(lane) < seen[row] ? value : -INFINITY, lane);
            }
        }
    }
}

} // namespace

cudaError_t launch_scores(const indexer_step &step, const indexer_scores_args &args, cudaStream_t stream) {
    if (args.chosen || args.group == 1) return launch_one_row(step, args, stream);
    const dim3 grid(static_cast<unsigned>(step.requests) * args.parts, args.splits);
    const int shared = args.group * (ROW_BYTES + HEADS * static_cast<int>(sizeof(float)));
    cudaError_t error = cudaFuncSetAttribute(many_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(many_rows, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
    many_rows<<<grid, THREADS, shared, stream>>>(step, args);
    return cudaGetLastError();
}

} // namespace indexer
