/* The logits' team of many.cuh: eight warps, each 128 dimensions of half a tile's keys, then the softmax of
 * four heads. */
#pragma once

#include "many_stream.cuh"

namespace attention::many {

struct LogitsTeam {
    const Launch &p;
    Many &s;
    const int warp, lane;
    Stream ahead;
    int slot;                      /* of record lane % 8 of the warp's eight of the tile `ahead` */
    uint32_t q[2][Many::STEPS][4]; /* the warp's part of the query, for all of a token's tiles */
    float peak = NONE, total = 0.f;

    __device__ __forceinline__ LogitsTeam(const Launch &p, Many &s, int warp, int lane)
        : p(p), s(s), warp(warp), lane(lane), ahead(p) {}

    __device__ __forceinline__ int head0(int unit) const {
        return (p.heads <= Many::HEADS ? 0 : unit % groups_of(p)) * Many::HEADS;
    }

    /* Asks for the slots of the tile `ahead`, long before `tell` needs them. */
    __device__ __forceinline__ void ask() {
        static_cast<Place &>(ahead) = s.place[warp];
        slot = ahead.slot(warp * Many::OWN + (lane & 7));
    }

    /* Says where the records of that tile lie, which is tile `i`, and goes on to the next. */
    __device__ __forceinline__ void tell(int i) {
        static_cast<Place &>(ahead) = s.place[warp];
        if (lane < Many::OWN) s.from[i & 1][warp * Many::OWN + lane] = record_of(p, slot, ahead.second());
        if (warp == 0 && lane == 0) s.unit[i & 3] = 2 * ahead.unit + (ahead.last() ? 1 : 0);
        ahead.advance();
        keep();
    }
    __device__ __forceinline__ void keep() {
        __syncwarp();
        if (lane == 0) s.place[warp] = ahead;
        __syncwarp();
    }

    /* By way of the place of the sums, which is free just then. */
    __device__ __forceinline__ void copy_query(int unit) {
        const int thread = warp * 32 + lane, token = token_of(p, unit);
#pragma unroll
        for (int i = 0; i < Many::HEADS / 4; ++i) {
            const int row = i * 4 + (thread >> 6), chunk = thread & 63;
            copy16(shared_address(s.sums) + row * Many::ROW + chunk * 16,
                   p.q + token * p.q_token + min(head0(unit) + row, p.heads - 1) * p.q_head + chunk * 8, true);
        }
        copy_commit();
    }

    __device__ __forceinline__ void take_query() {
        const uint32_t from =
            shared_address(s.sums) + (lane & 15) * Many::ROW + (lane >> 4) * 16 + (warp >> 1) * Many::STEPS * 32;
        copy_wait_all();
        meet(LOGITS, Many::TEAM);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int step = 0; step < Many::STEPS; ++step)
                load_matrices(q[m][step], from + m * 16 * Many::ROW + step * 32);
        meet(LOGITS, Many::TEAM); /* before anything else comes there */
    }

    /* The warp's 128 dimensions times 32 keys. */
    __device__ __forceinline__ void logits(const uint8_t *from) {
        const int part = warp >> 1, key = (warp & 1) * (Many::KEYS / 2);
        const uint32_t tile = shared_address(from) + (key + (lane & 7) + (lane >> 4) * 8) * Many::ROW +
                              (lane >> 3 & 1) * 16 + part * Many::STEPS * 32;
#pragma unroll 1
        for (int n = 0; n < Many::KEYS / 32; ++n) { /* 16 keys at once: no registers for more */
            float sum[2][2][4] = {};
#pragma unroll
            for (int step = 0; step < Many::STEPS; ++step) {
                uint32_t b[4];
                load_matrices(b, tile + n * 16 * Many::ROW + step * 32);
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int m = 0; m < 2; ++m) mma_bf16(sum[i][m], q[m][step], b[2 * i], b[2 * i + 1]);
            }
            float *to = s.sums + (part * Many::HEADS + (lane >> 2)) * Many::SUMS_ROW + key + n * 16 + 2 * (lane & 3);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    float *row = to + m * 16 * Many::SUMS_ROW + i * 8;
                    *reinterpret_cast<float2 *>(row) = make_float2(sum[i][m][0], sum[i][m][1]);
                    *reinterpret_cast<float2 *>(row + 8 * Many::SUMS_ROW) = make_float2(sum[i][m][2], sum[i][m][3]);
                }
        }
    }

    /* Logits of the warp's four heads, eight lanes each, to weights; what was summed before fades. */
    __device__ __forceinline__ void softmax(int stage) {
        constexpr int N = Many::KEYS / 32;
        const int head = warp * 4 + lane / Many::LANES, first = lane % Many::LANES * 4;
        float value[4 * N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int key = n * 32 + first;
            float4 x[PARTS];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                x[part] =
                    *reinterpret_cast<const float4 *>(s.sums + (part * Many::HEADS + head) * Many::SUMS_ROW + key);
            const float sum[4] = {
                ((x[0].x + x[1].x) + x[2].x) + x[3].x, ((x[0].y + x[1].y) + x[2].y) + x[3].y,
                ((x[0].z + x[1].z) + x[2].z) + x[3].z, ((x[0].w + x[1].w) + x[2].w) + x[3].w};
            const uint32_t there = *reinterpret_cast<const uint32_t *>(s.there[stage] + key);
#pragma unroll
            for (int i = 0; i < 4; ++i) value[4 * n + i] = there >> 8 * i & 1 ? sum[i] * p.scale : NONE;
        }
        float top = value[0];
#pragma unroll
        for (int i = 1; i < 4 * N; ++i) top = fmaxf(top, value[i]);
#pragma unroll
        for (int step = Many::LANES / 2; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
        top = fmaxf(top, peak); /* exact: the largest weight is 1, which bf16 has */
        const float base = top == NONE ? 0.f : top; /* nothing seen yet: 0 - inf, not inf - inf */
        const float fade = power(peak - base);
        peak = top;
        total *= fade;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float weight[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                weight[i] = power(value[4 * n + i] - base);
                total += weight[i]; /* of this lane's keys; added up at the end */
            }
            *reinterpret_cast<uint2 *>(s.weights[stage] + head * Many::WEIGHTS_ROW + 2 * (n * 32 + first)) =
                make_uint2(pack_bf16(weight[0], weight[1]), pack_bf16(weight[2], weight[3]));
        }
        if (first == 0) s.fade[stage][head] = fade;
    }

    __device__ __forceinline__ void run() {
        const int head = warp * 4 + lane / Many::LANES;
        const auto sink_of = [&](int unit) { return p.sink[min(head0(unit) + head, p.heads - 1)]; };
        keep();
        ask();
        tell(0);
        end_step(); /* it is known where tile 0 lies */
        ask();
        tell(1);
        int unit = s.unit[0] >> 1;
        bool fresh = true; /* the tile is a unit's first */
        if (unit < units_of(p)) copy_query(unit);
        float sink = sink_of(unit); /* long before it is needed */
        end_step();                 /* tile 0 is there */
        for (int i = 0; unit < units_of(p); ++i) {
            const int stage = i & 1;
            if (fresh) take_query();
            ask();
            logits(s.tile[stage]);
            meet(LOGITS, Many::TEAM);
            softmax(stage);
            fresh = s.unit[i & 3] & 1;
            unit = s.unit[i + 1 & 3] >> 1;
            if (fresh) {
#pragma unroll
                for (int step = Many::LANES / 2; step > 0; step >>= 1) total += __shfl_xor_sync(ALL, total, step);
                if (lane % Many::LANES == 0) s.last[stage][head] = share(peak, total, sink);
                peak = NONE, total = 0.f;
                if (unit < units_of(p)) {
                    meet(LOGITS, Many::TEAM); /* nobody reads the sums any more */
                    copy_query(unit);
                    if (p.heads > Many::HEADS) sink = sink_of(unit);
                }
            }
            tell(i + 2);
            end_step();
        }
        end_step(); /* the values' team's last step */
    }
};

} // namespace attention::many
