/* mHC of a few rows in one launch: a C interface for ctypes (spark_overlay/mhc/kernels/library.py).
 *
 * Pointers are device addresses but for the struct itself. A call launches on `stream` and returns; it
 * allocates nothing and waits for nothing, so it may be captured in a graph. */
#pragma once

#include <stdint.h>

#define MHC_ABI 1

#define MHC_OK 0
#define MHC_BAD_ARGUMENT 1
#define MHC_CUDA 2

#define MHC_ROWS 8
#define MHC_SHARE 256
#define MHC_MOST_HIDDEN 8192

#ifdef __cplusplus
extern "C" {
#endif

/* bf16 where nothing is said, row after row without gaps. */
typedef struct {
    const void *x;        /* [tokens, hidden]: the sublayer's output; NULL: nothing is written back */
    const void *residual; /* [tokens, 4, hidden] */
    const float *post;    /* [tokens, 4], with x */
    const float *comb;    /* [tokens, 4, 4], with x */
    const float *pre;     /* [tokens, 4] or NULL: the first stream is read */
    const float *fn;      /* [24, 4 * hidden] */
    const float *scale;   /* [3] */
    const float *base;    /* [24] */
    const void *weight;   /* [hidden] or NULL: no norm */
    void *streams_out;    /* [tokens, 4, hidden], with x */
    float *post_out;      /* [tokens, 4] */
    float *comb_out;      /* [tokens, 4, 4] */
    void *input_out;      /* [tokens, hidden] */
    float *pre_out;       /* [tokens, 4] */
    void *mean_out;       /* [tokens, hidden] or NULL */
    float *partials;      /* [groups of 8 tokens, hidden / 16 / warps, 256] */
    int32_t *counters;    /* [groups]; zero before and after */
    int32_t tokens, hidden, warps, iterations;
    float rms_eps, pre_eps, sinkhorn_eps, post_gain, norm_eps;
} mhc_args;

int mhc_abi(void);
const char *mhc_error(void);
int mhc_one_launch(const mhc_args *args, void *stream);

#ifdef __cplusplus
}
#endif
