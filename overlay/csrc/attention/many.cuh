/* Sparse MLA for many tokens: a CTA has a multiprocessor to itself and takes whole tokens (32 heads of
 * each), one after the other, as one stream of tiles of 64 records.
 *
 * Records come to shared memory as they are (cp.async) and become bf16 rows once, for keys and values
 * alike: with 32 heads a record is multiplied 64 times, and turning it into bf16 twice, as attend.cuh
 * does, takes as long as multiplying. Eight warps, two phases a tile with a barrier after each:
 *
 *   1  softmax of tile i; records of tile i + 1 to bf16, each warp those eight that it copied
 *   2  values of tile i times their weights, between these the copies of tile i + 2; logits of tile i + 1
 *
 * A token's last tile is followed by the next token's first: nothing waits between tokens. A warp's
 * part of the query, 128 dimensions, stays in registers; it comes by way of the place of the logits'
 * parts, which is free just then. 208 KB of shared memory, up to 255 registers, no spills; instructions
 * of sm_80 only. */
#pragma once

#include "tile.cuh"
#include "unpack.cuh"

namespace attention {

struct Many {
    static constexpr int WARPS = 8, THREADS = 32 * WARPS, KEYS = 64, HEADS = 32, ROW = 1024 + 16;
    static constexpr int SUMS_ROW = KEYS + 8, WEIGHTS_ROW = 2 * KEYS + 16, STEPS = 32 / PARTS, LANES = 8;
    alignas(16) uint8_t tile[2][KEYS * ROW]; /* bf16 */
    alignas(16) uint8_t raw[KEYS * PITCH];
    alignas(16) uint8_t scales[KEYS * 8];
    alignas(16) float sums[PARTS * HEADS * SUMS_ROW]; /* or the next token's query, rows of ROW */
    alignas(16) uint8_t weights[HEADS * WEIGHTS_ROW]; /* bf16 */
    float fade[HEADS], last[HEADS];
    alignas(16) uint8_t there[2][KEYS];
};
static_assert(sizeof(Many::sums) >= Many::HEADS * Many::ROW && Many::KEYS == 8 * Many::WARPS);

namespace many {

constexpr uint32_t ALL = 0xffffffffu;

/* Where the stream is. A unit is a token and a group of heads; the lengths of the next one are known. */
struct Place {
    int unit, tile = 0, tiles0 = 0, tiles = 1, limit[2] = {0, 0}, coming[2] = {0, 0};
};

__device__ __forceinline__ int token_of(int unit, int groups) { return groups == 1 ? unit : unit / groups; }

__device__ __forceinline__ void look(const Launch &p, Place &at, int unit, int groups, int units) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Source &from = p.source[i];
        at.coming[i] = unit < units ? from.width : 0;
        if (at.coming[i] && from.lengths) at.coming[i] = from.lengths[token_of(unit, groups)];
    }
}

__device__ __forceinline__ void enter(const Launch &p, Place &at, int groups, int units) {
#pragma unroll
    for (int i = 0; i < 2; ++i) at.limit[i] = min(max(at.coming[i], 0), p.source[i].width);
    at.tile = 0;
    at.tiles0 = (at.limit[0] + Many::KEYS - 1) / Many::KEYS;
    at.tiles = max(1, at.tiles0 + (at.limit[1] + Many::KEYS - 1) / Many::KEYS); /* without records: zeros */
    look(p, at, at.unit + static_cast<int>(gridDim.x), groups, units);
}

/* The warp's eight records: a quarter of the lanes for each 16 codes of a group, so that the rows of
 * both sides fall on different banks. */
__device__ __forceinline__ void unpack(const Many &s, uint8_t *tile, int warp, int lane) {
    const int row = warp * 8 + (lane & 7), quarter = lane >> 3;
    const uint2 scales = *reinterpret_cast<const uint2 *>(s.scales + row * 8);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 7; ++i) most = max(most, (i < 4 ? scales.x >> 8 * i : scales.y >> 8 * (i - 4)) & 0xff);
    const uint8_t *from = s.raw + row * PITCH + quarter * 16;
    uint8_t *to = tile + row * Many::ROW;
    uint4 next = *reinterpret_cast<const uint4 *>(from);
    if (__any_sync(ALL, most > LAST_PLAIN))
        convert_groups<true>(from, scales, to + quarter * 32, next);
    else
        convert_groups<false>(from, scales, to + quarter * 32, next);
    const uint4 rest = *reinterpret_cast<const uint4 *>(from + 512); /* RoPE is bf16 already */
    *reinterpret_cast<uint4 *>(to + 896 + quarter * 16) = next;
    *reinterpret_cast<uint4 *>(to + 960 + quarter * 16) = rest;
}

/* Logits of the warp's four heads, eight lanes each, to weights; what was summed before fades. */
__device__ __forceinline__ void softmax(Many &s, int stage, float scale, float &peak, float &total, int warp, int lane) {
    const int head = warp * 4 + lane / Many::LANES, first = lane % Many::LANES * 4;
    float value[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int key = half * 32 + first;
        float4 x[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            x[part] = *reinterpret_cast<const float4 *>(s.sums + (part * Many::HEADS + head) * Many::SUMS_ROW + key);
        const float sum[4] = {
            ((x[0].x + x[1].x) + x[2].x) + x[3].x, ((x[0].y + x[1].y) + x[2].y) + x[3].y,
            ((x[0].z + x[1].z) + x[2].z) + x[3].z, ((x[0].w + x[1].w) + x[2].w) + x[3].w};
        const uint32_t there = *reinterpret_cast<const uint32_t *>(s.there[stage] + key);
#pragma unroll
        for (int i = 0; i < 4; ++i) value[4 * half + i] = there >> 8 * i & 1 ? sum[i] * scale : NONE;
    }
    float top = value[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) top = fmaxf(top, value[i]);
#pragma unroll
    for (int step = Many::LANES / 2; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    top = fmaxf(top, peak); /* exact: the largest weight is 1, which bf16 has */
    const float base = top == NONE ? 0.f : top; /* nothing seen yet: 0 - inf, not inf - inf */
    const float fade = power(peak - base);
    peak = top;
    total *= fade;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            weight[i] = power(value[4 * half + i] - base);
            total += weight[i]; /* of this lane's keys; added up at the end */
        }
        *reinterpret_cast<uint2 *>(s.weights + head * Many::WEIGHTS_ROW + 2 * (half * 32 + first)) =
            make_uint2(pack_bf16(weight[0], weight[1]), pack_bf16(weight[2], weight[3]));
    }
    if (first == 0) s.fade[head] = fade;
}

/* The warp's 128 dimensions times 32 keys. */
__device__ __forceinline__ void logits(Many &s, const uint8_t *from, const uint32_t (&q)[2][Many::STEPS][4], int warp,
                                       int lane) {
    const int part = warp >> 1, key = (warp & 1) * 32;
    const uint32_t tile = shared_address(from) + (key + (lane & 7) + (lane >> 4) * 8) * Many::ROW + (lane >> 3 & 1) * 16 +
                          part * Many::STEPS * 32;
    float sum[4][2][4] = {};
#pragma unroll
    for (int step = 0; step < Many::STEPS; ++step) {
        uint32_t b[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n) load_matrices(b[n], tile + n * 16 * Many::ROW + step * 32);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int m = 0; m < 2; ++m) mma_bf16(sum[n][m], q[m][step], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
    float *to = s.sums + (part * Many::HEADS + (lane >> 2)) * Many::SUMS_ROW + key + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float *row = to + m * 16 * Many::SUMS_ROW + n * 8;
            *reinterpret_cast<float2 *>(row) = make_float2(sum[n][m][0], sum[n][m][1]);
            *reinterpret_cast<float2 *>(row + 8 * Many::SUMS_ROW) = make_float2(sum[n][m][2], sum[n][m][3]);
        }
}

/* The warp's 64 columns; `between` after each 16 keys, of which there are four. */
template <class Between>
__device__ __forceinline__ void outputs(const Many &s, const uint8_t *from, float (&sum)[2][8][4], int warp, int lane,
                                        const Between &between) {
    const uint32_t weights = shared_address(s.weights) + (lane & 15) * Many::WEIGHTS_ROW + (lane >> 4) * 16;
    const uint32_t tile = shared_address(from) + (lane & 15) * Many::ROW + (lane >> 4) * 16 + warp * 128;
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
        between(k);
    }
}

/* The warp's columns of a token, by way of its own columns of the tile that it has just used. */
__device__ __forceinline__ void write(const Launch &p, const Many &s, uint8_t *tile, const float (&sum)[2][8][4], int unit,
                                      int groups, int warp, int lane) {
    const int token = token_of(unit, groups), head0 = (unit - token * groups) * Many::HEADS, g = lane >> 2, t = lane & 3;
    uint8_t *mine = tile + warp * 128;
    float by[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) by[m][i] = s.last[m * 16 + i * 8 + g];
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

} // namespace many

__global__ void __launch_bounds__(Many::THREADS, 1) attend_many(const __grid_constant__ Launch p) {
    using namespace many;
    extern __shared__ __align__(16) uint8_t memory[];
    Many &s = *reinterpret_cast<Many *>(memory);
    const int tid = static_cast<int>(threadIdx.x), warp = tid >> 5, lane = tid & 31, g = lane >> 2;
    const int groups = (p.heads + Many::HEADS - 1) / Many::HEADS, units = p.tokens * groups;

    Place ahead{static_cast<int>(blockIdx.x)};
    /* Of the tile `ahead`: the slot of record lane % 8 of the warp's. */
    const auto slot_of = [&]() {
        const bool second = ahead.tile >= ahead.tiles0;
        const int column = (second ? ahead.tile - ahead.tiles0 : ahead.tile) * Many::KEYS + warp * 8 + (lane & 7);
        const Source &from = p.source[second ? 1 : 0];
        if (ahead.unit >= units || column >= (second ? ahead.limit[1] : ahead.limit[0])) return -1;
        return from.slots[token_of(ahead.unit, groups) * from.slots_row + column];
    };
    const auto advance = [&]() {
        if (++ahead.tile < ahead.tiles) return;
        ahead.unit += static_cast<int>(gridDim.x);
        enter(p, ahead, groups, units);
    };
    /* Copying the warp's eight records: begin, each, end. A record's address, the lowest bit set where
     * it is absent, is with the lanes of its number. */
    const uint32_t raw = shared_address(s.raw) + warp * 8 * PITCH;
    uint64_t record = 0;
    const auto copy_begin = [&](int stage, int slot, bool second) {
        const Source &from = p.source[second ? 1 : 0];
        const bool there = slot >= 0;
        const uint8_t *scales = from.cache;
        record = reinterpret_cast<uint64_t>(from.cache) | 1;
        if (there) {
            const int page = from.shift >= 0 ? slot >> from.shift : slot / from.page, offset = slot - page * from.page;
            const uint8_t *begin = from.cache + page * from.stride;
            record = reinterpret_cast<uint64_t>(begin + static_cast<int64_t>(offset) * DATA);
            scales = begin + static_cast<int64_t>(from.page) * DATA + offset * 8;
        }
        if (lane < 8) {
            const int row = warp * 8 + lane;
            copy8(shared_address(s.scales) + row * 8, scales, there);
            s.there[stage][row] = there;
        }
    };
    const auto copy_chunk = [&](int row, int chunk) {
        const uint64_t from = __shfl_sync(ALL, record, row);
        copy16(raw + row * PITCH + chunk * 16, reinterpret_cast<const uint8_t *>(from & ~uint64_t{1}) + chunk * 16,
               (from & 1) == 0);
    };
    const auto copy_end = [&]() { /* the last four chunks of all eight */
        copy_chunk(g, 32 + (lane & 3));
        copy_commit();
    };
    const auto copy_query = [&](int unit) {
        const int token = token_of(unit, groups), head0 = (unit - token * groups) * Many::HEADS;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int head = i * 4 + (tid >> 6), chunk = tid & 63;
            copy16(shared_address(s.sums) + head * Many::ROW + chunk * 16,
                   p.q + token * p.q_token + min(head0 + head, p.heads - 1) * p.q_head + chunk * 8, true);
        }
        copy_commit();
    };
    uint32_t q[2][Many::STEPS][4];
    const auto take_query = [&]() {
        const uint32_t from =
            shared_address(s.sums) + (lane & 15) * Many::ROW + (lane >> 4) * 16 + (warp >> 1) * Many::STEPS * 32;
        __syncthreads();
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int step = 0; step < Many::STEPS; ++step) load_matrices(q[m][step], from + m * 16 * Many::ROW + step * 32);
        __syncthreads();
    };

    const auto records_to_tile = [&](int stage) {
        copy_wait_all();
        __syncwarp();
        unpack(s, s.tile[stage], warp, lane);
    };
    /* A softmax waits for what it loads, unpacking does not: of the two warps that an issue slot is for,
     * one begins with the one, the other with the other. */
    const bool early = warp & 4;

    /* now: softmax and values; next: logits; then a copy, then slots, each a tile further. */
    look(p, ahead, ahead.unit, groups, units);
    enter(p, ahead, groups, units);
    int now = ahead.unit, slot = slot_of();
    bool now_last = ahead.tile + 1 == ahead.tiles, second = ahead.tile >= ahead.tiles0;
    copy_query(now);
    copy_begin(0, slot, second);
#pragma unroll
    for (int row = 0; row < 8; ++row) copy_chunk(row, lane);
    copy_end();
    advance();
    slot = slot_of(), second = ahead.tile >= ahead.tiles0;
    int next = ahead.unit;
    bool next_last = ahead.tile + 1 == ahead.tiles;
    records_to_tile(0);
    take_query();
    copy_begin(1, slot, second);
#pragma unroll
    for (int row = 0; row < 8; ++row) copy_chunk(row, lane);
    copy_end();
    advance();
    slot = slot_of(), second = ahead.tile >= ahead.tiles0;
    logits(s, s.tile[0], q, warp, lane);
    __syncthreads();

    const int softmax_head = warp * 4 + lane / Many::LANES;
    const auto sink_of = [&](int unit) { /* long before it is needed */
        const int head = (groups == 1 ? 0 : unit % groups) * Many::HEADS + softmax_head;
        return p.sink[min(head, p.heads - 1)];
    };
    float sink = sink_of(now);
    float sum[2][8][4] = {}, peak = NONE, total = 0.f;
    for (int stage = 0; now < units; stage ^= 1) {
        if (early) records_to_tile(stage ^ 1);
        softmax(s, stage, p.scale, peak, total, warp, lane);
        if (now_last) {
#pragma unroll
            for (int step = Many::LANES / 2; step > 0; step >>= 1) total += __shfl_xor_sync(ALL, total, step);
            if (lane % Many::LANES == 0) s.last[softmax_head] = share(peak, total, sink);
            peak = NONE, total = 0.f;
        }
        if (!early) records_to_tile(stage ^ 1);
        __syncthreads();

        const int then = ahead.unit;
        const bool then_last = ahead.tile + 1 == ahead.tiles, another = now_last && next < units;
        if (another) copy_query(next);
        copy_begin(stage, slot, second);
        advance();
        slot = slot_of(), second = ahead.tile >= ahead.tiles0;
        float fade[2][2];
        bool fades = false;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                fade[m][i] = s.fade[m * 16 + i * 8 + g];
                fades |= fade[m][i] != 1.f;
            }
        if (__any_sync(ALL, fades)) {
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[m][n][i] *= fade[m][i >> 1];
        }
        outputs(s, s.tile[stage], sum, warp, lane, [&](int k) { copy_chunk(2 * k, lane), copy_chunk(2 * k + 1, lane); });
        copy_end();
        if (now_last) {
            write(p, s, s.tile[stage], sum, now, groups, warp, lane);
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.f;
        }
        if (another) {
            copy_wait<1>();
            take_query();
        }
        logits(s, s.tile[stage ^ 1], q, warp, lane);
        if (now_last && groups > 1) sink = sink_of(next);
        now = next, now_last = next_last;
        next = then, next_last = then_last;
        __syncthreads();
    }
    copy_wait_all();
}

} // namespace attention
