/* EXL3 for many rows: a prefill's linears and experts. Continues api.h, whose first comment holds here
 * too: nothing allocates, synchronises or keeps state, and calls may be captured in graphs. */
#ifndef SPARK_EXL3_MANY_H
#define SPARK_EXL3_MANY_H

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- dense: three launches around a product of any library's ---------------------------------
 *
 *     y = finish(rotate(x) @ reconstruct(trellis)^T)
 *
 * Within each 32 inputs, rotate and reconstruct hold them in this order: place
 * 8 * q + 4 * t + 2 * u + e holds input 16 * t + 8 * u + 2 * q + e (q 0..3; t, u, e 0..1). */

/* fp16 [rows, in] of bf16 x [rows, in]: H(x * suh) by 1/8 of the +-1 matrix, rounded once. */
EXPORTED int exl3_rotate(const void *x, int64_t x_stride, const void *suh, int32_t rows, int32_t in,
                         void *rotated, void *stream);

typedef struct {
    const void *trellis; /* 16-byte aligned, of the whole matrix */
    void *weights;       /* fp16 [columns, in], 16-byte aligned */
    int32_t in;          /* of the matrix */
    int32_t out;
    int32_t k2;
    int32_t codebook;
    int32_t first;   /* output, a multiple of 128 */
    int32_t columns; /* outputs wanted, a multiple of 128 */
} exl3_weights;

/* The codebook's values, bit for bit. Neighbours of one rate and codebook, eight at most, share a
 * launch. */
EXPORTED int exl3_reconstruct(const exl3_weights *parts /* host */, int32_t count, void *stream);

/* y [rows, columns] bf16 or fp32 of fp32 sums [rows, columns], contiguous: H by 1/16 of the +-1
 * matrix, times svh (of these columns). */
EXPORTED int exl3_finish(const void *sums, const void *svh, int32_t rows, int32_t columns, void *y,
                         int64_t y_stride, int32_t y_dtype, void *stream);

/* ---- experts ----------------------------------------------------------------------------------
 *
 * As exl3_experts (api.h), for any number of tokens: sorted on the device, each weight decoded once
 * for up to 64 rows of its expert. Launches: 1 + 2 * waves + 2 * strips, by the pool: a wave is as many
 * rows as it holds rotated inputs of (gate and up), a strip as many columns as it holds all rows'
 * outputs of. What is summed, and in which order, depends on neither. */
typedef struct {
    const void *x;          /* bf16 [tokens, hidden] */
    int64_t x_stride;       /* elements, a multiple of 4 */
    const void *ids;        /* int64 or int32 [tokens, topk], contiguous */
    const float *weights;   /* fp32 [tokens, topk], contiguous */
    const int64_t *table;   /* as exl3_experts' */
    void *y;                /* [tokens, hidden] */
    int64_t y_stride;       /* elements, a multiple of 4 */
    int64_t pool_bytes;     /* plan: of scratch for rotated inputs or outputs, whichever is there */
    int32_t id_bytes;       /* 8 or 4 */
    int32_t tokens;         /* 0: nothing happens */
    int32_t topk;           /* tokens * (topk + shared) at most 2^24 */
    int32_t experts;        /* 1 to 2047 */
    int32_t first_id;
    int32_t shared;
    int32_t hidden;
    int32_t inter;
    int32_t y_dtype;
    int32_t max_k2;
    float limit;
    int32_t variant;        /* plan: 0 takes up to 48 rows of an expert at once, 1 and 2 up to 64 */
} exl3_prefill_args;

/* Host function, pure; pointers are not looked at. Scratch is the pool (no more of it than needed),
 * plus, of P = the most groups of 8 rows that this many slots can make,
 * P = (slots + 7 * min(experts, slots)) / 8 + (shared ? ceil(tokens / 8) : 0):
 * (P + 16) * inter * 16 bytes of down's inputs, P * (inter / 128) * 32 of their sums, and tables of
 * some 60 bytes a group. */
EXPORTED int exl3_prefill_need(const exl3_prefill_args *args /* host */, int64_t *scratch_bytes /* host */,
                               int32_t *waves /* host */, int32_t *strips /* host */);

/* scratch: 256-byte aligned, any contents; not in use by another launch that may run meanwhile. */
EXPORTED int exl3_prefill(const exl3_prefill_args *args /* host */, void *scratch, int64_t scratch_bytes,
                          void *stream);

#ifdef __cplusplus
}
#endif
#endif
