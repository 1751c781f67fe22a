/* The kernel's forms. */
#include "attend.cuh"

namespace attention {
namespace {

/* Tiles of 32 are for every GPU, of 64 for those that give a CTA 163 KB (SM80) or more. */
static_assert(sizeof(Shared<32, 2, true>) <= 99 * 1024 && sizeof(Shared<64, 2, false>) <= 163 * 1024);

template <int KEYS, int MT, bool PAIR>
cudaError_t launch(const Launch &p, cudaStream_t stream) {
    constexpr int bytes = static_cast<int>(sizeof(Shared<KEYS, MT, PAIR>));
    const auto kernel = attend<KEYS, MT, PAIR>;
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    const int groups = (p.heads + 16 * MT - 1) / (16 * MT);
    const dim3 grid(static_cast<unsigned>(p.tokens) * groups, p.splits);
    kernel<<<grid, THREADS, bytes, stream>>>(p);
    return cudaGetLastError();
}

} // namespace

int attend_shared(int keys, bool wide, bool pair) {
    if (pair) return wide ? sizeof(Shared<32, 2, true>) : sizeof(Shared<32, 1, true>);
    if (keys == 32) return wide ? sizeof(Shared<32, 2, false>) : sizeof(Shared<32, 1, false>);
    return wide ? sizeof(Shared<64, 2, false>) : sizeof(Shared<64, 1, false>);
}

cudaError_t launch_attend(const Launch &p, int keys, bool wide, bool pair, cudaStream_t stream) {
    if (pair) return wide ? launch<32, 2, true>(p, stream) : launch<32, 1, true>(p, stream);
    if (keys == 32) return wide ? launch<32, 2, false>(p, stream) : launch<32, 1, false>(p, stream);
    return wide ? launch<64, 2, false>(p, stream) : launch<64, 1, false>(p, stream);
}

} // namespace attention
