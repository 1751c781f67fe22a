/* mHC of up to 64 rows in one launch: a C interface for ctypes (spark_overlay/mhc/kernels/library.py).
 *
 * Pointers are device addresses but for the struct itself. A call launches on `stream` and returns; it
 * allocates nothing and waits for nothing, so it may be captured in a graph. With `early`, fn, scale, base and
 * weight are constants: the launch in front of this one may not write them. */
#pragma once

#include <stdint.h>

#include "../common/call.h"

#define MHC_ABI 1

#define MHC_STREAMS 4
#define MHC_MIXES 24        /* a row's coefficients: 4 of the next pre-mix, 4 post, 16 residual */
#define MHC_COLUMNS 32      /* of a row's shares in scratch: those, SQUARES, and what nobody reads */
#define MHC_MOST_TOKENS 64
#define MHC_MOST_HIDDEN 8192

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const void *x;        /* bf16 [tokens, hidden], the sublayer's output; NULL: nothing is written back */
    const void *residual; /* bf16 [tokens, 4, hidden] */
    const float *post;    /* [tokens, 4], with x alone */
    const float *comb;    /* [tokens, 4, 4], with x alone: new stream j has comb[i][j] of old stream i */
    const float *pre;     /* [tokens, 4]; NULL: the first stream is read */
    const float *fn;      /* [24, 4, hidden] */
    const float *scale;   /* [3]: of pre-mix, post, residual */
    const float *base;    /* [24] */
    const void *weight;   /* bf16 [hidden], of the input's norm; NULL: none */
    void *streams;        /* out, bf16 [tokens, 4, hidden], with x alone */
    void *input;          /* out, bf16 [tokens, hidden] */
    void *mean;           /* out, bf16 [tokens, hidden], the streams' mean; NULL: not asked */
    float *post_out;      /* out [tokens, 4] */
    float *comb_out;      /* out [tokens, 4, 4] */
    float *pre_out;       /* out [tokens, 4] */
    float *shares;        /* scratch [groups, hidden / columns, rows, 32], of any contents */
    int32_t *counters;    /* [groups], zero before and after; groups = tokens / rows, rounded up */
    int32_t tokens, hidden;
    int32_t rows;       /* of a group, which shares a counter: 8 or 16 */
    int32_t columns;    /* of the hidden size, of a CTA: 64 or 128, dividing it */
    int32_t iterations; /* of Sinkhorn, 1 at least */
    int32_t early;      /* 1: may start while the launch before it ends, where the chip can */
    float rms_eps, pre_eps, sinkhorn_eps, post_gain, norm_eps;
} mhc_args;

EXPORTED int mhc_abi(void);
EXPORTED const char *mhc_error(void);
EXPORTED int mhc_one_launch(const mhc_args *args, void *stream);

#ifdef __cplusplus
}
#endif
