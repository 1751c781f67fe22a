/* The C interface: checks, launch geometry, scratch. */
#include "api.h"

#include <cstdlib>

#include "dense.cuh"
#include "experts.cuh"
#include "launch.hpp"
#include "sizes.hpp"

namespace exl3 {

bool legal_rate(int k2, int codebook) {
    if (codebook < EXL3_MUL1 || codebook > EXL3_3INST) return false;
    if (k2 % 2) return codebook == EXL3_MUL1 && (k2 == 3 || k2 == 5 || k2 == 7);
    return k2 >= 2 && k2 <= 16;
}

} // namespace exl3

namespace {

using namespace exl3;
using namespace call;

/* A warp's ring, for any rate up to k2. */
int ring_of(int k2) {
    int most = 0;
    for (int rate = 2; rate <= k2; ++rate) most = most > ring_bytes(rate) ? most : ring_bytes(rate);
    return most;
}

/* Dynamic shared memory: rings and operands, later the warps' sums in the same place. */
int shared_bytes(int warps, int ring, int inputs) {
    const int streaming = warps * ring + inputs;
    const int summing = warps * RED_WARP * static_cast<int>(sizeof(float));
    return streaming > summing ? streaming : summing;
}

Stand stand_of(int warps, int chunks) {
    const auto inverse = [](int n) { return static_cast<uint32_t>((65536 + n - 1) / n); };
    return Stand{chunks, warps / chunks, inverse(chunks), inverse(warps / chunks)};
}

/* All groups', and the last one's, which may have fewer chunks. */
void stand_both(Stand (&stand)[2], int warps, int chunks, int width) {
    stand[0] = stand_of(warps, chunks);
    stand[1] = stand_of(warps, (width - 1) % chunks + 1);
}

/* Eight rows of B's inputs in shared memory, padded. */
int act_bytes(int blocks) { return 8 * (blocks * 256 + 32); }

struct Need {
    int64_t scratch, counters;
    int shared, ring, nb, passes, ctas;
};

int group_need(const exl3_shard *shards, int count, int rows, int warps, Need &need) {
    if (count < 1 || count > EXL3_MAX_SHARDS)
        return refuse("%d shards; 1 to %d", count, EXL3_MAX_SHARDS);
    if (rows < 0 || rows > EXL3_MAX_ROWS)
        return refuse("%d rows; 0 to %d", rows, EXL3_MAX_ROWS);
    if (warps < 1 || warps > EXL3_MAX_WARPS)
        return refuse("%d warps; 1 to %d", warps, EXL3_MAX_WARPS);
    need = Need{};
    need.nb = rows <= 8 ? 1 : 2;
    need.passes = ceil_div(rows, 8 * need.nb);
    int rate = 2, blocks = 1;
    int64_t ctas = 0;
    for (int i = 0; i < count; ++i) {
        const exl3_shard &s = shards[i];
        if (s.in < 128 || s.in % 128 || s.out < 128 || s.out % 128)
            return refuse("shard %d: [%d, %d]; both must be multiples of 128", i, s.in, s.out);
        if (!legal_rate(s.k2, s.codebook))
            return refuse("shard %d: k2 %d with codebook %d is no EXL3 rate", i, s.k2, s.codebook);
        if (s.chunks < 1 || s.chunks > warps || s.kblocks < 1 || s.kblocks > 16)
            return refuse("shard %d: plan of %d chunks, %d k-blocks; 1 to %d warps, 1 to 16",
                          i, s.chunks, s.kblocks, warps);
        if (s.y_dtype != EXL3_BF16 && s.y_dtype != EXL3_FP32)
            return refuse("shard %d: y_dtype %d; 0 (bf16) or 1 (fp32)", i, s.y_dtype);
        const int splits = ceil_div(s.in / 128, s.kblocks), groups = ceil_div(s.out / 128, s.chunks);
        if (splits > 1)
            need.scratch += static_cast<int64_t>(need.passes) * (s.out / 128) * splits * 8 * need.nb * 512;
        need.counters += static_cast<int64_t>(need.passes) * groups;
        ctas += static_cast<int64_t>(splits) * groups;
        rate = rate > s.k2 ? rate : s.k2;
        const int most = s.kblocks < s.in / 128 ? s.kblocks : s.in / 128;
        blocks = blocks > most ? blocks : most;
    }
    if (ctas > 0x7fffffff) return refuse("too many CTAs");
    need.ctas = static_cast<int>(ctas);
    need.ring = ring_of(rate);
    need.shared = shared_bytes(warps, need.ring, blocks * block_bytes(need.nb));
    if (need.shared > MOST_SHARED)
        return refuse("%d warps, k2 %d and %d k-blocks need %d bytes of shared memory; %d at most",
                      warps, rate, blocks, need.shared, MOST_SHARED);
    return CALL_OK;
}

struct ExpertsNeed {
    int64_t partial, act, out, counters_a, counters_b;
    int splits_a, splits_b, groups_a, groups_b, ring, shared_a, shared_b;
};

int experts_need(const exl3_experts_args &a, ExpertsNeed &need) {
    if (a.tokens < 0 || a.topk < 1 || static_cast<int64_t>(a.tokens) * a.topk > EXL3_MAX_SLOTS)
        return refuse("%d tokens of %d experts; at most %d slots", a.tokens, a.topk, EXL3_MAX_SLOTS);
    if (a.experts < 1 || (a.shared != 0 && a.shared != 1))
        return refuse("%d experts, shared %d; at least 1, and 0 or 1", a.experts, a.shared);
    if (a.hidden < 128 || a.hidden % 128 || a.inter < 128 || a.inter % 128 || a.inter > 4096)
        return refuse("hidden %d, inter %d; multiples of 128, inter at most 4096", a.hidden, a.inter);
    if (a.max_k2 < 2 || a.max_k2 > 16)
        return refuse("max_k2 %d; 2 to 16", a.max_k2);
    if (a.id_bytes != 8 && a.id_bytes != 4)
        return refuse("id_bytes %d; 8 or 4", a.id_bytes);
    if (a.y_dtype != EXL3_BF16 && a.y_dtype != EXL3_FP32)
        return refuse("y_dtype %d; 0 (bf16) or 1 (fp32)", a.y_dtype);
    if (a.a_warps < 1 || a.a_warps > EXL3_MAX_WARPS || a.b_warps < 1 || a.b_warps > EXL3_MAX_WARPS ||
        a.a_chunks < 1 || a.a_chunks > a.a_warps || a.b_chunks < 1 || a.b_chunks > a.b_warps ||
        a.a_kblocks < 1 || a.a_kblocks > 16 || a.b_kblocks < 1 || a.b_kblocks > 32)
        return refuse("plan of %d and %d warps, %d and %d chunks, %d and %d k-blocks; 1 to %d warps, 1 to warps, 1 to 16 "
                      "and 1 to 32",
                      a.a_warps, a.b_warps, a.a_chunks, a.b_chunks, a.a_kblocks, a.b_kblocks, EXL3_MAX_WARPS);
    need = ExpertsNeed{};
    const int slots = a.tokens * a.topk;
    const int64_t rows = slots + (a.shared ? a.tokens : 0);
    const int hidden = a.hidden / 128, inter = a.inter / 128;
    need.splits_a = ceil_div(hidden, a.a_kblocks);
    need.splits_b = ceil_div(inter, a.b_kblocks);
    need.groups_a = ceil_div(inter, a.a_chunks);
    need.groups_b = ceil_div(hidden, a.b_chunks);
    need.partial = round_up(rows * 2 * need.splits_a * a.inter * 4);
    need.act = round_up(rows * a.inter * 2);
    need.out = round_up(rows * need.splits_b * a.hidden * 4);
    need.counters_a = static_cast<int64_t>(slots + a.shared) * need.groups_a;
    need.counters_b = need.groups_b;
    need.ring = ring_of(a.max_k2);
    const auto least = [](int x, int y) { return x < y ? x : y; };
    need.shared_a = shared_bytes(a.a_warps, need.ring, least(a.a_kblocks, hidden) * block_bytes(1));
    need.shared_b = shared_bytes(a.b_warps, need.ring, act_bytes(least(a.b_kblocks, inter)));
    if (need.shared_a <= MOST_SHARED && need.shared_b <= MOST_SHARED) return CALL_OK;
    return refuse("max_k2 %d, %d and %d warps, %d and %d k-blocks need %d and %d bytes of shared memory; %d at most",
                  a.max_k2, a.a_warps, a.b_warps, a.a_kblocks, a.b_kblocks, need.shared_a, need.shared_b, MOST_SHARED);
}

} // namespace

extern "C" {

int exl3_abi(void) { return EXL3_ABI; }

const char *exl3_error(void) { return message; }

int exl3_decode(const void *trellis, int32_t in, int32_t out, int32_t k2, int32_t codebook, void *weights,
                void *stream) {
    if (in < 16 || in % 16 || out < 16 || out % 16)
        return refuse("[%d, %d]; both must be multiples of 16", in, out);
    if (!legal_rate(k2, codebook))
        return refuse("k2 %d with codebook %d is no EXL3 rate", k2, codebook);
    if (!aligned(trellis, 16) || !aligned(weights, 4))
        return refuse("trellis must be 16-byte aligned and weights 4-byte aligned");
    return done(launch_decode(trellis, in, out, k2, codebook, weights, static_cast<cudaStream_t>(stream)), "exl3_decode");
}

int exl3_group_need(const exl3_shard *shards, int32_t count, int32_t rows, int32_t warps,
                    int64_t *scratch_bytes, int64_t *counters) {
    Need need = {};
    if (const int status = group_need(shards, count, rows, warps, need)) return status;
    *scratch_bytes = need.scratch;
    *counters = need.counters;
    return CALL_OK;
}

int exl3_group(const exl3_shard *shards, int32_t count, int32_t rows, int32_t warps, void *scratch,
               int64_t scratch_bytes, int32_t *counters, int64_t counter_count, void *stream) {
    Need need = {};
    if (const int status = group_need(shards, count, rows, warps, need)) return status;
    if (rows == 0) return CALL_OK;
    if (scratch_bytes < need.scratch || counter_count < need.counters)
        return refuse("%lld bytes of scratch and %lld counters; needed %lld and %lld",
                      static_cast<long long>(scratch_bytes), static_cast<long long>(counter_count),
                      static_cast<long long>(need.scratch), static_cast<long long>(need.counters));
    if (need.scratch && !aligned(scratch, 16)) return refuse("scratch must be 16-byte aligned");
    DenseLaunch p = {};
    p.scratch = static_cast<float *>(scratch);
    p.counters = counters;
    p.count = count;
    p.rows = rows;
    p.passes = need.passes;
    p.warps = warps;
    p.ring_words = need.ring / 4;
    int64_t partial = 0;
    int counter = 0, first = 0;
    for (int i = 0; i < count; ++i) {
        const exl3_shard &s = shards[i];
        if (!s.x || !s.trellis || !s.suh || !s.svh || !s.y || !aligned(s.x, 8) || !aligned(s.trellis, 16) ||
            !aligned(s.suh, 8) || !aligned(s.svh, 8) || !aligned(s.bias, 8) ||
            !aligned(s.y, s.y_dtype == EXL3_FP32 ? 16 : 8) || s.x_stride % 4 || s.y_stride % 4)
            return refuse("shard %d: x %p (stride %lld), trellis %p, suh %p, svh %p, bias %p, y %p (stride %lld); none but "
                          "bias may be NULL, trellis and fp32 y are 16-byte aligned, the others 8, strides multiples of 4",
                          i, s.x, static_cast<long long>(s.x_stride), s.trellis, s.suh, s.svh, s.bias, s.y,
                          static_cast<long long>(s.y_stride));
        DenseShard &d = p.shard[i];
        d.x = static_cast<const __nv_bfloat16 *>(s.x);
        d.trellis = static_cast<const char *>(s.trellis);
        d.suh = static_cast<const __half *>(s.suh);
        d.svh = static_cast<const __half *>(s.svh);
        d.bias = static_cast<const __half *>(s.bias);
        d.y = s.y;
        d.x_stride = s.x_stride;
        d.y_stride = s.y_stride;
        d.blocks = s.in / 128;
        d.width = s.out / 128;
        d.chunks = s.chunks;
        d.groups = ceil_div(d.width, s.chunks);
        d.kblocks = s.kblocks;
        d.splits = ceil_div(d.blocks, s.kblocks);
        stand_both(d.stand, warps, s.chunks, d.width);
        d.partial = partial;
        d.counter = counter;
        d.first = first;
        d.k2 = static_cast<int16_t>(s.k2);
        d.codebook = static_cast<int8_t>(s.codebook);
        d.fp32 = s.y_dtype == EXL3_FP32;
        if (d.splits > 1) partial += static_cast<int64_t>(need.passes) * d.width * d.splits * 8 * need.nb * 128;
        counter += need.passes * d.groups;
        first += d.groups * d.splits;
    }
    const auto on = static_cast<cudaStream_t>(stream);
    return done(launch_dense(p, need.nb, need.ctas, need.shared, starts_early(), on), "exl3_group");
}

int exl3_experts_need(const exl3_experts_args *args, int64_t *scratch_bytes, int64_t *counters) {
    ExpertsNeed need = {};
    if (const int status = experts_need(*args, need)) return status;
    *scratch_bytes = need.partial + need.act + need.out;
    *counters = need.counters_a + need.counters_b;
    return CALL_OK;
}

int exl3_experts(const exl3_experts_args *args, void *scratch, int64_t scratch_bytes, int32_t *counters,
                 int64_t counter_count, void *stream) {
    const exl3_experts_args &a = *args;
    ExpertsNeed need = {};
    if (const int status = experts_need(a, need)) return status;
    if (a.tokens == 0) return CALL_OK;
    const int64_t bytes = need.partial + need.act + need.out, counts = need.counters_a + need.counters_b;
    if (scratch_bytes < bytes || counter_count < counts)
        return refuse("%lld bytes of scratch and %lld counters; needed %lld and %lld",
                      static_cast<long long>(scratch_bytes), static_cast<long long>(counter_count),
                      static_cast<long long>(bytes), static_cast<long long>(counts));
    if (!a.x || !a.ids || !a.weights || !a.table || !a.y || !scratch || !counters || !aligned(a.x, 8) ||
        !aligned(a.table, 16) || !aligned(scratch, 16) || !aligned(a.y, a.y_dtype == EXL3_FP32 ? 16 : 8) ||
        a.x_stride % 4 || a.y_stride % 4)
        return refuse("x %p (stride %lld), ids %p, weights %p, table %p, y %p (stride %lld), scratch %p, counters %p; none "
                      "may be NULL, table, scratch and fp32 y are 16-byte aligned, x and y 8, strides multiples of 4",
                      a.x, static_cast<long long>(a.x_stride), a.ids, static_cast<const void *>(a.weights),
                      static_cast<const void *>(a.table), a.y, static_cast<long long>(a.y_stride), scratch,
                      static_cast<void *>(counters));
    ExpertsLaunch p = {};
    p.x = static_cast<const __nv_bfloat16 *>(a.x);
    p.ids = a.ids;
    p.weights = a.weights;
    p.table = a.table;
    p.y = a.y;
    p.partial = static_cast<float *>(scratch);
    p.act = reinterpret_cast<__half *>(static_cast<char *>(scratch) + need.partial);
    p.out = reinterpret_cast<float *>(static_cast<char *>(scratch) + need.partial + need.act);
    p.counters_a = counters;
    p.counters_b = counters + need.counters_a;
    p.x_stride = a.x_stride;
    p.y_stride = a.y_stride;
    p.id_bytes = a.id_bytes;
    p.tokens = a.tokens;
    p.topk = a.topk;
    p.slots = a.tokens * a.topk;
    p.experts = a.experts;
    p.first_id = a.first_id;
    p.shared = a.shared;
    p.fp32 = a.y_dtype == EXL3_FP32;
    p.hidden_blocks = a.hidden / 128;
    p.inter_blocks = a.inter / 128;
    p.limit = a.limit;
    p.ring_words = need.ring / 4;
    p.warps = a.a_warps;
    p.chunks = a.a_chunks;
    p.groups = need.groups_a;
    p.kblocks = a.a_kblocks;
    p.splits = need.splits_a;
    p.by_topk = static_cast<uint32_t>((65536 + a.topk - 1) / a.topk);
    stand_both(p.stand, a.a_warps, a.a_chunks, p.inter_blocks);
    const auto on = static_cast<cudaStream_t>(stream);
    const bool early = starts_early();
    if (const int status = done(launch_experts_a(p, need.shared_a, early, on), "exl3_experts, gate and up"))
        return status;
    p.warps = a.b_warps;
    p.chunks = a.b_chunks;
    p.groups = need.groups_b;
    p.kblocks = a.b_kblocks;
    p.splits = need.splits_b;
    p.by_splits = static_cast<uint32_t>((65536 + p.splits - 1) / p.splits);
    stand_both(p.stand, a.b_warps, a.b_chunks, p.hidden_blocks);
    return done(launch_experts_b(p, need.shared_b, early, on), "exl3_experts, down");
}

} // extern "C"
