/* The C interface: checks and launches. */
#include "api.h"

#include "../common/call.hpp"
#include "../common/launch.hpp"
#include "launch.hpp"

namespace {

using namespace attention;
using namespace call;

int check(const attention_args &a) {
    if (a.tokens < 0 || a.heads < 1 || a.heads > 128)
        return refuse("%d tokens of %d heads; 1 to 128 heads", a.tokens, a.heads);
    if (a.keys != 32 && a.keys != 64) return refuse("tiles of %d keys; 32 or 64", a.keys);
    if ((a.many != 0 && a.many != 1) || (a.many && (a.keys != 64 || a.splits != 1)))
        return refuse("many %d with tiles of %d keys and %d splits; 0, or 1 with 64 and 1", a.many,
                      a.keys, a.splits);
    if (a.splits < 1 || a.splits > ATTENTION_MAX_SPLITS)
        return refuse("%d splits; 1 to %d", a.splits, ATTENTION_MAX_SPLITS);
    if (static_cast<int64_t>(a.tokens) * a.heads > 0x7fffffff)
        return refuse("%d tokens of %d heads are too many", a.tokens, a.heads);
    if (!a.q || !a.out || !a.sink || !aligned(a.q, 16) || !aligned(a.out, 16) || a.q_token % 8 || a.q_head % 8 ||
        a.out_token % 8 || a.out_head % 8)
        return refuse("q and out must lie at 16 bytes, rows at multiples of 8 values");
    if (a.splits > 1 && (!a.partial || !a.peaks || !aligned(a.partial, 16)))
        return refuse("%d splits need scratch", a.splits);
    if (a.cos_sin && !a.positions) return refuse("a rotation without positions");
    for (const attention_source &s : a.source) {
        if (s.width < 0) return refuse("a source of width %d", s.width);
        if (s.width == 0) continue;
        if (s.page < 1 || !s.cache || !s.slots) return refuse("pages of %d records", s.page);
        if (!aligned(s.cache, 16) || s.stride % 16)
            return refuse("pages %lld bytes apart; they must lie at 16 bytes",
                          static_cast<long long>(s.stride));
    }
    return CALL_OK;
}

} // namespace

extern "C" {

int attention_abi(void) { return ATTENTION_ABI; }

const char *attention_error(void) { return message; }

int attention_shared(int keys, int heads, int many) {
    return many ? many_shared() : attend_shared(keys, heads > 16);
}

int attention_sparse(const attention_args *args, void *stream) {
    const attention_args &a = *args;
    if (const int status = check(a)) return status;
    if (a.tokens == 0) return CALL_OK;
    Launch p{};
    p.q = static_cast<const __nv_bfloat16 *>(a.q);
    p.q_token = a.q_token, p.q_head = a.q_head;
    p.out = static_cast<__nv_bfloat16 *>(a.out);
    p.out_token = a.out_token, p.out_head = a.out_head;
    p.sink = a.sink, p.partial = a.partial, p.peaks = a.peaks;
    p.cos_sin = a.cos_sin, p.cos_sin_row = a.cos_sin_row, p.positions = a.positions;
    for (int i = 0; i < 2; ++i) {
        const attention_source &s = a.source[i];
        const bool power = s.page > 0 && (s.page & (s.page - 1)) == 0;
        p.source[i] = {static_cast<const uint8_t *>(s.cache), s.stride, s.slots, s.slots_row, s.lengths, s.page, s.width,
                       power ? __builtin_ctz(static_cast<unsigned>(s.page)) : -1};
    }
    p.tokens = a.tokens, p.heads = a.heads;
    p.cos_sin_float = a.cos_sin_float, p.positions_wide = a.positions_wide;
    p.splits = a.splits;
    p.scale = a.scale * 1.4426950408889634f;
    const auto at = static_cast<cudaStream_t>(stream);
    if (a.many) return done(launch_many(p, at), "sparse attention of many tokens");
    if (const int status = done(launch_attend(p, a.keys, a.heads > 16, at), "sparse attention")) return status;
    return a.splits > 1 ? done(launch_reduce(p, starts_early(), at), "its reduction") : CALL_OK;
}

} // extern "C"
