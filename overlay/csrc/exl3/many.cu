/* The interface for many rows: checks, waves and strips, scratch. */
#include "many.h"

#include "grouped.cuh"
#include "launch.hpp"
#include "many.hpp"
#include "sizes.hpp"

namespace {

using namespace exl3;
using namespace call;

/* Where everything lies in the scratch, and how often each launch runs. */
struct Plan {
    int64_t slots, rows, groups, items, wave, strip; /* strip: chunks */
    int64_t at_sums, at_act, at_act_sums, at_items, at_entry, at_slot, at_head, bytes;
    int waves, strips, per_wave; /* items of one wave, at most */
};

int plan_of(const exl3_prefill_args &a, Plan &plan) {
    if (a.tokens < 0 || a.topk < 1 || static_cast<int64_t>(a.tokens) * (a.topk + 1) > 1 << 24)
        return refuse("%d tokens of %d experts; at most 2^24 rows", a.tokens, a.topk);
    if (a.experts < 1 || a.experts >= MAX_ENTRIES || (a.shared != 0 && a.shared != 1))
        return refuse("%d experts, shared %d; 1 to %d, and 0 or 1", a.experts, a.shared, MAX_ENTRIES - 1);
    if (a.hidden < 128 || a.hidden % 128 || a.inter < 128 || a.inter % 128)
        return refuse("hidden %d, inter %d; multiples of 128", a.hidden, a.inter);
    if (a.max_k2 < 2 || a.max_k2 > 16) return refuse("max_k2 %d; 2 to 16", a.max_k2);
    if (a.id_bytes != 8 && a.id_bytes != 4) return refuse("id_bytes %d; 8 or 4", a.id_bytes);
    if (a.y_dtype != EXL3_BF16 && a.y_dtype != EXL3_FP32)
        return refuse("y_dtype %d; 0 (bf16) or 1 (fp32)", a.y_dtype);
    const Variant variant = grouped_variant(a.variant, a.max_k2, false);
    if (variant.most == 0) return refuse("variant %d; 0 to 2", a.variant);
    if (variant.shared > MOST_GROUPED)
        return refuse("variant %d at k2 %d needs %d bytes of shared memory; %d at most", a.variant,
                      a.max_k2, variant.shared, MOST_GROUPED);
    plan = Plan{};
    plan.slots = static_cast<int64_t>(a.tokens) * a.topk;
    plan.rows = plan.slots + (a.shared ? a.tokens : 0);
    const int64_t present = plan.slots < a.experts ? plan.slots : a.experts;
    plan.groups = (plan.slots + 7 * present) / 8 + (a.shared ? ceil_div<int64_t>(a.tokens, 8) : 0);
    const int64_t hidden = a.hidden / 128, inter = a.inter / 128;
    const int64_t each = 2 * hidden * 2048 + 2 * 8 * 4, spare = 2 * SPARE_GROUPS * hidden * 2048;
    const int64_t room = (a.pool_bytes - spare - 512) / each;
    plan.strip = a.pool_bytes / (plan.rows * 512 + 1);
    if (room < 1 || plan.strip < 1)
        return refuse("a pool of %lld bytes; %d tokens need %lld at least", static_cast<long long>(a.pool_bytes),
                      a.tokens, static_cast<long long>(spare + each + 512 > plan.rows * 512 + 1 ? spare + each + 512 : plan.rows * 512 + 1));
    const int64_t waves = ceil_div(plan.groups, room);
    if (waves > MAX_WAVES)
        return refuse("a pool of %lld bytes makes %lld waves; %d at most", static_cast<long long>(a.pool_bytes),
                      static_cast<long long>(waves), MAX_WAVES);
    plan.waves = static_cast<int>(waves);
    plan.wave = ceil_div(plan.groups, waves);
    const int64_t strips = ceil_div(hidden, plan.strip);
    plan.strip = ceil_div(hidden, strips);
    if (plan.strip % 2 && strips > 1 && (plan.strip + 1) * plan.rows * 512 <= a.pool_bytes) ++plan.strip;
    plan.strips = static_cast<int>(ceil_div(hidden, plan.strip));
    /* An entry's groups in a wave make ceil(groups / most) items. */
    plan.items = plan.groups / variant.most + present + a.shared + plan.waves;
    const int64_t most = plan.wave / variant.most + present + a.shared + 1;
    plan.per_wave = static_cast<int>(most < plan.wave ? most : plan.wave);
    if (plan.items > plan.groups) plan.items = plan.groups;
    if (plan.items > 65535 || plan.wave > 65535)
        return refuse("%lld items of %lld groups a wave; 65535 at most: a smaller pool or fewer tokens",
                      static_cast<long long>(plan.items), static_cast<long long>(plan.wave));
    const int64_t inputs = round_up(2 * (plan.wave + SPARE_GROUPS) * hidden * 2048);
    const int64_t pool_in = inputs + round_up(2 * plan.wave * 8 * 4);
    const int64_t pool_out = round_up(plan.rows * plan.strip * 512);
    int64_t at = pool_in > pool_out ? pool_in : pool_out;
    const auto place = [&](int64_t bytes) {
        const int64_t here = at;
        at += round_up(bytes);
        return here;
    };
    plan.at_sums = inputs;
    plan.at_act = place((plan.groups + SPARE_GROUPS) * inter * 2048);
    plan.at_act_sums = place(plan.groups * 8 * inter * 4);
    plan.at_items = place(plan.items * 16);
    plan.at_entry = place(plan.groups * 4);
    plan.at_slot = place(plan.groups * 32);
    plan.at_head = place(sizeof(RouteHead));
    plan.bytes = at;
    return CALL_OK;
}

} // namespace

extern "C" {

int exl3_rotate(const void *x, int64_t x_stride, const void *suh, int32_t rows, int32_t in, void *rotated, void *stream) {
    if (rows < 0 || in < 128 || in % 128)
        return refuse("[%d, %d]; the second must be a multiple of 128", rows, in);
    if (rows == 0) return CALL_OK;
    if (!x || !suh || !rotated || !aligned(x, 8) || !aligned(suh, 8) || !aligned(rotated, 16) || x_stride % 4)
        return refuse("x %p (stride %lld), suh %p, rotated %p; x and suh 8-byte aligned, rotated 16, strides multiples of 4",
                      x, static_cast<long long>(x_stride), suh, rotated);
    return done(launch_rotate(x, x_stride, suh, rows, in / 128, rotated, static_cast<cudaStream_t>(stream)), "exl3_rotate");
}

int exl3_reconstruct(const exl3_weights *parts, int32_t count, void *stream) {
    ReconstructLaunch p = {};
    if (count < 0) return refuse("%d matrices; 0 or more", count);
    for (int i = 0; i < count; ++i) {
        const exl3_weights &w = parts[i];
        if (w.in < 128 || w.in % 128 || w.out < 128 || w.out % 128 || w.first < 0 || w.first % 128 || w.columns < 128 ||
            w.columns % 128 || w.first > w.out - w.columns || static_cast<int64_t>(w.in) * w.out > int64_t{1} << 36)
            return refuse("matrix %d: [%d, %d], columns %d of %d on; all must be multiples of 128", i, w.in,
                          w.out, w.columns, w.first);
        if (!legal_rate(w.k2, w.codebook))
            return refuse("matrix %d: k2 %d with codebook %d is no EXL3 rate", i, w.k2, w.codebook);
        if (!w.trellis || !w.weights || !aligned(w.trellis, 16) || !aligned(w.weights, 16))
            return refuse("matrix %d: trellis %p, weights %p; both must be 16-byte aligned", i, w.trellis, w.weights);
    }
    for (int i = 0; i < count; ++i) {
        const exl3_weights &w = parts[i];
        p.k2 = w.k2;
        p.codebook = w.codebook;
        p.of[p.count++] = Decoded{static_cast<const char *>(w.trellis) + static_cast<int64_t>(w.first / 16) * 16 * w.k2,
                                  static_cast<uint4 *>(w.weights), w.out / 16, w.in / 128, w.columns / 128, 0};
        if (i + 1 < count && p.count < MOST_DECODED && parts[i + 1].k2 == w.k2 && parts[i + 1].codebook == w.codebook) continue;
        if (const int status = done(launch_reconstruct(p, starts_early(), static_cast<cudaStream_t>(stream)), "exl3_reconstruct")) return status;
        p.count = 0;
    }
    return CALL_OK;
}

int exl3_finish(const void *sums, const void *svh, int32_t rows, int32_t columns, void *y, int64_t y_stride,
                int32_t y_dtype, void *stream) {
    if (rows < 0 || columns < 128 || columns % 128 || (y_dtype != EXL3_BF16 && y_dtype != EXL3_FP32))
        return refuse("[%d, %d], dtype %d; the second a multiple of 128, 0 (bf16) or 1 (fp32)", rows, columns, y_dtype);
    if (rows == 0) return CALL_OK;
    if (!sums || !svh || !y || !aligned(sums, 16) || !aligned(svh, 8) || !aligned(y, y_dtype == EXL3_FP32 ? 16 : 8) || y_stride % 4)
        return refuse("sums %p, svh %p, y %p (stride %lld); sums and fp32 y 16-byte aligned, the others 8, strides multiples of 4",
                      sums, svh, y, static_cast<long long>(y_stride));
    return done(launch_finish(sums, svh, rows, columns / 128, y, y_stride, y_dtype == EXL3_FP32, static_cast<cudaStream_t>(stream)),
                "exl3_finish");
}

int exl3_prefill_need(const exl3_prefill_args *args, int64_t *scratch_bytes, int32_t *waves, int32_t *strips) {
    Plan plan = {};
    if (args->tokens) {
        if (const int status = plan_of(*args, plan)) return status;
    }
    *scratch_bytes = plan.bytes;
    *waves = plan.waves;
    *strips = plan.strips;
    return CALL_OK;
}

int exl3_prefill(const exl3_prefill_args *args, void *scratch, int64_t scratch_bytes, void *stream) {
    const exl3_prefill_args &a = *args;
    if (a.tokens == 0) return CALL_OK;
    Plan plan;
    if (const int status = plan_of(a, plan)) return status;
    if (scratch_bytes < plan.bytes)
        return refuse("%lld bytes of scratch; needed %lld", static_cast<long long>(scratch_bytes),
                      static_cast<long long>(plan.bytes));
    if (!a.x || !a.ids || !a.weights || !a.table || !a.y || !scratch || !aligned(a.x, 8) || !aligned(a.table, 16) ||
        !aligned(scratch, 256) || !aligned(a.y, a.y_dtype == EXL3_FP32 ? 16 : 8) || a.x_stride % 4 || a.y_stride % 4)
        return refuse("x %p (stride %lld), ids %p, weights %p, table %p, y %p (stride %lld), scratch %p; none may be NULL, table "
                      "and fp32 y are 16-byte aligned, scratch 256, x and y 8, strides multiples of 4",
                      a.x, static_cast<long long>(a.x_stride), a.ids, static_cast<const void *>(a.weights),
                      static_cast<const void *>(a.table), a.y, static_cast<long long>(a.y_stride), scratch);
    char *const base = static_cast<char *>(scratch);
    const auto on = static_cast<cudaStream_t>(stream);
    const int hidden = a.hidden / 128, inter = a.inter / 128;

    RouteLaunch r = {};
    r.x = static_cast<const __nv_bfloat16 *>(a.x);
    r.x_stride = a.x_stride;
    r.ids = a.ids;
    r.table = a.table;
    r.y = a.y;
    r.y_stride = a.y_stride;
    r.head = reinterpret_cast<RouteHead *>(base + plan.at_head);
    r.items = reinterpret_cast<int4 *>(base + plan.at_items);
    r.entry_of = reinterpret_cast<int32_t *>(base + plan.at_entry);
    r.slot_of = reinterpret_cast<int32_t *>(base + plan.at_slot);
    r.inputs = reinterpret_cast<uint2 *>(base);
    r.sums = reinterpret_cast<float *>(base + plan.at_sums);
    r.id_bytes = a.id_bytes;
    r.tokens = a.tokens;
    r.topk = a.topk;
    r.slots = static_cast<int32_t>(plan.slots);
    r.experts = a.experts;
    r.first_id = a.first_id;
    r.shared = a.shared;
    r.fp32 = a.y_dtype == EXL3_FP32;
    r.blocks = hidden;
    r.wave = static_cast<int32_t>(plan.wave);
    r.waves = plan.waves;
    r.most = grouped_variant(a.variant, a.max_k2, false).most;
    if (const int status = done(launch_route(r, on), "exl3_prefill, routing")) return status;

    GroupedLaunch g = {};
    g.table = a.table;
    g.head = r.head;
    g.items = r.items;
    g.slot_of = r.slot_of;
    g.weights = a.weights;
    g.act = base + plan.at_act;
    g.act_sums = reinterpret_cast<float *>(base + plan.at_act_sums);
    g.entries = a.experts + a.shared;
    g.slots = r.slots;
    g.limit = a.limit;
    g.inputs = base;
    g.input_side = (plan.wave + SPARE_GROUPS) * hidden * 2048;
    g.sums = r.sums;
    g.sum_side = plan.wave * 8;
    g.sum_count = 1;
    g.in_blocks = hidden;
    g.out_chunks = inter;
    for (int wave = 0; wave < plan.waves; ++wave) {
        const int first = wave * r.wave;
        const int here = static_cast<int>(plan.groups - first < plan.wave ? plan.groups - first : plan.wave);
        if (here <= 0) break;
        if (const int status = done(launch_gather(r, first, here, on), "exl3_prefill, inputs")) return status;
        g.first_group = first;
        g.first_item = wave;
        g.end_item = wave + 1;
        if (const int status = done(launch_grouped(g, false, a.variant, plan.per_wave, a.max_k2, on), "exl3_prefill, gate and up"))
            return status;
    }
    g.inputs = g.act;
    g.sums = g.act_sums;
    g.input_side = g.sum_side = 0;
    g.sum_count = inter;
    g.in_blocks = inter;
    g.out_chunks = hidden;
    g.out = reinterpret_cast<float *>(base);
    g.first_group = g.first_item = 0;
    g.end_item = MAX_WAVES + 3;
    for (int strip = 0; strip < plan.strips; ++strip) {
        g.chunk = strip * static_cast<int>(plan.strip);
        g.chunks = hidden - g.chunk < plan.strip ? hidden - g.chunk : static_cast<int>(plan.strip);
        if (const int status = done(launch_grouped(g, true, a.variant, static_cast<int>(plan.items), a.max_k2, on), "exl3_prefill, down"))
            return status;
        if (const int status = done(launch_combine(r, g.out, g.chunk, g.chunks, on), "exl3_prefill, sum")) return status;
    }
    return CALL_OK;
}

} // extern "C"
