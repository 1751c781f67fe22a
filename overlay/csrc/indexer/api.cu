/* The C interface: checks and launches. */
#include "api.h"

#include <cstdarg>
#include <cstdio>

#include "launch.hpp"

namespace {

using namespace indexer;

thread_local char message[512] = "";

int refuse(int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    return status;
}

int done(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return INDEXER_OK;
    return refuse(INDEXER_CUDA, "%s: %s", what, cudaGetErrorString(error));
}

bool aligned(const void *at, uintptr_t to) { return at && reinterpret_cast<uintptr_t>(at) % to == 0; }

bool starts_early() {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

int check(const indexer_step &s) {
    if (!s.request || !s.starts || !s.lengths) return refuse(INDEXER_BAD_ARGUMENT, "a step without its rows");
    if (s.requests < 1 || s.first_row < 0 || s.rows <= s.first_row || s.width < 1 || s.ratio < 1)
        return refuse(INDEXER_BAD_ARGUMENT, "%d requests, rows %d to %d, width %d, ratio %d", s.requests, s.first_row, s.rows,
                      s.width, s.ratio);
    return INDEXER_OK;
}

int check(const indexer_scores_args &a) {
    if (!aligned(a.q, 16) || !aligned(a.cache, 16) || a.stride % 16 || !a.weights || !a.table || !a.out || !a.tops)
        return refuse(INDEXER_BAD_ARGUMENT, "queries and pages must lie at 16 bytes, pages are %lld apart",
                      static_cast<long long>(a.stride));
    if (a.states < 32 || (a.states & (a.states - 1)))
        return refuse(INDEXER_BAD_ARGUMENT, "pages of %d keys; a power of two, 32 at least", a.states);
    if (a.fan != 8 && a.fan != 16) return refuse(INDEXER_BAD_ARGUMENT, "the best of %d; 8 or 16", a.fan);
    if (a.parts < 1 || a.splits < 1 || a.splits > 65535)
        return refuse(INDEXER_BAD_ARGUMENT, "%d parts, %d splits", a.parts, a.splits);
    return INDEXER_OK;
}

int check(const indexer_choose_args &a) {
    const bool positions = a.kind == INDEXER_POSITIONS;
    if (a.kind < INDEXER_POSITIONS || a.kind > INDEXER_CANDIDATES)
        return refuse(INDEXER_BAD_ARGUMENT, "kind %d", a.kind);
    if (!aligned(a.values, 16) || a.values_row % 4 || (positions && (!aligned(a.tops, 16) || a.tops_row % 4)) || !a.final)
        return refuse(INDEXER_BAD_ARGUMENT, "values must lie at 16 bytes");
    const int most = a.kind == INDEXER_BLOCKS ? INDEXER_MOST_CHOSEN : 512;
    if (a.count < 2 || a.count > most) return refuse(INDEXER_BAD_ARGUMENT, "%d chosen; 2 to %d", a.count, most);
    if (positions && a.fan != 8 && a.fan != 16) return refuse(INDEXER_BAD_ARGUMENT, "the best of %d; 8 or 16", a.fan);
    const int room = positions ? INDEXER_MOST_ENTRIES * a.fan : a.kind == INDEXER_BLOCKS ? INDEXER_MOST_ENTRIES : INDEXER_DIRECT;
    if (a.entries > room) return refuse(INDEXER_BAD_ARGUMENT, "%d values of a row; %d at most", a.entries, room);
    if (!positions && a.size < 1) return refuse(INDEXER_BAD_ARGUMENT, "blocks of %d", a.size);
    if (a.kind == INDEXER_CANDIDATES && !a.chosen) return refuse(INDEXER_BAD_ARGUMENT, "no candidates");
    return INDEXER_OK;
}

} // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int indexer_abi(void) { return INDEXER_ABI; }

EXPORT const char *indexer_error(void) { return message; }

EXPORT int indexer_scores(const indexer_step *step, const indexer_scores_args *args, void *stream) {
    if (const int status = check(*step)) return status;
    if (const int status = check(*args)) return status;
    return done(launch_scores(*step, *args, static_cast<cudaStream_t>(stream)), "the indexer's scores");
}

EXPORT int indexer_choose(const indexer_step *step, const indexer_choose_args *args, void *stream) {
    if (const int status = check(*step)) return status;
    if (const int status = check(*args)) return status;
    return done(launch_choose(*step, *args, args->early && starts_early(), static_cast<cudaStream_t>(stream)), "the indexer's choice");
}

} // extern "C"
