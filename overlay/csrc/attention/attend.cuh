/* Sparse MLA for few tokens (many.cuh: many): a CTA takes one token, up to 32 heads, and a run of tiles
 * of its records.
 *
 * Records come to shared memory as they are (cp.async, two stages) and become bf16 in registers, where
 * ldmatrix puts them for the product: once as keys, once as values. Eight warps:
 *
 *   logits   warp (kk, kn): 128 of the 512 dimensions, half the tile's keys, all heads. Its part of the
 *            query stays in registers; the four parts of a logit are added in shared memory, in order.
 *   softmax  each warp has its heads' rows; running peak and sum stay in its registers
 *   output   warp w: 64 of the 512 columns, which are one scale group (w < 7) or the RoPE values, all
 *            heads; float32 sums in registers
 *
 * Dimensions are permuted within groups of 16 so that four codes of a key, one word, are the two
 * registers of a B operand. Numbers: numbers.cuh. Instructions of sm_80 only. */
#pragma once

#include "tile.cuh"

namespace attention {

template <int KEYS, int MT>
__global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Launch p) {
    extern __shared__ __align__(16) uint8_t memory[];
    auto &s = *reinterpret_cast<Shared<KEYS, MT> *>(memory);
    const int tid = static_cast<int>(threadIdx.x), warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int groups = (p.heads + 16 * MT - 1) / (16 * MT);
    const int token = static_cast<int>(blockIdx.x) / groups;
    const int head0 = (static_cast<int>(blockIdx.x) - token * groups) * 16 * MT;
    const int split = static_cast<int>(blockIdx.y);

    if (p.splits > 1) let_next_start(); /* one wave: the reduction may take its places and wait */
    int limit[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        limit[i] = p.source[i].width;
        if (limit[i] && p.source[i].lengths) limit[i] = min(max(p.source[i].lengths[token], 0), limit[i]);
    }
    /* Splits divide the slots there may be, which needs no look at the lengths. */
    const int full0 = p.splits > 1 ? p.source[0].width : limit[0], full1 = p.splits > 1 ? p.source[1].width : limit[1];
    const int tiles0 = (full0 + KEYS - 1) / KEYS, tiles = tiles0 + (full1 + KEYS - 1) / KEYS;
    const int each = (tiles + p.splits - 1) / p.splits;
    const int low = split * each, high = min(low + each, tiles);

    /* Copying: PER threads a row. */
    constexpr int PER = THREADS / KEYS;
    const int row = tid / PER, part = tid % PER;
    const auto slot_of = [&](int tile) {
        if (tile >= high) return -1;
        const bool second = tile >= tiles0;
        const int column = (second ? tile - tiles0 : tile) * KEYS + row;
        const Source &from = p.source[second ? 1 : 0];
        const int slot = column < from.width ? from.slots[token * from.slots_row + column] : -1;
        return column < (second ? limit[1] : limit[0]) ? slot : -1;
    };
    const auto copy = [&](int tile, int stage, int slot) {
        if (tile < high) {
            const Source &from = p.source[tile >= tiles0 ? 1 : 0];
            const bool there = slot >= 0;
            const int page = from.shift >= 0 ? max(slot, 0) >> from.shift : max(slot, 0) / from.page, offset = max(slot, 0) - page * from.page;
            const uint8_t *begin = from.cache + page * from.stride;
            const uint8_t *data = begin + static_cast<int64_t>(offset) * DATA;
            const uint32_t to = shared_address(s.tile[stage]) + row * PITCH;
#pragma unroll
            for (int c = 0; c < (CHUNKS + PER - 1) / PER; ++c) {
                const int chunk = part + c * PER;
                if (CHUNKS % PER == 0 || chunk < CHUNKS) copy16(to + chunk * 16, data + chunk * 16, there);
            }
            if (part == 0) {
                copy8(shared_address(s.scales[stage]) + row * 8,
                      begin + static_cast<int64_t>(from.page) * DATA + offset * 8, there);
                s.there[stage][row] = there;
            }
        }
        copy_commit();
    };
    const int begin = slot_of(low);
    int ahead = slot_of(low + 1);

    /* The query's part that this warp multiplies, in the order of numbers.cuh's words. */
    const int kk = warp >> 1;
    uint32_t q[MT][8][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = head0 + m * 16 + i * 8 + g;
            const __nv_bfloat16 *from = p.q + token * p.q_token + min(head, p.heads - 1) * p.q_head;
            const bool mine = head < p.heads;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const int at = kk * 128 + c * 16;
                uint2 v;
                if (at < 448)
                    v = *reinterpret_cast<const uint2 *>(from + at + 4 * t);
                else
                    v = make_uint2(*reinterpret_cast<const uint32_t *>(from + at + 2 * t),
                                   *reinterpret_cast<const uint32_t *>(from + at + 2 * t + 8));
                q[m][c][i] = mine ? v.x : 0;
                q[m][c][i + 2] = mine ? v.y : 0;
            }
        }

    copy(low, 0, begin);

    float sum[MT][8][4] = {}, peak[2 * MT], total[2 * MT] = {};
#pragma unroll
    for (int j = 0; j < 2 * MT; ++j) peak[j] = NONE;
    for (int tile = low; tile < high; ++tile) {
        const int stage = (tile - low) & 1;
        copy_wait_all();
        __syncthreads(); /* all of this tile is there, and nobody reads the other stage any more */
        copy(tile + 1, stage ^ 1, ahead);
        ahead = slot_of(tile + 2);

        bool more = false;
        if (tid < KEYS) {
            const uint2 scales = *reinterpret_cast<const uint2 *>(s.scales[stage] + tid * 8);
#pragma unroll
            for (int i = 0; i < 7; ++i) {
                const uint32_t scale = (i < 4 ? scales.x >> 8 * i : scales.y >> 8 * (i - 4)) & 0xff;
                s.factors[i][tid] = static_cast<uint16_t>(factor(scale));
                more |= scale > LAST_PLAIN;
            }
        }
        logits<KEYS, MT>(s, stage, q, warp, lane);
        more = __syncthreads_or(more);
        softmax<KEYS, MT>(s, stage, p.scale, peak, total, warp, lane);
        __syncthreads();
        float fade[MT][2];
        bool fades = false;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                fade[m][i] = s.fade[m * 16 + i * 8 + g];
                fades |= fade[m][i] != 1.f;
            }
        if (__any_sync(0xffffffffu, fades)) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[m][n][i] *= fade[m][i >> 1];
        }
        if (more)
            outputs<true, KEYS, MT>(s, stage, sum, warp, lane);
        else
            outputs<false, KEYS, MT>(s, stage, sum, warp, lane);
    }

#pragma unroll
    for (int j = 0; j < 2 * MT; ++j) {
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) total[j] += __shfl_xor_sync(0xffffffffu, total[j], step);
        const int head = warp * 2 * MT + j;
        if (lane == 0 && head0 + head < p.heads) {
            if (p.splits == 1) {
                s.last[head] = share(peak[j], total[j], p.sink[head0 + head]);
            } else {
                const int64_t place = (static_cast<int64_t>(split) * p.tokens + token) * p.heads + head0 + head;
                p.peaks[place] = peak[j];
                p.peaks[static_cast<int64_t>(p.splits) * p.tokens * p.heads + place] = total[j];
            }
        }
    }
    if (p.splits > 1 && high <= low) return; /* its peak says that there is nothing to add */
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = head0 + m * 16 + i * 8 + g;
            if (head >= p.heads) continue;
            if (p.splits > 1) {
                float *to = p.partial + ((static_cast<int64_t>(split) * p.tokens + token) * p.heads + head) * 512;
                to += warp * 64;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float *x = sum[m][2 * c] + 2 * i, *y = sum[m][2 * c + 1] + 2 * i;
                    if (warp < 7) {
                        *reinterpret_cast<float4 *>(to + c * 16 + 4 * t) = make_float4(x[0], y[0], x[1], y[1]);
                    } else {
                        *reinterpret_cast<float2 *>(to + c * 16 + 2 * t) = make_float2(x[0], x[1]);
                        *reinterpret_cast<float2 *>(to + c * 16 + 8 + 2 * t) = make_float2(y[0], y[1]);
                    }
                }
            } else {
                const float by = s.last[m * 16 + i * 8 + g];
                __nv_bfloat16 *to = p.out + token * p.out_token + head * p.out_head + warp * 64;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float *x = sum[m][2 * c] + 2 * i, *y = sum[m][2 * c + 1] + 2 * i;
                    if (warp < 7) {
                        *reinterpret_cast<uint2 *>(to + c * 16 + 4 * t) =
                            make_uint2(pack_bf16(x[0] * by, y[0] * by), pack_bf16(x[1] * by, y[1] * by));
                    } else {
                        float2 turn[2] = {};
                        if (p.cos_sin) turn[0] = turn_of(p, token, c * 8 + t), turn[1] = turn_of(p, token, c * 8 + 4 + t);
                        *reinterpret_cast<uint32_t *>(to + c * 16 + 2 * t) =
                            packed_pair(p, x[0] * by, x[1] * by, turn[0]);
                        *reinterpret_cast<uint32_t *>(to + c * 16 + 8 + 2 * t) =
                            packed_pair(p, y[0] * by, y[1] * by, turn[1]);
                    }
                }
            }
        }
}

} // namespace attention
