/* The kernel's forms. */
#include "../common/launch.hpp"
#include "attend.cuh"

namespace attention {
namespace {

/* Tiles of 32 are for every GPU, of 64 for those that give a CTA 163 KB (SM80) or more. */
static_assert(sizeof(Shared<32, 2>) <= 99 * 1024 && sizeof(Shared<64, 2>) <= 163 * 1024);

template <int KEYS, int MT>
cudaError_t launch(const Launch &p, cudaStream_t stream) {
    constexpr int bytes = static_cast<int>(sizeof(Shared<KEYS, MT>));
    const auto kernel = attend<KEYS, MT>;
    if (const cudaError_t error = call::allow_shared(kernel, bytes)) return error;
    const int groups = (p.heads + 16 * MT - 1) / (16 * MT);
    const dim3 grid(static_cast<unsigned>(p.tokens) * groups, p.splits);
    kernel<<<grid, THREADS, bytes, stream>>>(p);
    return cudaGetLastError();
}

} // namespace

int attend_shared(int keys, bool wide) {
    if (keys == 32) return wide ? sizeof(Shared<32, 2>) : sizeof(Shared<32, 1>);
    return wide ? sizeof(Shared<64, 2>) : sizeof(Shared<64, 1>);
}

cudaError_t launch_attend(const Launch &p, int keys, bool wide, cudaStream_t stream) {
    if (keys == 32) return wide ? launch<32, 2>(p, stream) : launch<32, 1>(p, stream);
    return wide ? launch<64, 2>(p, stream) : launch<64, 1>(p, stream);
}

} // namespace attention
