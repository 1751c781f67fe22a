/* The C interface: checks and launches. */
#include "api.h"

#include <cstdarg>
#include <cstdio>

#include "launch.hpp"

namespace {

using namespace attention;

thread_local char message[512] = "";

int refuse(int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    return status;
}

int done(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return ATTENTION_OK;
    return refuse(ATTENTION_CUDA, "%s: %s", what, cudaGetErrorString(error));
}

bool aligned(const void *at, uintptr_t to) { return reinterpret_cast<uintptr_t>(at) % to == 0; }

bool starts_early() {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

int check(const attention_args &a) {
    if (a.tokens < 0 || a.heads < 1 || a.heads > 128)
        return refuse(ATTENTION_BAD_ARGUMENT, "%d tokens of %d heads; 1 to 128 heads", a.tokens, a.heads);
    if (a.keys != 32 && a.keys != 64) return refuse(ATTENTION_BAD_ARGUMENT, "tiles of %d keys; 32 or 64", a.keys);
    if ((a.many != 0 && a.many != 1) || (a.many && (a.keys != 64 || a.splits != 1)))
        return refuse(ATTENTION_BAD_ARGUMENT, "many %d with tiles of %d keys and %d splits; 0, or 1 with 64 and 1", a.many,
                      a.keys, a.splits);
    if (a.splits < 1 || a.splits > ATTENTION_MAX_SPLITS)
        return refuse(ATTENTION_BAD_ARGUMENT, "%d splits; 1 to %d", a.splits, ATTENTION_MAX_SPLITS);
    if (static_cast<int64_t>(a.tokens) * a.heads > 0x7fffffff)
        return refuse(ATTENTION_BAD_ARGUMENT, "%d tokens of %d heads are too many", a.tokens, a.heads);
    if (!a.q || !a.out || !a.sink || !aligned(a.q, 16) || !aligned(a.out, 16) || a.q_token % 8 || a.q_head % 8 ||
        a.out_token % 8 || a.out_head % 8)
        return refuse(ATTENTION_BAD_ARGUMENT, "q and out must lie at 16 bytes, rows at multiples of 8 values");
    if (a.splits > 1 && (!a.partial || !a.peaks || !aligned(a.partial, 16)))
        return refuse(ATTENTION_BAD_ARGUMENT, "%d splits need scratch", a.splits);
    if (a.cos_sin && !a.positions) return refuse(ATTENTION_BAD_ARGUMENT, "a rotation without positions");
    for (const attention_source &s : a.source) {
        if (s.width < 0) return refuse(ATTENTION_BAD_ARGUMENT, "a source of width %d", s.width);
        if (s.width == 0) continue;
        if (s.page < 1 || !s.cache || !s.slots) return refuse(ATTENTION_BAD_ARGUMENT, "pages of %d records", s.page);
        if (!aligned(s.cache, 16) || s.stride % 16)
            return refuse(ATTENTION_BAD_ARGUMENT, "pages %lld bytes apart; they must lie at 16 bytes",
                          static_cast<long long>(s.stride));
    }
    return ATTENTION_OK;
}

} // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int attention_abi(void) { return ATTENTION_ABI; }

EXPORT const char *attention_error(void) { return message; }

EXPORT int attention_shared(int keys, int heads, int many) {
    return many ? many_shared() : attend_shared(keys, heads > 16);
}

EXPORT int attention_sparse(const attention_args *args, void *stream) {
    const attention_args &a = *args;
    if (const int status = check(a)) return status;
    if (a.tokens == 0) return ATTENTION_OK;
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
    return a.splits > 1 ? done(launch_reduce(p, starts_early(), at), "its reduction") : ATTENTION_OK;
}

} // extern "C"
