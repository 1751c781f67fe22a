/* Weights for a product of a library's: W_hat^T, bit for bit, inputs permuted within each 32.
 *
 * A lane's eight values of a tile are four of one output and four of another, so that two k-tiles give
 * 16 bytes of each, if the inputs of a pair of k-tiles stand as lanes hold them: place
 * 8 * q + 4 * tile + 2 * upper + e holds input 16 * tile + 8 * upper + 2 * q + e. `rotate` writes its
 * rows in that order. No shared memory, no exchange between lanes. */
#include "decode.cuh"
#include "many.hpp"

namespace exl3 {

__device__ __forceinline__ uint32_t mul1_values(uint32_t lo, uint32_t hi) {
    const uint32_t pair = mul1_pair(lo, hi), scale = 0x1EEE1EEEu, offset = 0xC931C931u;
    return half2_bits(__hfma2(*reinterpret_cast<const __half2 *>(&pair), *reinterpret_cast<const __half2 *>(&scale),
                              *reinterpret_cast<const __half2 *>(&offset)));
}

/* A warp 128 inputs x 16 outputs; grid [chunks of 128 outputs][k-blocks], 8 warps. `width`: tiles of the
 * whole matrix along its outputs; `blocks`: its k-blocks. */
template <int K2>
__global__ void __launch_bounds__(256) reconstruct_kernel(const char *trellis, int width, int blocks, int k2,
                                                          int codebook, uint4 *weights) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int block = static_cast<int>(blockIdx.y), column = 8 * static_cast<int>(blockIdx.x) + warp;
    const int rate = K2 ? K2 : k2;
    const int64_t stride = static_cast<int64_t>(width) * 16 * rate;
    const char *const from = trellis + 8 * block * stride + static_cast<int64_t>(column) * 16 * rate;
    uint4 *const to = weights + (static_cast<int64_t>(16 * column + (lane >> 2)) * blocks + block) * 16 + (lane & 3);
    const int64_t lower = static_cast<int64_t>(8) * blocks * 16; /* eight outputs on */
    uint32_t v[2][4];
    if constexpr (K2 != 0) {
        const Window<K2> window(lane);
        uint32_t w[8][window.WORDS];
#pragma unroll
        for (int tile = 0; tile < 8; ++tile)
#pragma unroll
            for (int i = 0; i < window.WORDS; ++i)
                w[tile][i] = __ldg(reinterpret_cast<const uint32_t *>(from + tile * stride + window.at[i]));
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t s[8];
                window.states(w[2 * pair + i], s);
#pragma unroll
                for (int j = 0; j < 4; ++j) v[i][j] = mul1_values(s[2 * j], s[2 * j + 1]);
            }
            to[4 * pair] = make_uint4(v[0][0], v[0][1], v[1][0], v[1][1]);
            to[4 * pair + lower] = make_uint4(v[0][2], v[0][3], v[1][2], v[1][3]);
        }
    } else {
#pragma unroll 1
        for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t *words = reinterpret_cast<const uint32_t *>(from + (2 * pair + i) * stride);
#pragma unroll
                for (int j = 0; j < 4; ++j) v[i][j] = any_pair(words, k2, codebook, 8 * lane + 2 * j);
            }
            to[4 * pair] = make_uint4(v[0][0], v[0][1], v[1][0], v[1][1]);
            to[4 * pair + lower] = make_uint4(v[0][2], v[0][3], v[1][2], v[1][3]);
        }
    }
}

cudaError_t launch_reconstruct(const void *trellis, int width, int blocks, int chunks, int k2, int codebook,
                               void *weights, cudaStream_t stream) {
    const dim3 grid(chunks, blocks);
    const char *from = static_cast<const char *>(trellis);
    uint4 *to = static_cast<uint4 *>(weights);
#define EXL3_CALL(K2) reconstruct_kernel<K2><<<grid, 256, 0, stream>>>(from, width, blocks, k2, codebook, to)
    switch (codebook == 0 ? k2 : 0) {
    case 4: EXL3_CALL(4); break;
    case 6: EXL3_CALL(6); break;
    case 8: EXL3_CALL(8); break;
    case 10: EXL3_CALL(10); break;
    case 12: EXL3_CALL(12); break;
    case 16: EXL3_CALL(16); break;
    default: EXL3_CALL(0); break;
    }
#undef EXL3_CALL
    return cudaGetLastError();
}

} // namespace exl3
