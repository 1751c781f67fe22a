/* The values' team of many.cuh: eight warps, each eight of a tile's records to bf16 and 64 columns of the
 * values. */
#pragma once

#include "many_stream.cuh"
#include "unpack.cuh"

namespace attention::many {

struct ValuesTeam {
    const Launch &p;
    Many &s;
    const int warp, lane; /* of the team */
    float sum[2][8][4];

    __device__ __forceinline__ ValuesTeam(const Launch &p, Many &s, int warp, int lane)
        : p(p), s(s), warp(warp), lane(lane) {}

    /* Begins to copy the warp's records of tile `i`: a row's first 32 chunks each, then the last four of all. */
    __device__ __forceinline__ void fetch(int i) {
        const Record mine = s.from[i & 1][warp * Many::OWN + (lane & 7)];
        if (lane < Many::OWN)
            copy8(shared_address(s.scales) + (warp * Many::OWN + lane) * 8, mine.scales, mine.there());
        const uint32_t raw = shared_address(s.raw) + warp * Many::OWN * DATA;
        const auto copy = [&](int row, int chunk) {
            const uint64_t at = __shfl_sync(ALL, mine.at, row);
            copy16(raw + raw_at(row, chunk), reinterpret_cast<const uint8_t *>(at & ~uint64_t{1}) + chunk * 16,
                   (at & 1) == 0);
        };
#pragma unroll
        for (int row = 0; row < Many::OWN; ++row) copy(row, lane);
        copy(lane >> 2, 32 + (lane & 3));
        copy_commit();
    }

    /* The warp's records of tile `i`, which are in shared memory, to bf16: a quarter of the lanes for each
     * 16 codes of a group. */
    __device__ __forceinline__ void unpack(int i) {
        const int row = warp * Many::OWN + (lane & 7), quarter = lane >> 3;
        uint8_t *to = s.tile[i & 1] + row * Many::ROW;
        const uint2 scales = *reinterpret_cast<const uint2 *>(s.scales + row * 8);
        const uint8_t *from = s.raw + raw_at(row, quarter);
        uint4 next = *reinterpret_cast<const uint4 *>(from);
        uint8_t *place = to + quarter * 32;
#pragma unroll 1
        for (int group = 0; group < 7; ++group) { /* short code: unrolled, it is fetched more slowly */
            const uint4 codes = next;
            from += 64;
            next = *reinterpret_cast<const uint4 *>(from);
            convert(codes, scale_of(scales, group), place);
            place += 128;
        }
        const uint4 rest = *reinterpret_cast<const uint4 *>(from + 64); /* RoPE is bf16 already */
        *reinterpret_cast<uint4 *>(to + 896 + quarter * 16) = next;
        *reinterpret_cast<uint4 *>(to + 960 + quarter * 16) = rest;
        if (lane < Many::OWN) s.there[i & 1][row] = s.from[i & 1][row].there();
        if (__any_sync(ALL, any_large(scales)))
            for (int group = 0; group < 7; ++group) enlarge(scale_of(scales, group), to + group * 128 + quarter * 32);
    }

    __device__ __forceinline__ void fade(int stage) {
        float by[2][2];
        bool fades = false;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                by[m][i] = s.fade[stage][m * 16 + i * 8 + (lane >> 2)];
                fades |= by[m][i] != 1.f;
            }
        if (!__any_sync(ALL, fades)) return;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[m][n][i] *= by[m][i >> 1];
    }

    /* The warp's 64 columns. */
    __device__ __forceinline__ void outputs(int stage) {
        const uint32_t weights = shared_address(s.weights[stage]) + (lane & 15) * Many::WEIGHTS_ROW + (lane >> 4) * 16;
        const uint32_t tile = shared_address(s.tile[stage]) + (lane & 15) * Many::ROW + (lane >> 4) * 16 + warp * 128;
#pragma unroll
        for (int k = 0; k < Many::KEYS / 16; ++k) {
            uint32_t a[2][4], v[4];
#pragma unroll
            for (int m = 0; m < 2; ++m) load_matrices(a[m], weights + m * 16 * Many::WEIGHTS_ROW + k * 32);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                load_transposed(v, tile + k * 16 * Many::ROW + c * 32);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    mma_bf16(sum[m][2 * c], a[m], v[0], v[1]);
                    mma_bf16(sum[m][2 * c + 1], a[m], v[2], v[3]);
                }
            }
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.f;
    }

    /* The warp's columns of a token, by way of its own columns of the tile that it has just used. */
    __device__ __forceinline__ void write(int stage, int unit) {
        const int token = token_of(p, unit), head0 = (unit - token * groups_of(p)) * Many::HEADS;
        const int g = lane >> 2, t = lane & 3;
        uint8_t *mine = s.tile[stage] + warp * 128;
        float by[2][2];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) by[m][i] = s.last[stage][m * 16 + i * 8 + g];
        const bool turned = warp == 7 && p.cos_sin;
        __syncwarp();
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const float2 turn = turned ? turn_of(p, token, c * 4 + t) : make_float2(1.f, 0.f);
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float x = sum[m][c][2 * i] * by[m][i], y = sum[m][c][2 * i + 1] * by[m][i];
                    *reinterpret_cast<uint32_t *>(mine + (m * 16 + i * 8 + g) * Many::ROW + c * 16 + t * 4) =
                        turned ? packed_pair(p, x, y, turn) : pack_bf16(x, y);
                }
        }
        __syncwarp();
        const int row = lane >> 3, chunk = lane & 7;
        __nv_bfloat16 *to = p.out + token * p.out_token + (head0 + row) * p.out_head + warp * 64 + chunk * 8;
#pragma unroll
        for (int r = 0; r < Many::HEADS; r += 4)
            if (head0 + r + row < p.heads)
                *reinterpret_cast<uint4 *>(to + r * p.out_head) =
                    *reinterpret_cast<const uint4 *>(mine + (r + row) * Many::ROW + chunk * 16);
    }

    __device__ __forceinline__ void run() {
        clear();
        end_step(); /* it is known where tile 0 lies */
        for (int i = -2;; ++i) {
            const int stage = i & 1;
            fetch(i + 2);
            if (i >= 0) {
                fade(stage);
                outputs(stage);
                const int now = s.unit[i & 3];
                if (now & 1) {
                    write(stage, now >> 1);
                    clear();
                }
            }
            copy_wait_all();
            __syncwarp();
            if (i >= 0) meet(VALUES, Many::TEAM); /* nobody reads tile i any more */
            unpack(i + 2);
            const bool ends = i >= -1 && s.unit[i + 1 & 3] >> 1 >= units_of(p);
            end_step();
            if (ends) break;
        }
    }
};

} // namespace attention::many
