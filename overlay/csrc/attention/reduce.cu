/* The splits of a token's head to its output: always in the same order, so always the same bits. */
#include "../common/launch.hpp"
#include "finish.cuh"

namespace attention {
namespace {

constexpr int REDUCE_THREADS = 128, MOST = 64, BATCH = 8;

__global__ void __launch_bounds__(REDUCE_THREADS) reduce(const __grid_constant__ Launch p) {
    __shared__ float weights[MOST];
    __shared__ float by;
    wait_for_previous();
    const int tid = static_cast<int>(threadIdx.x);
    const int token = static_cast<int>(blockIdx.x) / p.heads, head = static_cast<int>(blockIdx.x) - token * p.heads;
    const int64_t far = static_cast<int64_t>(p.tokens) * p.heads, place = blockIdx.x;
    if (tid < 32) {
        float peak[2], total[2], top = NONE;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int split = tid + 32 * i;
            peak[i] = split < p.splits ? p.peaks[split * far + place] : NONE;
            total[i] = split < p.splits ? p.peaks[(p.splits + split) * far + place] : 0.f;
            top = fmaxf(top, peak[i]);
        }
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        const float base = top == NONE ? 0.f : top;
        float whole = 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float weight = power(peak[i] - base);
            /* A split that saw no record wrote no sums; one with NaN logits has no peak, but a total. */
            weights[tid + 32 * i] = peak[i] == NONE && total[i] == 0.f ? -1.f : weight;
            whole += weight * total[i];
            if (peak[i] == NONE && total[i] != 0.f) whole = NAN;
        }
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) whole += __shfl_xor_sync(0xffffffffu, whole, step);
        if (tid == 0) by = share(top, whole, p.sink[head]);
    }
    __syncthreads();
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    const auto *from = reinterpret_cast<const float4 *>(p.partial + place * 512) + tid;
    for (int first = 0; first < p.splits; first += BATCH) {
        float4 part[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) /* all on their way before the first is added */
            part[i] = weights[first + i] >= 0.f ? __ldcg(from + (first + i) * far * 128) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float weight = fmaxf(weights[first + i], 0.f);
            sum.x += weight * part[i].x;
            sum.y += weight * part[i].y;
            sum.z += weight * part[i].z;
            sum.w += weight * part[i].w;
        }
    }
    sum.x *= by, sum.y *= by, sum.z *= by, sum.w *= by;
    uint2 *to = reinterpret_cast<uint2 *>(p.out + token * p.out_token + head * p.out_head) + tid;
    if (tid < 112 || !p.cos_sin)
        *to = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    else
        *to = make_uint2(packed_pair(p, sum.x, sum.y, turn_of(p, token, 2 * (tid - 112))),
                         packed_pair(p, sum.z, sum.w, turn_of(p, token, 2 * (tid - 112) + 1)));
}

} // namespace

cudaError_t launch_reduce(const Launch &p, bool early, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(p.tokens) * p.heads);
    return call::launch_early(reduce, grid, REDUCE_THREADS, 0, early, stream, p);
}

} // namespace attention
