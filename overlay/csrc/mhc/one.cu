/* One launch for up to 64 rows: write-back, projection, coefficients, collapse and norm.
 *
 * CTAs have two roles. Those of the projection take a slice of the hidden size each, make the new streams of
 * their rows there and leave shares of the 24 coefficients; the last of a group of rows to arrive adds them,
 * always in the same order, makes the rows' coefficients and leaves the counter at zero. Nobody waits for
 * another CTA. The others take a whole row each: its new streams are stored, collapsed, and normalised.
 * 84 to 128 registers; 21 KB of shared memory. */
#include "../common/launch.hpp"
#include "launch.hpp"
#include "mixes.cuh"
#include "project.cuh"

namespace mhc {
namespace {

constexpr int QUADS = 7; /* of a row's shares: SQUARES is in the last */
constexpr int BATCH = 5; /* fours of columns of a row that a thread has under way at once */

union alignas(16) Shared {
    struct {
        float tiles[WARPS][16 * PADDED], totals[16 * PADDED];
        Constants constants;
        int last;
    };
    struct {
        uint2 row[MHC_MOST_HIDDEN / 4];
        float squares[WARPS];
    };
};

/* What will be read soon is asked for while the launch in front of this one ends: L2 has no old values, so
 * that one may still be writing them. */
__device__ __forceinline__ void ask(const void *first, int64_t bytes) {
#pragma unroll 1
    for (int64_t i = 128 * static_cast<int>(threadIdx.x); i < bytes; i += 128 * THREADS)
        prefetch(static_cast<const uint8_t *>(first) + i);
}

/* ---- a row ------------------------------------------------------------------------------------- */

template <bool POST>
__device__ __forceinline__ void take_row(Shared &s, const mhc_args &a, int row) {
    const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5, fours = a.hidden / 4;
    if (a.early) {
        const int64_t bytes = 2 * a.hidden, at = row * bytes;
        ask(static_cast<const uint8_t *>(a.residual) + STREAMS * at, STREAMS * bytes);
        if (POST) ask(static_cast<const uint8_t *>(a.x) + at, bytes);
        if (a.weight) ask(a.weight, bytes);
        wait_for_previous();
    }
    Mix<STREAMS> mix;
    if constexpr (POST) mix = mix_of<STREAMS>(a, row, 0, true);
    const float4 pre = a.pre ? __ldcg(reinterpret_cast<const float4 *>(a.pre) + row) : make_float4(1.f, 0.f, 0.f, 0.f);
    auto *streams = static_cast<uint2 *>(a.streams) + static_cast<int64_t>(row) * STREAMS * fours;
    auto *input = static_cast<uint2 *>(a.input) + static_cast<int64_t>(row) * fours;
    constexpr float4 QUARTER = {0.25f, 0.25f, 0.25f, 0.25f}; /* the mean, exact but for its sum */
    float squares = 0.f;
#pragma unroll 1
    for (int begin = tid; begin < fours; begin += BATCH * THREADS) {
        Old old[BATCH];
#pragma unroll
        for (int c = 0; c < BATCH; ++c) {
            const int four = begin + c * THREADS;
            old[c] = old_of<POST>(a, row, 4 * four, four < fours);
        }
#pragma unroll
        for (int c = 0; c < BATCH; ++c) {
            const int four = begin + c * THREADS;
            if (four >= fours) break;
            uint2 now[STREAMS];
#pragma unroll
            for (int j = 0; j < STREAMS; ++j) {
                now[j] = old[c].stream[j];
                if constexpr (POST) streams[j * fours + four] = now[j] = renewed(mix, j, old[c]);
            }
            if (a.mean) static_cast<uint2 *>(a.mean)[static_cast<int64_t>(row) * fours + four] = mixed(QUARTER, now);
            const uint2 value = a.pre ? mixed(pre, now) : now[0];
            squares += squares_of(value);
            if (a.weight)
                s.row[four] = value;
            else
                input[four] = value;
        }
    }
    if (!a.weight) return;
#pragma unroll
    for (int by = 16; by; by /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, by);
    if (lane == 0) s.squares[warp] = squares;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += s.squares[w];
    const float norm = rsqrtf(total / static_cast<float>(a.hidden) + a.norm_eps);
    for (int four = tid; four < fours; four += THREADS) {
        const uint2 v = s.row[four], gain = __ldg(static_cast<const uint2 *>(a.weight) + four);
        input[four] = make_uint2(pack_bf16(lower(v.x) * norm * lower(gain.x), upper(v.x) * norm * upper(gain.x)),
                                 pack_bf16(lower(v.y) * norm * lower(gain.y), upper(v.y) * norm * upper(gain.y)));
    }
}

/* ---- the projection ---------------------------------------------------------------------------- */

/* How a CTA's threads share what is added up: eight a row, of which each takes a quad of its columns of every
 * `parts`-th CTA's shares. Rows are taken as 1 << by. */
struct Adders {
    int by, parts, part, row;
    unsigned first; /* quad of the shares */
};

template <int ROWS>
__device__ __forceinline__ Adders adders_of(int group, int splits, int live) {
    const int tid = static_cast<int>(threadIdx.x);
    Adders my;
    my.by = live > 1 ? 32 - __clz(live - 1) : 0;
    my.parts = THREADS / 8 >> my.by, my.part = tid >> (3 + my.by), my.row = (tid >> 3) & ((1 << my.by) - 1);
    my.first = static_cast<unsigned>(((group * splits + my.part) * ROWS + my.row) * (COLUMNS / 4) + (tid & 7));
    return my;
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

__device__ __forceinline__ float4 folded(float4 v, int by) {
    return plus(v, {__shfl_xor_sync(0xffffffffu, v.x, by), __shfl_xor_sync(0xffffffffu, v.y, by),
                    __shfl_xor_sync(0xffffffffu, v.z, by), __shfl_xor_sync(0xffffffffu, v.w, by)});
}

/* Of a group's live rows, the sum of all CTAs' shares, to s.totals. */
template <int ROWS>
__device__ __forceinline__ void add_up(Shared &s, const mhc_args &a, Adders my, int splits, int live) {
    constexpr int AT_ONCE = 10;
    const int tid = static_cast<int>(threadIdx.x), quad = tid & 7;
    const auto *shares = reinterpret_cast<const float4 *>(a.shares);
    const bool mine = my.row < live && quad < QUADS;
    const unsigned step = static_cast<unsigned>(my.parts * (ROWS * COLUMNS / 4));
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int begin = my.part; begin < splits; begin += AT_ONCE * my.parts) {
        float4 v[AT_ONCE]; /* all under way at once, and not by way of L1 */
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, my.first += step) {
            v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (mine && begin + i * my.parts < splits) v[i] = __ldcg(shares + my.first);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) sum = plus(sum, v[i]);
    }
    /* A warp's parts of one row first. */
    if (my.by == 0) sum = folded(sum, 8);
    if (my.by <= 1) sum = folded(sum, 16);
    if (my.by <= 1) my.part = tid >> 5, my.parts = WARPS;
    float *parts = &s.tiles[0][0];
    if (mine && (tid >> 3 & 3) < 1 << my.by)
        *reinterpret_cast<float4 *>(parts + ((my.part << my.by) + my.row) * PADDED + 4 * quad) = sum;
    __syncthreads();
    for (int i = tid; i < live * COLUMNS; i += THREADS) {
        const int at = i / COLUMNS * PADDED + i % COLUMNS;
        if (i % COLUMNS > SQUARES) continue;
        float total = 0.f;
        for (int p = 0; p < my.parts; ++p) total += parts[(p << my.by) * PADDED + at];
        s.totals[at] = total;
    }
    __syncthreads();
}

/* `HALVES`: of the streams, that the warps of the same columns share. */
template <int TILES, int HALVES, bool POST>
__device__ __forceinline__ void take_slice(Shared &s, const mhc_args &a, int group, int split) {
    constexpr int ROWS = 8 * TILES, BLOCKS = WARPS / HALVES, SLICE = 16 * BLOCKS;
    const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5;
    const int splits = a.hidden / SLICE, first = group * ROWS, live = min(ROWS, a.tokens - first);
    const int column = split * SLICE + 16 * (warp % BLOCKS);
    constexpr int EACH = STREAMS / HALVES;
    const int stream = warp / BLOCKS * EACH;
    uint4 weights[EACH][3];
    take_weights(weights, a, stream, column, lane);
    const float constant = tid < MIXES + 3 ? __ldg(tid < MIXES ? a.base + tid : a.scale + tid - MIXES) : 0.f;
    if (a.early) wait_for_previous();
    put(s.tiles[warp], share_of<TILES, EACH, POST>(a, weights, first, stream, column, lane), lane);
    if (tid < MIXES + 3) (tid < MIXES ? s.constants.base[tid] : s.constants.scale[tid - MIXES]) = constant;
    __syncthreads();
    float *mine = a.shares + static_cast<int64_t>(group * splits + split) * ROWS * COLUMNS;
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS / THREADS; ++i) {
        const int at = tid + i * THREADS, row = at / COLUMNS, k = at % COLUMNS;
        float sum = 0.f;
        if (k < 4 * QUADS)
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += s.tiles[w][row * PADDED + k];
        if (row < live && k < 4 * QUADS) mine[at] = sum;
    }
    Adders my = adders_of<ROWS>(group, splits, live);
    asm volatile("" : "+r"(my.first), "+r"(my.part)); /* so that they are there when the last one is known */
    /* Every thread's shares are stored before one of them says so to the whole GPU. */
    __syncthreads();
    if (tid == 0) s.last = count_and_order(a.counters + group, splits - 1) == splits - 1;
    __syncthreads();
    if (!s.last) return;
    add_up<ROWS>(s, a, my, splits, live);
    /* A warp each: Sinkhorn's, which take longest, the next pre-mix, the post mix. */
    if (lane >= live) return;
    const float *row = s.totals + lane * PADDED;
    if (warp == 0) {
        sinkhorn(row, a, s.constants, reinterpret_cast<float4 *>(a.comb_out) + (first + lane) * STREAMS);
    } else if (warp == 1) {
        const float4 v = gates(row, a, 0, s.constants);
        const float eps = a.pre_eps;
        reinterpret_cast<float4 *>(a.pre_out)[first + lane] = make_float4(v.x + eps, v.y + eps, v.z + eps, v.w + eps);
    } else if (warp == 2) {
        const float4 v = gates(row, a, 1, s.constants);
        const float by = a.post_gain;
        reinterpret_cast<float4 *>(a.post_out)[first + lane] = make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
    }
}

/* Grid: groups * splits CTAs of the projection, then one a row. */
template <int TILES, int HALVES, bool POST>
__global__ void __launch_bounds__(THREADS, 2) one_launch(const __grid_constant__ mhc_args a) {
    __shared__ Shared s;
    let_next_start();
    constexpr int ROWS = 8 * TILES, SLICE = 16 * WARPS / HALVES;
    const int groups = (a.tokens + ROWS - 1) / ROWS, splits = a.hidden / SLICE;
    int split = static_cast<int>(blockIdx.x), group = 0;
    for (; group < groups && split >= splits; ++group) split -= splits; /* sooner than a division */
    const int row = group < groups ? -1 : split;
    if (row >= 0)
        take_row<POST>(s, a, row);
    else
        take_slice<TILES, HALVES, POST>(s, a, group, split);
}

} // namespace

template <int TILES, int HALVES>
cudaError_t launch(const mhc_args &args, bool early, cudaStream_t stream) {
    const int groups = (args.tokens + args.rows - 1) / args.rows;
    const dim3 grid(static_cast<unsigned>(groups * (args.hidden / args.columns) + args.tokens));
    mhc_args given = args;
    given.early = early;
    const auto kernel = args.x ? one_launch<TILES, HALVES, true> : one_launch<TILES, HALVES, false>;
    return call::launch_early(kernel, grid, THREADS, 0, early, stream, given);
}

cudaError_t launch(const mhc_args &args, bool early, cudaStream_t stream) {
    const bool wide = args.columns == 128;
    if (args.rows == 8) return wide ? launch<1, 1>(args, early, stream) : launch<1, 2>(args, early, stream);
    return wide ? launch<2, 1>(args, early, stream) : launch<2, 2>(args, early, stream);
}

} // namespace mhc
