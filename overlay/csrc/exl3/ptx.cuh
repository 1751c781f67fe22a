/* The few instructions that C++ has no name for. All exist from sm_80 on. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace exl3 {

__device__ __forceinline__ uint32_t shared_address(const void *at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

/* 16 bytes to shared memory, past L1. */
__device__ __forceinline__ void copy_async(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_8(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
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

/* Asks for a line to be in L2 soon. */
__device__ __forceinline__ void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

/* What was there before; other CTAs' writes before their addition are visible after this one. */
__device__ __forceinline__ int add_and_order(int *at, int by) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(by) : "memory");
    return before;
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* d += a . b: m16 n8 k16, fp16 operands, fp32 sums. */
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The fp16 in the low half of `v` as the upper half of the result, that of `low` as its lower half. The
 * upper half of `low` is 0; both are finite. */
__device__ __forceinline__ uint32_t place_high(uint32_t v, uint32_t low) {
    uint32_t d;
    asm("{ .reg .f16 l, h; .reg .b32 t; mov.b32 {l, h}, %1; mov.b32 t, {l, l}; fma.rn.f16x2 %0, t, %2, %3; }"
        : "=r"(d)
        : "r"(v), "r"(0x3C000000u), "r"(low));
    return d;
}

/* Low word of the 64-bit hi:lo >> by, for by in 0..63: one instruction. */
__device__ __forceinline__ uint32_t shift64(uint32_t lo, uint32_t hi, uint32_t by) {
    return static_cast<uint32_t>(((static_cast<uint64_t>(hi) << 32) | lo) >> by);
}

__device__ __forceinline__ uint32_t half2_bits(__half2 v) { return *reinterpret_cast<uint32_t *>(&v); }

__device__ __forceinline__ uint32_t pack_half(float lo, float hi) {
    return half2_bits(__floats2half2_rn(lo, hi));
}

} // namespace exl3
