/* The C interface: checks and launches. */
#include "api.h"

#include "../common/call.hpp"
#include "../common/launch.hpp"
#include "launch.hpp"

namespace {

using namespace indexer;
using namespace call;

/* Given, at a multiple of `to` bytes. */
bool there(const void *at, uintptr_t to) { return at && aligned(at, to); }

int check(const indexer_step &s) {
    if (!s.request || !s.starts || !s.lengths) return refuse("a step without its rows");
    if (s.requests < 1 || s.first_row < 0 || s.rows <= s.first_row || s.width < 1 || s.ratio < 1)
        return refuse("%d requests, rows %d to %d, width %d, ratio %d", s.requests, s.first_row, s.rows,
                      s.width, s.ratio);
    return CALL_OK;
}

int check(const indexer_step &s, const indexer_scores_args &a) {
    if (a.table_row < 1 || a.table_row * s.requests > INT32_MAX)
        return refuse("a table of %d rows, %lld apart", s.requests, static_cast<long long>(a.table_row));
    if (!there(a.q, 16) || !there(a.cache, 16) || a.stride % 16 || !a.weights || !a.table || !a.out || !a.tops)
        return refuse("queries and pages must lie at 16 bytes, pages are %lld apart",
                      static_cast<long long>(a.stride));
    if (a.states < 32 || (a.states & (a.states - 1)))
        return refuse("pages of %d keys; a power of two, 32 at least", a.states);
    if (a.fan != 8 && a.fan != 16) return refuse("the best of %d; 8 or 16", a.fan);
    if (a.group < 1 || a.group > INDEXER_MOST_ROWS || (a.chosen && a.group > 1))
        return refuse("%d rows at once; 1 to %d, of candidates one", a.group, INDEXER_MOST_ROWS);
    if (a.held < 1 || a.held > 3) return refuse("%d CTAs on a multiprocessor; 1 to 3", a.held);
    if (a.parts < 1 || a.splits < 1 || a.splits > 65535)
        return refuse("%d parts, %d splits", a.parts, a.splits);
    return CALL_OK;
}

int check(const indexer_choose_args &a) {
    const bool positions = a.kind == INDEXER_POSITIONS;
    if (a.kind < INDEXER_POSITIONS || a.kind > INDEXER_CANDIDATES)
        return refuse("kind %d", a.kind);
    if (!there(a.values, 16) || a.values_row % 4 || (positions && (!there(a.tops, 16) || a.tops_row % 4)) || !a.final)
        return refuse("values must lie at 16 bytes");
    const int most = a.kind == INDEXER_BLOCKS ? INDEXER_MOST_CHOSEN : 512;
    if (a.count < 2 || a.count > most) return refuse("%d chosen; 2 to %d", a.count, most);
    if (positions && a.fan != 8 && a.fan != 16) return refuse("the best of %d; 8 or 16", a.fan);
    const int room = positions ? INDEXER_MOST_ENTRIES * a.fan : a.kind == INDEXER_BLOCKS ? INDEXER_MOST_ENTRIES : INDEXER_DIRECT;
    if (a.entries > room) return refuse("%d values of a row; %d at most", a.entries, room);
    if (!positions && a.size < 1) return refuse("blocks of %d", a.size);
    if (a.kind == INDEXER_CANDIDATES && !a.chosen) return refuse("no candidates");
    return CALL_OK;
}

} // namespace

extern "C" {

int indexer_abi(void) { return INDEXER_ABI; }

const char *indexer_error(void) { return message; }

int indexer_scores(const indexer_step *step, const indexer_scores_args *args, void *stream) {
    if (const int status = check(*step)) return status;
    if (const int status = check(*step, *args)) return status;
    const auto launch = args->group > 1 ? launch_rows : launch_scores;
    return done(launch(*step, *args, static_cast<cudaStream_t>(stream)), "the indexer's scores");
}

int indexer_choose(const indexer_step *step, const indexer_choose_args *args, void *stream) {
    if (const int status = check(*step)) return status;
    if (const int status = check(*args)) return status;
    const bool early = args->early && starts_early();
    return done(launch_choose(*step, *args, early, static_cast<cudaStream_t>(stream)), "the indexer's choice");
}

} // extern "C"
