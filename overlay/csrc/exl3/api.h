/* EXL3 linears and experts in CUDA. What ctypes calls; everything else here is behind it.
 *
 * All pointers are device pointers unless a comment says host. Calls launch on `stream` (a
 * cudaStream_t) and return; none allocates, synchronises or keeps state, so all may be captured in
 * a graph and any number of streams may run at once, each with its own scratch and counters.
 * A result depends on the arguments alone: sums run in a fixed order, whichever CTA comes last.
 *
 * Programmatic dependent launch: on GPUs of 9.x and 10.x a launch may start while the kernel before it
 * on the stream ends, and lets the next one do so; it waits for that end before it touches inputs,
 * outputs or scratch. Weights (trellis), scales and tables it may read before: whatever writes those
 * must not be the kernel directly in front of it. SPARK_EARLY_STARTS: see
 * common/launch.hpp.
 *
 * A status other than CALL_OK means nothing was launched (or CUDA refused the launch);
 * exl3_error() says what was found and what was needed.
 *
 * Shapes: `in` and `out`, `hidden` and `inter` are multiples of 128. A "chunk" is 128 outputs, a
 * "k-block" 128 inputs: one Hadamard block each. trellis int16 [in/16, out/16, 8 * k2], contiguous,
 * 16-byte aligned; suh fp16 [in], svh fp16 [out], 8-byte aligned; x bf16, 8-byte aligned rows.
 * k2 is the rate in half bits (K = 3: k2 = 6): 2, 4, ..., 16, and 3, 5, 7 for mul1.
 */
#ifndef SPARK_EXL3_API_H
#define SPARK_EXL3_API_H

#include <stddef.h>
#include <stdint.h>

#include "../common/call.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL3_ABI 3

enum { EXL3_MUL1 = 0, EXL3_MCG = 1, EXL3_3INST = 2 };
enum { EXL3_BF16 = 0, EXL3_FP32 = 1 };
enum {
    EXL3_MAX_SHARDS = 16,
    EXL3_MAX_ROWS = 64,  /* of a dense group */
    EXL3_MAX_SLOTS = 128, /* tokens * topk of an experts call */
    EXL3_MAX_WARPS = 8   /* of a CTA */
};

EXPORTED int exl3_abi(void);

/* Host text of the calling thread's last failure; valid until its next call. */
EXPORTED const char *exl3_error(void);

/* ---- W_hat, bit for bit ------------------------------------------------------------------- */

/* weights fp16 [in, out] of a trellis: the decoded codebook values, before Hadamard and scales. */
EXPORTED int exl3_decode(const void *trellis, int32_t in, int32_t out, int32_t k2,
                         int32_t codebook, void *weights, void *stream);

/* ---- dense group: one launch --------------------------------------------------------------- */

/* y = H(H(x * suh) @ W_hat) * svh (+ bias), fp32 sums, rounded once to y's dtype.
 *
 * The plan's part: a CTA takes `chunks` (>= 1) neighbouring chunks of outputs and `kblocks` (>= 1)
 * k-blocks of inputs. Its warps, the call's `warps`, stand as chunks x (warps / chunks): the second
 * factor shares out the k-range, so chunks must not exceed warps. The number of k-splits is
 * ceil((in / 128) / kblocks); with more than one, partial sums go through scratch. Shared memory
 * bounds kblocks: at most 16. Any legal plan gives a right answer; another plan, another order of
 * the fp32 sums. */
typedef struct {
    const void *x;       /* bf16 [rows, in] */
    int64_t x_stride;    /* elements from row to row, a multiple of 4 */
    const void *trellis;
    const void *suh;
    const void *svh;
    const void *bias;    /* fp16 [out], or NULL */
    void *y;             /* [rows, out] */
    int64_t y_stride;    /* elements from row to row, a multiple of 4 */
    int32_t in;
    int32_t out;
    int32_t k2;
    int32_t codebook;    /* EXL3_MUL1.. */
    int32_t y_dtype;     /* EXL3_BF16 (8-byte aligned) or EXL3_FP32 (16-byte aligned) */
    int32_t chunks;      /* plan: chunks of outputs a CTA */
    int32_t kblocks;     /* plan: k-blocks a CTA */
    int32_t reserved;    /* 0 */
} exl3_shard;

/* Host function, pure: what exl3_group of these shards, rows and warps needs. Pointers in the
 * shards are not looked at. With R = 8 (rows <= 8) or 16, passes = ceil(rows / R),
 * splits = ceil((in/128) / kblocks):
 *   scratch_bytes = sum over shards with splits > 1 of passes * (out/128) * splits * R * 512
 *   counters      = passes * sum over shards of ceil((out/128) / chunks)                        */
EXPORTED int exl3_group_need(const exl3_shard *shards /* host */, int32_t count, int32_t rows,
                             int32_t warps, int64_t *scratch_bytes /* host */,
                             int64_t *counters /* host */);

/* count 1..16 shards, rows 0..64 (0: nothing happens), warps 1..8. scratch: 256-byte aligned, any
 * contents. counters: int32, all zero before the first launch; every launch leaves them zero. Both
 * must not be in use by another launch that may run at the same time. */
EXPORTED int exl3_group(const exl3_shard *shards /* host */, int32_t count, int32_t rows,
                        int32_t warps, void *scratch, int64_t scratch_bytes, int32_t *counters,
                        int64_t counter_count, void *stream);

/* ---- experts: two launches ------------------------------------------------------------------ */

/* y[t] = sum over slots j of token t: weights[t, j] * down(silu(min(gate, L)) * clamp(up, -L, L))
 *        (+ the shared expert's, weight 1).
 * table int64 [3][experts + shared][4], on the device: for gate, up and down (in this order) of
 * each expert: address of trellis, of suh, of svh, and k2 | codebook << 8. K may differ from entry
 * to entry. The shared expert, if any, is entry `experts`.
 * An id stands for entry id - first_id; ids outside [first_id, first_id + experts) contribute
 * nothing (a token with no valid id gets zeros, plus the shared expert's part).
 *
 * Launch A may start while the kernel before it on the stream ends, and B while A ends (see above).
 * A waits for that end before it reads or writes anything; B finds its rows and fetches its first
 * weights, then waits for A's.
 *
 * Plan: launch A (gate, up) has a_warps warps in a_chunks x (a_warps / a_chunks) and takes
 * a_kblocks (<= 16) k-blocks of `hidden` at a time; launch B (down) has b_warps and b_chunks and
 * takes b_kblocks of `inter`. */
typedef struct {
    const void *x;          /* bf16 [tokens, hidden] */
    int64_t x_stride;       /* elements, a multiple of 4 */
    const void *ids;        /* int64 or int32 [tokens, topk], contiguous */
    const float *weights;   /* fp32 [tokens, topk], contiguous */
    const int64_t *table;
    void *y;                /* [tokens, hidden] */
    int64_t y_stride;       /* elements, a multiple of 4 */
    int32_t id_bytes;       /* 8 or 4 */
    int32_t tokens;         /* 0: nothing happens */
    int32_t topk;           /* tokens * topk <= 128 */
    int32_t experts;        /* >= 1 */
    int32_t first_id;
    int32_t shared;         /* 1: table entry `experts` serves every token; else 0 */
    int32_t hidden;
    int32_t inter;          /* at most 4096 */
    int32_t y_dtype;
    int32_t max_k2;         /* the largest k2 in the table: sizes shared memory */
    float limit;            /* L; <= 0: no clamp */
    int32_t a_warps;
    int32_t a_chunks;
    int32_t a_kblocks;
    int32_t b_warps;
    int32_t b_chunks;
    int32_t b_kblocks;
} exl3_experts_args;

/* Host function, pure; pointers are not looked at. With slots = tokens * topk, S = slots +
 * (shared ? tokens : 0), a_splits = ceil((hidden/128) / a_kblocks), b_splits = ceil((inter/128) /
 * b_kblocks), each term rounded up to 256:
 *   scratch_bytes = S * 2 * a_splits * inter * 4  +  S * inter * 2  +  S * b_splits * hidden * 4
 *   counters      = (slots + shared) * ceil((inter/128) / a_chunks) + ceil((hidden/128) / b_chunks)
 */
EXPORTED int exl3_experts_need(const exl3_experts_args *args /* host */,
                               int64_t *scratch_bytes /* host */, int64_t *counters /* host */);

/* scratch and counters as for exl3_group. */
EXPORTED int exl3_experts(const exl3_experts_args *args /* host */, void *scratch,
                          int64_t scratch_bytes, int32_t *counters, int64_t counter_count,
                          void *stream);

#ifdef __cplusplus
}
#endif
#endif
