/* Sparse MLA for many tokens: a CTA has a multiprocessor to itself and takes whole tokens (32 heads of
 * each), one after the other, as one stream of tiles of 64 records.
 *
 * Records come to shared memory as they are (cp.async) and become bf16 rows once, for keys and values
 * alike: with 32 heads a record is multiplied 64 times, and turning it into bf16 twice, as attend.cuh
 * does, takes as long as multiplying. Sixteen warps in two teams, so that what waits for multiplications
 * and what waits for shared memory run beside each other; a barrier of all a step, in which
 *
 *   logits  logits of tile i + 1, then their softmax; where tile i + 3 lies
 *   values  begins to copy tile i + 2; values of tile i times their weights; then the records of tile
 *           i + 2 to bf16, in the place of tile i
 *
 * A token's last tile is followed by the next token's first: nothing waits between tokens. 215 KB of shared
 * memory, 128 registers, no spills; instructions of sm_80 only. */
#pragma once

#include "many_logits.cuh"
#include "many_values.cuh"

namespace attention {

__global__ void __launch_bounds__(Many::THREADS, 1) attend_many(const __grid_constant__ Launch p) {
    extern __shared__ __align__(16) uint8_t memory[];
    Many &s = *reinterpret_cast<Many *>(memory);
    const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
    if (warp < Many::TEAM / 32)
        many::LogitsTeam(p, s, warp, lane).run();
    else
        many::ValuesTeam(p, s, warp - Many::TEAM / 32, lane).run();
}

} // namespace attention
