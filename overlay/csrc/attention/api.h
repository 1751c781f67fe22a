/* Sparse MLA over paged KV records: a C interface for ctypes (spark_overlay/attention/kernels/library.py).
 *
 * Pointers are device addresses but for the struct itself. A call launches on `stream` and returns; it
 * allocates nothing and waits for nothing, so it may be captured in a graph. Not thread-safe in
 * attention_error alone, which speaks of the calling thread's last failure. */
#pragma once

#include <stdint.h>

#include "../common/call.h"

#define ATTENTION_ABI 2

#define ATTENTION_MAX_SPLITS 64

#ifdef __cplusplus
extern "C" {
#endif

/* Pages of `page` records; a record's 576 bytes of data lie at page * stride + offset * 576, its 8 scales
 * behind all data of the page. */
typedef struct {
    const void *cache;      /* 16-byte aligned */
    int64_t stride;         /* bytes from page to page; a multiple of 16 */
    const int32_t *slots;   /* [tokens, width]; page * page-size + offset, negative: absent */
    int64_t slots_row;      /* values from row to row */
    const int32_t *lengths; /* [tokens] or NULL: all of a row */
    int32_t page;
    int32_t width; /* 0: no such source */
} attention_source;

typedef struct {
    const void *q; /* bf16 [tokens, heads, 512], 16-byte aligned rows */
    int64_t q_token, q_head;
    void *out; /* as q */
    int64_t out_token, out_head;
    const float *sink;      /* [heads] */
    float *partial;         /* splits > 1: [splits, tokens, heads, 512] */
    float *peaks;           /* splits > 1: [2, splits, tokens, heads] */
    const void *cos_sin;    /* [positions, 64] or NULL: no rotation */
    int64_t cos_sin_row;    /* values from row to row */
    const void *positions;  /* [tokens] */
    attention_source source[2];
    int32_t tokens, heads;
    int32_t cos_sin_float;  /* 1: float32, 0: bf16 */
    int32_t positions_wide; /* 1: int64, 0: int32 */
    int32_t keys;           /* of a tile: 32 or 64 */
    int32_t splits;         /* 1 to ATTENTION_MAX_SPLITS */
    float scale;            /* of logits */
    int32_t many;           /* 1: the form for many tokens: tiles of 64, no splits, 208 KB of shared memory */
} attention_args;

EXPORTED int attention_abi(void);
EXPORTED const char *attention_error(void);
/* Bytes of dynamic shared memory of a CTA. */
EXPORTED int attention_shared(int keys, int heads, int many);
EXPORTED int attention_sparse(const attention_args *args, void *stream);

#ifdef __cplusplus
}
#endif
