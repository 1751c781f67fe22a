/* One launch for a few rows: write-back, projection, coefficients, collapse and norm.
 *
 * CTAs have two roles. Those of the projection share out the weight's columns: a warp takes 16 columns of
 * the hidden size, that is 64 of the weight's, and eight tokens; it has every load under way before it
 * waits for the first, makes the new streams of its columns as a B operand where they are, and multiplies
 * the 24 rows of the weight, each float32 as two bf16. The last CTA of eight tokens to arrive adds what all
 * left, always in the same order, and makes the coefficients. Nobody waits for another CTA. The other CTAs
 * compute one whole row each: its streams, their collapse and the norm. */
#include "finish.cuh"
#include "launch.hpp"
#include "streams.cuh"

namespace mhc {
namespace {

constexpr int ROWS = MHC_ROWS, MIXES = 24, SQUARES = 24, USED = 25, SHARE = MHC_SHARE, TILE = 16;

template <int WARPS>
struct Shared {
    float sums[WARPS][ROWS][33];
    float totals[ROWS][33];
    float scale[3], base[MIXES];
    uint2 kept[MHC_MOST_HIDDEN / 4];
    float squares[WARPS];
    int last;
};

/* A float32 pair as bf16, and what that leaves. */
__device__ __forceinline__ void limbs(uint32_t &high, uint32_t &low, float a, float b) {
    high = pack(a, b);
    low = pack(a - low_of(high), b - high_of(high));
}

template <int WARPS>
__device__ __forceinline__ void multiply(Shared<WARPS> &s, const mhc_args &a, int group, int share) {
    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
    const int g = lane >> 2, t = lane & 3, h = (share * WARPS + warp) * TILE + 4 * t, token = group * ROWS + g;
    const bool live = token < a.tokens;
    float4 f[4][3];
#pragma unroll
    for (int n = 0; n < 3; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f[i][n] = load4(a.fn + (static_cast<int64_t>(8 * n + g) * 4 + i) * a.hidden + h);
    const Columns old = columns(a, token, h, live);
    const Coefficients by = coefficients(a, token, live);
    if (warp == 0 && lane < MIXES) s.base[lane] = __ldg(a.base + lane);
    if (warp == 0 && lane < 3) s.scale[lane] = __ldg(a.scale + lane);
    uint2 now[4];
    renew(now, old, by, a.x != nullptr);
    float high[2][4] = {}, low[2][4] = {}, squares = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) squares += of(now[i], c) * of(now[i], c);
        uint32_t p[2][4] = {}, q[2][4] = {};
        limbs(p[0][0], q[0][0], f[i][0].x, f[i][0].y), limbs(p[0][2], q[0][2], f[i][0].z, f[i][0].w);
        limbs(p[0][1], q[0][1], f[i][1].x, f[i][1].y), limbs(p[0][3], q[0][3], f[i][1].z, f[i][1].w);
        limbs(p[1][0], q[1][0], f[i][2].x, f[i][2].y), limbs(p[1][2], q[1][2], f[i][2].z, f[i][2].w);
#pragma unroll
        for (int m = 0; m < 2; ++m) mma(high[m], p[m], now[i].x, now[i].y), mma(low[m], q[m], now[i].x, now[i].y);
    }
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
    float(*mine)[33] = s.sums[warp];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        mine[2 * t + c][g] = high[0][c] + low[0][c];
        mine[2 * t + c][8 + g] = high[0][2 + c] + low[0][2 + c];
        mine[2 * t + c][16 + g] = high[1][c] + low[1][c];
    }
    if (t == 0) mine[g][SQUARES] = squares;
}

template <int WARPS>
__device__ __forceinline__ void project(Shared<WARPS> &s, const mhc_args &a, int group, int share, int shares) {
    constexpr int THREADS = 32 * WARPS;
    const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5;
    const int rows = min(ROWS, a.tokens - group * ROWS);
    float *room = a.partials + static_cast<int64_t>(group) * shares * SHARE;
    multiply(s, a, group, share);
    __syncthreads();
    for (int i = tid; i < 32 * rows; i += THREADS) {
        if (lane >= USED) continue;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += s.sums[w][i >> 5][lane];
        __stcg(room + share * SHARE + i, sum);
    }
    __syncthreads(); /* every sum is stored before one thread says so to the whole GPU */
    if (tid == 0) s.last = arrive(a.counters + group) == shares - 1;
    __syncthreads();
    if (!s.last) return;
    if (tid == 0) a.counters[group] = 0;
    /* Warps share a row's shares where rows are fewer. */
    const int parts = rows >= WARPS ? 1 : rows == 1 ? WARPS : WARPS / (rows <= 2 ? 2 : rows <= 4 ? 4 : 8);
    for (int item = warp; item < rows * parts; item += WARPS) {
        const float *from = room + (item / parts) * 32 + lane;
        float sum[4] = {};
        int i = item % parts;
        for (; i + 7 * parts < shares; i += 8 * parts) {
            float v[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = lane < USED ? __ldcg(from + (i + k * parts) * SHARE) : 0.f;
#pragma unroll
            for (int k = 0; k < 8; ++k) sum[k & 3] += v[k];
        }
        for (; i < shares; i += parts) sum[0] += lane < USED ? __ldcg(from + i * SHARE) : 0.f;
        s.sums[item % WARPS][item / WARPS][lane] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    __syncthreads();
    for (int i = tid; i < 32 * rows; i += THREADS) {
        float sum = 0.f;
        for (int part = 0, item = (i >> 5) * parts; part < parts; ++part, ++item) sum += s.sums[item % WARPS][item / WARPS][lane];
        s.totals[i >> 5][lane] = sum;
    }
    __syncthreads();
    if (lane >= rows || warp > 1) return;
    const int row = group * ROWS + lane;
    const float *total = s.totals[lane];
    const float norm = rsqrtf(total[SQUARES] * (1.f / static_cast<float>(4 * a.hidden)) + a.rms_eps);
    if (warp == 1) {
        float pre[4], post[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pre[i] = sigmoid(total[i] * (norm * s.scale[0]) + s.base[i]) + a.pre_eps;
            post[i] = sigmoid(total[4 + i] * (norm * s.scale[1]) + s.base[4 + i]) * a.post_gain;
        }
        reinterpret_cast<float4 *>(a.pre_out)[row] = make_float4(pre[0], pre[1], pre[2], pre[3]);
        reinterpret_cast<float4 *>(a.post_out)[row] = make_float4(post[0], post[1], post[2], post[3]);
        return;
    }
    float m[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) m[i / 4][i % 4] = total[8 + i] * (norm * s.scale[2]) + s.base[8 + i];
    sinkhorn(m, a.sinkhorn_eps, a.iterations);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        reinterpret_cast<float4 *>(a.comb_out)[4 * row + i] = make_float4(m[i][0], m[i][1], m[i][2], m[i][3]);
}

/* Four columns of a row's new streams and of their collapse, and the squares of that. */
template <int WARPS>
__device__ __forceinline__ float one_step(Shared<WARPS> &s, const mhc_args &a, const Columns &old, const Coefficients &by,
                                          const float4 &pre, int token, int h) {
    uint2 now[4];
    renew(now, old, by, a.x != nullptr);
    auto *streams = static_cast<__nv_bfloat16 *>(a.streams_out) + static_cast<int64_t>(token) * 4 * a.hidden + h;
    if (a.x)
#pragma unroll
        for (int i = 0; i < 4; ++i) *reinterpret_cast<uint2 *>(streams + i * a.hidden) = now[i];
    if (a.mean_out) {
        float mean[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) mean[c] = (((of(now[0], c) + of(now[1], c)) + of(now[2], c)) + of(now[3], c)) * 0.25f;
        auto *to = static_cast<__nv_bfloat16 *>(a.mean_out) + static_cast<int64_t>(token) * a.hidden + h;
        *reinterpret_cast<uint2 *>(to) = {pack(mean[0], mean[1]), pack(mean[2], mean[3])};
    }
    if (a.pre) {
        float mixed[4];
#pragma unroll
        for (int c = 0; c < 4; ++c)
            mixed[c] = (pre.x * of(now[0], c) + pre.y * of(now[1], c)) + (pre.z * of(now[2], c) + pre.w * of(now[3], c));
        now[0] = {pack(mixed[0], mixed[1]), pack(mixed[2], mixed[3])};
    }
    s.kept[h / 4] = now[0];
    float squares = 0.f;
#pragma unroll
    for (int c = 0; c < 4; ++c) squares += of(now[0], c) * of(now[0], c);
    return squares;
}

template <int WARPS>
__device__ __forceinline__ void whole_row(Shared<WARPS> &s, const mhc_args &a, int token) {
    constexpr int THREADS = 32 * WARPS, AT_ONCE = 20 / WARPS; /* steps whose loads are under way together */
    const int tid = static_cast<int>(threadIdx.x);
    const Coefficients by = coefficients(a, token, true);
    const float4 pre = a.pre ? __ldg(reinterpret_cast<const float4 *>(a.pre) + token) : make_float4(1.f, 0.f, 0.f, 0.f);
    float squares = 0.f;
#pragma unroll 1
    for (int begin = 4 * tid; begin < a.hidden; begin += 4 * THREADS * AT_ONCE) {
        Columns old[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int h = begin + 4 * THREADS * i;
            old[i] = columns(a, token, h, h < a.hidden);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int h = begin + 4 * THREADS * i;
            if (h < a.hidden) squares += one_step(s, a, old[i], by, pre, token, h);
        }
    }
    float norm = 1.f;
    if (a.weight) {
#pragma unroll
        for (int by_lane = 16; by_lane > 0; by_lane /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, by_lane);
        if ((tid & 31) == 0) s.squares[tid >> 5] = squares;
        __syncthreads();
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += s.squares[w];
        norm = rsqrtf(sum / static_cast<float>(a.hidden) + a.norm_eps);
    }
#pragma unroll AT_ONCE
    for (int h = 4 * tid; h < a.hidden; h += 4 * THREADS) {
        uint2 value = s.kept[h / 4];
        if (a.weight) {
            const uint2 gain = load_four(static_cast<const __nv_bfloat16 *>(a.weight) + h);
            value = {pack(of(value, 0) * norm * of(gain, 0), of(value, 1) * norm * of(gain, 1)),
                     pack(of(value, 2) * norm * of(gain, 2), of(value, 3) * norm * of(gain, 3))};
        }
        *reinterpret_cast<uint2 *>(static_cast<__nv_bfloat16 *>(a.input_out) + static_cast<int64_t>(token) * a.hidden + h) = value;
    }
}

template <int WARPS>
__global__ void __launch_bounds__(32 * WARPS) one_launch(const __grid_constant__ mhc_args a, int shares, int projections) {
    __shared__ Shared<WARPS> s;
    const int cta = static_cast<int>(blockIdx.x);
    if (cta < projections)
        project(s, a, cta / shares, cta % shares, shares);
    else
        whole_row(s, a, cta - projections);
}

template <int WARPS>
cudaError_t launch(const mhc_args &a, cudaStream_t stream) {
    const int shares = a.hidden / TILE / WARPS, projections = (a.tokens + ROWS - 1) / ROWS * shares;
    one_launch<WARPS><<<projections + a.tokens, 32 * WARPS, 0, stream>>>(a, shares, projections);
    return cudaGetLastError();
}

} // namespace

cudaError_t launch_one(const mhc_args &args, cudaStream_t stream) {
    return args.warps == 4 ? launch<4>(args, stream) : args.warps == 8 ? launch<8>(args, stream) : launch<16>(args, stream);
}

} // namespace mhc
