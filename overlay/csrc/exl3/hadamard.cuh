/* Rotation of 16 rows of a k-block by tensor cores, for the kernels of many rows.
 *
 * As in engine.cuh, inputs are H128 / 8 of the +-1 matrix and outputs take OUTPUT_SCALE. */
#pragma once

#include "engine.cuh"

namespace exl3 {

/* Both columns of eight rows as operand A, rotated to operands B: `a[hi]` holds inputs
 * 16 * hi + 4 * (lane & 3).. of row lane / 4 (registers 0, 2) and of another eight rows (1, 3);
 * `out[hi][nb][half]` is k-tile hi's register `half` of eight rows nb. */
__device__ __forceinline__ void rotate_operands(const uint32_t (&a)[8][4], const Hadamard16 &had,
                                                uint32_t (&out)[8][2][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float d[8][4];
        rotate_half<4>(a, had.b[half], d);
#pragma unroll
        for (int hi = 0; hi < 8; ++hi)
#pragma unroll
            for (int nb = 0; nb < 2; ++nb) out[hi][nb][half] = pack_fp16(d[hi][2 * nb], d[hi][2 * nb + 1]);
    }
}

} // namespace exl3
