/* The lightning indexer's scores and choice: a C interface for ctypes
 * (spark_overlay/indexer/kernels/library.py).
 *
 * Pointers are device addresses but for the structs themselves. A call launches on `stream` and returns;
 * it allocates nothing and waits for nothing, so it may be captured in a graph. */
#pragma once

#include <stdint.h>

#include "../common/call.h"

#define INDEXER_ABI 2

#define INDEXER_HEADS 32
#define INDEXER_MOST_ROWS 8
#define INDEXER_MOST_CHOSEN 2048
#define INDEXER_DIRECT 16384
#define INDEXER_MOST_ENTRIES 131072

#define INDEXER_POSITIONS 0
#define INDEXER_BLOCKS 1
#define INDEXER_CANDIDATES 2

#ifdef __cplusplus
extern "C" {
#endif

/* What a step's metadata says of its rows: rows starts[r] .. starts[r + 1] are request r's last tokens of
 * lengths[r]; a row sees (position + 1) / ratio keys, at most `width`. */
typedef struct {
    const int32_t *request; /* [>= rows] a row's request */
    const int32_t *starts;  /* [requests + 1] */
    const int32_t *lengths; /* [requests] */
    int32_t requests, first_row, rows, width, ratio;
} indexer_step;

/* Pages of `states` keys: 128 e4m3 each, then a float32 scale each. */
typedef struct {
    const void *q;        /* e4m3 [rows, 32, 128], 16-byte aligned */
    const float *weights; /* [rows, 32] */
    const void *cache;    /* 16-byte aligned */
    int64_t stride;       /* bytes from page to page; a multiple of 16 */
    const int32_t *table; /* [requests, table_row] page ids */
    int64_t table_row;
    float *out; /* [rows - first_row, out_row] */
    int64_t out_row;
    float *tops; /* [rows - first_row, tops_row]: the best of each `fan` scores */
    int64_t tops_row;
    const int32_t *chosen; /* candidates alone: [>= rows, chosen_row] blocks of 8 positions, ascending, -1 padded */
    int64_t chosen_row;
    int32_t chosen_count;
    int32_t blocks, states, fan; /* pages of the cache; keys of one: a multiple of 32; 8 or 16 */
    int32_t group;               /* rows of a request that a CTA scores at once: 1 to 8; of candidates 1 */
    int32_t held;                /* CTAs that score several rows which a multiprocessor is to hold: 1 (large) to 3 */
    int32_t parts;               /* CTAs that share a request's rows, a group after the other */
    int32_t splits;              /* CTAs that share their keys, and of a group whose keys are few its rows */
} indexer_scores_args;

typedef struct {
    const float *values; /* positions, candidates: scores; blocks: as tops */
    int64_t values_row;
    const float *tops; /* positions: the best of each `fan` scores */
    int64_t tops_row;
    const int32_t *chosen; /* candidates: what their scores are of */
    int64_t chosen_row;
    int32_t *final; /* [>= rows, final_row]: `count` places, ascending, -1 padded */
    int64_t final_row;
    int32_t kind, count, fan, size, chosen_count;
    int32_t entries; /* of a row's values, at most */
    int32_t early;   /* 1: may start while the launch before it ends, where the chip can */
} indexer_choose_args;

EXPORTED int indexer_abi(void);
EXPORTED const char *indexer_error(void);
EXPORTED int indexer_scores(const indexer_step *step, const indexer_scores_args *args, void *stream);
EXPORTED int indexer_choose(const indexer_step *step, const indexer_choose_args *args, void *stream);

#ifdef __cplusplus
}
#endif
