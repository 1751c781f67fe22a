/* Dense group: shards of one launch, found by a prefix table in the kernel's parameters. */
#pragma once

#include "engine.cuh"

namespace exl3 {

struct DenseShard {
    const __nv_bfloat16 *x;
    const char *trellis;
    const __half *suh;
    const __half *svh;
    const __half *bias;
    void *y;
    int64_t x_stride, y_stride;
    int64_t partial; /* floats into scratch */
    int32_t counter; /* of the shard's first counter */
    int32_t first;   /* CTA */
    int32_t blocks;  /* in / 128 */
    int32_t width;   /* out / 128 */
    int32_t chunks;
    int32_t groups;
    int32_t kblocks;
    int32_t splits;
    Stand stand[2];  /* of all groups, of the last */
    int16_t k2;
    int8_t codebook;
    int8_t fp32;
};

struct DenseLaunch {
    DenseShard shard[16];
    float *scratch;
    int *counters;
    int32_t count;
    int32_t rows;
    int32_t passes;
    int32_t warps;
    int32_t ring_words; /* of a warp */
};

/* k-tiles of a warp's weights that are asked for before the launch in front of this one has ended. */
constexpr int FIRST_TILES = 8;

/* Whether the first of them is decoded by then: where launches overlap as a rule. Elsewhere it would
 * only keep registers. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool DECODES_EARLY = true;
#else
constexpr bool DECODES_EARLY = false;
#endif

/* Grid [passes of 8 * NB rows, CTAs of all shards]: passes over the same weights stand side by side, so that
 * all but one find them in L2. */
template <int NB>
__global__ void __launch_bounds__(32 * MAX_WARPS, 2) dense_kernel(const __grid_constant__ DenseLaunch p) {
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ int flag;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int cta = static_cast<int>(blockIdx.y), pass = static_cast<int>(blockIdx.x);
    int index = 0;
    while (index + 1 < p.count && cta >= p.shard[index + 1].first) ++index;
    const DenseShard &s = p.shard[index];
    const int item = cta - s.first;
    const int split = item / s.groups, group = item - split * s.groups;
    const int base = pass * 8 * NB;
    const int rows = min(8 * NB, p.rows - base);

    /* This warp: one chunk, a part of the CTA's k-tiles. */
    const int block0 = split * s.kblocks, blocks = min(s.kblocks, s.blocks - block0);
    const Stand &stand = s.stand[group == s.groups - 1];
    const int here = stand.chunks;
    const Place at = place_of(stand, warp, blocks);
    const int chunk = group * s.chunks + at.chunk;
    const int k2 = s.k2;
    uint32_t *const x = shared + p.warps * p.ring_words;
    Stream stream;
    stream.stride = static_cast<int64_t>(s.width) * 128 * k2;
    stream.from = s.trellis + (8 * block0 + at.tile0) * stream.stride + static_cast<int64_t>(chunk) * 128 * k2;
    stream.count = at.tile1 - at.tile0;
    stream.ring = shared + warp * p.ring_words;
    stream.x = reinterpret_cast<const uint2 *>(x) + at.tile0 * NB * 32 + lane;
    /* While the launch before ends, weights come and the first are decoded; what that launch may have
       written, inputs and scratch, is touched when it has. */
    for (int tile = 0; tile < min(stream.count, FIRST_TILES); ++tile)
        if (lane < k2) prefetch(stream.from + tile * stream.stride + 128 * lane);
    for (int i = threadIdx.x; i < 2 * blocks; i += 32 * p.warps) prefetch(s.suh + 128 * block0 + 64 * i);
    if (static_cast<int>(threadIdx.x) < 2 * here) prefetch(s.svh + CHUNK * s.chunks * group + 64 * threadIdx.x);
    start_stream(stream, k2, s.codebook, lane);
    [[maybe_unused]] First first;
    if constexpr (DECODES_EARLY) decode_begin(stream, k2, s.codebook, lane, first);
    wait_for_previous();
    let_next_start();
    const auto row_at = [&](int row) { return s.x + (base + row) * s.x_stride + 128 * block0; };
    rotate_rows<NB>(row_at, rows, blocks, s.suh + 128 * block0, warp, p.warps, lane, x);
    __syncthreads();
    Sums<NB> sums = {};
    run_stream<NB, 32 * NB, DECODES_EARLY>(stream, k2, s.codebook, lane, sums, &first);

    float *const red = reinterpret_cast<float *>(shared);
    /* Partial rows: [pass][chunk][split][8 * NB][128]. */
    float *const partial = p.scratch + s.partial;
    const auto partial_at = [&](int c, int r) {
        return partial + (((static_cast<int64_t>(pass) * s.width + c) * s.splits) * 8 * NB + r) * CHUNK;
    };
    const auto put = [&](float4 v, float4 svh, int c, int row) {
        v = finish(v, svh, lane);
        if (s.bias) {
            const __half2 *b = reinterpret_cast<const __half2 *>(s.bias + c * CHUNK + 4 * lane);
            const float2 b0 = __half22float2(b[0]), b1 = __half22float2(b[1]);
            v.x += b0.x, v.y += b0.y, v.z += b1.x, v.w += b1.y;
        }
        store_four(s.y, (base + row) * s.y_stride + c * CHUNK + 4 * lane, s.fp32, v);
    };
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        __syncthreads();
        if (at.works) put_sums<NB>(sums, nb, red + warp * RED_WARP, lane);
        __syncthreads();
        const int some = min(8, rows - 8 * nb);
        for (int task = warp; task < some * here; task += p.warps) {
            const int row = divide(task, stand.by_chunks), c = task - row * here;
            const float4 v = take_sums(red, c, here, stand.lanes, row, lane);
            if (s.splits == 1)
                put(v, scales_of(s.svh + (group * s.chunks + c) * CHUNK, lane), group * s.chunks + c, 8 * nb + row);
            else
                __stcg(reinterpret_cast<float4 *>(partial_at(group * s.chunks + c, split * 8 * NB + 8 * nb + row)) + lane, v);
        }
    }
    if (s.splits == 1) return;
    if (!arrive(p.counters + s.counter + pass * s.groups + group, s.splits, &flag)) return;
    for (int task = warp; task < rows * here; task += p.warps) {
        const int row = divide(task, stand.by_chunks), c = group * s.chunks + task - row * here;
        const float4 svh = scales_of(s.svh + c * CHUNK, lane);
        const float *const from = partial_at(c, row);
        constexpr int STRIDE = 8 * NB * CHUNK;
        put(s.splits <= 4   ? sum_partials<4>(from, STRIDE, s.splits, lane)
            : s.splits <= 8 ? sum_partials<8>(from, STRIDE, s.splits, lane)
                            : sum_partials<16>(from, STRIDE, s.splits, lane),
            svh, c, row);
    }
}

} // namespace exl3
