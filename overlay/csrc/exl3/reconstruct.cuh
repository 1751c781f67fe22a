/* Weights for a product of a library's: W_hat^T, bit for bit, inputs permuted within each 32.
 *
 * A lane's eight values of a tile are four of one output and four of another, so that two k-tiles give
 * 16 bytes of each, if the inputs of a pair of k-tiles stand as lanes hold them: place
 * 8 * q + 4 * tile + 2 * upper + e holds input 16 * tile + 8 * upper + 2 * q + e. `rotate` writes its
 * rows in that order. No shared memory, no exchange between lanes, 69 registers at
 * most. */
#pragma once

#include "decode.cuh"
#include "many.hpp"

namespace exl3 {

__device__ __forceinline__ uint32_t mul1_values(uint32_t lo, uint32_t hi) {
    const uint32_t pair = mul1_pair(lo, hi), scale = 0x1EEE1EEEu, offset = 0xC931C931u;
    return half2_bits(__hfma2(*reinterpret_cast<const __half2 *>(&pair), *reinterpret_cast<const __half2 *>(&scale),
                              *reinterpret_cast<const __half2 *>(&offset)));
}

/* `lower`: from an output to the one eight on. */
__device__ __forceinline__ void store_pair(uint4 *to, int64_t lower, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    to[0] = make_uint4(a[0], a[1], b[0], b[1]);
    to[lower] = make_uint4(a[2], a[3], b[2], b[3]);
}

/* A warp TILES k-tiles x 16 outputs, a CTA WARPS neighbours along the outputs; 16 * TILES inputs are a
 * part of a k-block. EARLY: it asks for its trellis while the launch in front ends, and reads it after:
 * what __ldg reads the compiler would move before. */
template <int K2, int TILES, int WARPS, bool EARLY>
__global__ void __launch_bounds__(32 * WARPS) reconstruct_kernel(const __grid_constant__ ReconstructLaunch p) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int m = 0;
    while (m + 1 < p.count && static_cast<int>(blockIdx.x) >= p.of[m + 1].first) ++m;
    const Decoded &one = p.of[m];
    const int at = static_cast<int>(blockIdx.x) - one.first, across = one.chunks * (8 / WARPS);
    const int part = at / across, column = WARPS * (at - part * across) + warp;
    const int rate = K2 ? K2 : p.k2;
    const int64_t stride = static_cast<int64_t>(one.width) * 16 * rate;
    const char *const from = one.trellis + TILES * part * stride + static_cast<int64_t>(column) * 16 * rate;
    const int64_t row = static_cast<int64_t>(one.blocks) * 16;
    uint4 *const to = one.weights + (16 * column + (lane >> 2)) * row + part * (2 * TILES) + (lane & 3);
    if constexpr (EARLY) {
        let_next_start();
        if (lane < 2 * TILES && 128 * (lane & 1) < 16 * rate) prefetch(from + (lane >> 1) * stride + 128 * (lane & 1));
        wait_for_previous();
    }
    if constexpr (K2 != 0) {
        const Window<K2> window(lane);
        uint32_t w[TILES][window.WORDS], v[TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < window.WORDS; ++i)
                if constexpr (EARLY)
                    w[tile][i] = *reinterpret_cast<const uint32_t *>(from + tile * stride + window.at[i]);
                else
                    w[tile][i] = __ldg(reinterpret_cast<const uint32_t *>(from + tile * stride + window.at[i]));
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            uint32_t s[8];
            window.states(w[tile], s);
#pragma unroll
            for (int j = 0; j < 4; ++j) v[tile][j] = mul1_values(s[2 * j], s[2 * j + 1]);
        }
#pragma unroll
        for (int pair = 0; pair < TILES / 2; ++pair) store_pair(to + 4 * pair, 8 * row, v[2 * pair], v[2 * pair + 1]);
    } else {
#pragma unroll 1
        for (int pair = 0; pair < TILES / 2; ++pair) {
            uint32_t v[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t *words = reinterpret_cast<const uint32_t *>(from + (2 * pair + i) * stride);
#pragma unroll
                for (int j = 0; j < 4; ++j) v[i][j] = any_pair(words, p.k2, p.codebook, 8 * lane + 2 * j);
            }
            store_pair(to + 4 * pair, 8 * row, v[0], v[1]);
        }
    }
}

} // namespace exl3
