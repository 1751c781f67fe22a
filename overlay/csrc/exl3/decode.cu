/* W_hat, bit for bit. */
#include "decode.cuh"
#include "launch.hpp"

namespace exl3 {

/* A warp a tile, tiles along the outputs; `wide` = out / 16. */
__global__ void __launch_bounds__(256) decode_kernel(const uint32_t *trellis, int k2, int codebook,
                                                     int wide, int64_t tiles, uint32_t *weights) {
    extern __shared__ uint32_t shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t tile = static_cast<int64_t>(blockIdx.x) * 8 + warp;
    if (tile >= tiles) return;
    uint32_t *const words = shared + warp * 4 * k2;
    for (int i = lane; i < 4 * k2; i += 32) words[i] = __ldg(trellis + tile * 4 * k2 + i);
    __syncwarp();
    const int64_t row = tile / wide, column = tile - row * wide;
    __half *const out = reinterpret_cast<__half *>(weights);
    for (int j = 0; j < 8; ++j) {
        const int in = 2 * (lane & 3) + (j & 1) + 8 * (j >> 1 & 1), at = (lane >> 2) + 8 * (j >> 2);
        const uint32_t v = codebook_value(ring_state(words, k2, 8 * lane + j), codebook);
        out[(row * 16 + in) * (16 * wide) + 16 * column + at] =
            __ushort_as_half(static_cast<unsigned short>(v));
    }
}

cudaError_t launch_decode(const void *trellis, int in, int out, int k2, int codebook, void *weights,
                          cudaStream_t stream) {
    const int64_t tiles = static_cast<int64_t>(in / 16) * (out / 16);
    const auto ctas = static_cast<unsigned>((tiles + 7) / 8);
    decode_kernel<<<ctas, 256, 8 * 16 * k2, stream>>>(static_cast<const uint32_t *>(trellis), k2, codebook,
                                                      out / 16, tiles, static_cast<uint32_t *>(weights));
    return cudaGetLastError();
}

} // namespace exl3
