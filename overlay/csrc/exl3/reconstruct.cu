/* Weights for a product of a library's, of several matrices in one launch: reconstruct.cuh. */
#include "reconstruct.cuh"

#include "launch.hpp"

namespace exl3 {

/* k-tiles a warp, and warps. By an H200's measurements: small launches that start early are the faster
 * for fine CTAs (5120 -> 512: 62 % of a copy's speed, 48 % by coarse ones), all others for coarse. */
constexpr int FINE = 2, COARSE = 8, WARPS = 4;
/* Small: fewer coarse CTAs than this an SM, half of what one holds at once. */
constexpr int FULL = 8;

template <int K2, int TILES, bool EARLY>
static cudaError_t launch(ReconstructLaunch p, cudaStream_t stream) {
    int ctas = 0;
    for (int i = 0; i < p.count; ++i) {
        p.of[i].first = ctas;
        ctas += p.of[i].blocks * (8 / TILES) * p.of[i].chunks * (8 / WARPS);
    }
    return call::launch_early(reconstruct_kernel<K2, TILES, WARPS, EARLY>, dim3(ctas), 32 * WARPS, 0, EARLY, stream, p);
}

template <int K2>
static cudaError_t choose(const ReconstructLaunch &p, bool early, cudaStream_t stream) {
    if (!early) return launch<K2, COARSE, false>(p, stream);
    int sms = 0, ctas = 0;
    if (const cudaError_t error = call::attribute_of_gpu(cudaDevAttrMultiProcessorCount, sms)) return error;
    for (int i = 0; i < p.count; ++i) ctas += p.of[i].blocks * p.of[i].chunks * (8 / WARPS);
    return ctas < FULL * sms ? launch<K2, FINE, true>(p, stream) : launch<K2, COARSE, true>(p, stream);
}

cudaError_t launch_reconstruct(const ReconstructLaunch &p, bool early, cudaStream_t stream) {
    switch (p.codebook == 0 ? p.k2 : 0) {
    case 4: return choose<4>(p, early, stream);
    case 6: return choose<6>(p, early, stream);
    case 8: return choose<8>(p, early, stream);
    case 10: return choose<10>(p, early, stream);
    case 12: return choose<12>(p, early, stream);
    case 16: return choose<16>(p, early, stream);
    default: return choose<0>(p, early, stream);
    }
}

} // namespace exl3
