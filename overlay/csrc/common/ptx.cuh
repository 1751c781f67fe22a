/* The few instructions that C++ has no name for, and the packing around them. All exist from sm_80 on. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ptx {

/* ---- copies ------------------------------------------------------------------------------------ */

__device__ __forceinline__ uint32_t shared_address(const void *at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

/* 16 bytes to shared memory, past L1. */
__device__ __forceinline__ void copy16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy8(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

/* Zeros where `there` is false, and nothing is read. */
__device__ __forceinline__ void copy16(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy8(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* All groups but the last LEFT. */
template <int LEFT>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* What is in no group, too. */
__device__ __forceinline__ void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* Asks for a line to be in L2 soon. */
__device__ __forceinline__ void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

/* Read once: past L1. */
__device__ __forceinline__ uint4 load16(const void *at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

/* ---- matrices ---------------------------------------------------------------------------------- */

/* Four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8. */
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

/* d += a . b: m16 n8 k16, operands of the type named, fp32 sums. */
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_fp16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_fp16(float (&d)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
    mma_fp16(d, words, b0, b1);
}

/* ---- values ------------------------------------------------------------------------------------ */

/* Products of bf16 pairs, rounded once. */
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

__device__ __forceinline__ float power(float x) { /* 2^x */
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* To a unit in the last place, of a number between 2^-126 and 2^126. */
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&v);
}

__device__ __forceinline__ uint32_t half2_bits(__half2 v) { return *reinterpret_cast<uint32_t *>(&v); }

__device__ __forceinline__ uint32_t pack_fp16(float low, float high) { return half2_bits(__floats2half2_rn(low, high)); }

/* Low word of the 64-bit hi:lo >> by, for by in 0..63: one instruction. */
__device__ __forceinline__ uint32_t shift64(uint32_t lo, uint32_t hi, uint32_t by) {
    return static_cast<uint32_t>(((static_cast<uint64_t>(hi) << 32) | lo) >> by);
}

/* Each nibble of the selector names one of four bytes; with its highest bit set, the byte's sign eight times. */
__device__ __forceinline__ uint32_t permute(uint32_t from, uint32_t selector) {
    uint32_t d;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(from), "r"(selector));
    return d;
}

/* ---- between warps, CTAs and launches ----------------------------------------------------------- */

/* `threads` of the CTA meet; `number` 1 to 15, 0 is __syncthreads'. */
__device__ __forceinline__ void meet(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* What was there before; other CTAs' writes before their addition are visible after this one. */
__device__ __forceinline__ int add_and_order(int *at, int by) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(by) : "memory");
    return before;
}

/* The same of one more; behind `most` comes 0. */
__device__ __forceinline__ int count_and_order(int *at, int most) {
    int before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(most) : "memory");
    return before;
}

/* Between two launches of which the second may start early: the first says that its CTAs all run, the
 * second waits for its end before it reads what it wrote. No-ops where the chip has no such thing. */
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

} // namespace ptx
