/* What both teams of many.cuh know: the shared memory between them, which tiles a CTA takes, and where a
 * record lies. */
#pragma once

#include "tile.cuh"

namespace attention {

namespace many {

/* Where a stream is: a unit is a token and up to 32 heads. */
struct alignas(16) Place {
    int unit, tile, tiles0, tiles, limit[2], coming[2]; /* lengths of this unit's records; of the next one's */
};

/* Where a record lies, the lowest bit set where there is none; its scales. */
struct alignas(16) Record {
    uint64_t at;
    const uint8_t *scales;
    __device__ __forceinline__ bool there() const { return (at & 1) == 0; }
};

} // namespace many

struct Many {
    static constexpr int TEAM = 256, THREADS = 2 * TEAM, KEYS = 64, HEADS = 32, OWN = KEYS / 8;
    static constexpr int ROW = 1024 + 16, SUMS_ROW = KEYS + 8, WEIGHTS_ROW = 2 * KEYS + 16;
    static constexpr int STEPS = 32 / PARTS, LANES = 8;
    alignas(16) uint8_t tile[2][KEYS * ROW]; /* bf16 */
    alignas(128) uint8_t raw[KEYS * DATA];   /* chunks of 16 bytes, turned by row: see raw_at */
    alignas(16) uint8_t scales[KEYS * 8];
    alignas(16) float sums[PARTS * HEADS * SUMS_ROW];    /* or the next token's query, rows of ROW */
    alignas(16) uint8_t weights[2][HEADS * WEIGHTS_ROW]; /* bf16 */
    float fade[2][HEADS], last[2][HEADS];
    alignas(16) uint8_t there[2][KEYS];
    many::Record from[2][KEYS];
    many::Place place[8]; /* of each warp of the logits' team, which has no registers left for what it looks at next */
    int unit[4];          /* of the last four tiles, twice, the lowest bit set of a unit's last tile */
};
static_assert(sizeof(Many::sums) >= Many::HEADS * Many::ROW);

namespace many {

constexpr uint32_t ALL = 0xffffffffu;
enum Meeting { LOGITS = 1, VALUES = 2, STEP = 3 };

/* Both teams end a step; each waits in code of its own, so it is no __syncthreads. */
__device__ __forceinline__ void end_step() { meet(STEP, Many::THREADS); }

__device__ __forceinline__ int groups_of(const Launch &p) { return (p.heads + Many::HEADS - 1) / Many::HEADS; }
__device__ __forceinline__ int units_of(const Launch &p) { return p.tokens * groups_of(p); }
__device__ __forceinline__ int token_of(const Launch &p, int unit) {
    return p.heads <= Many::HEADS ? unit : unit / groups_of(p);
}

struct Stream : Place {
    const Launch &p;

    __device__ __forceinline__ explicit Stream(const Launch &p) : p(p) {
        unit = static_cast<int>(blockIdx.x);
        look(unit);
        enter();
    }
    __device__ __forceinline__ bool there() const { return unit < units_of(p); }
    __device__ __forceinline__ bool last() const { return tile + 1 == tiles; }
    __device__ __forceinline__ bool second() const { return tile >= tiles0; }
    /* The lengths of a unit, long before they are needed. */
    __device__ __forceinline__ void look(int at) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Source &from = p.source[i];
            coming[i] = at < units_of(p) ? from.width : 0;
            if (coming[i] && from.lengths) coming[i] = from.lengths[token_of(p, at)];
        }
    }
    __device__ __forceinline__ void enter() {
#pragma unroll
        for (int i = 0; i < 2; ++i) limit[i] = min(max(coming[i], 0), p.source[i].width);
        tile = 0;
        tiles0 = (limit[0] + Many::KEYS - 1) / Many::KEYS;
        tiles = max(1, tiles0 + (limit[1] + Many::KEYS - 1) / Many::KEYS); /* without records: zeros */
        look(unit + static_cast<int>(gridDim.x));
    }
    __device__ __forceinline__ void advance() {
        if (++tile < tiles) return;
        unit += static_cast<int>(gridDim.x);
        enter();
    }
    /* Of record `row` of the tile: its slot, negative where there is none. */
    __device__ __forceinline__ int slot(int row) const {
        const bool other = second();
        const int column = (other ? tile - tiles0 : tile) * Many::KEYS + row;
        const Source &from = p.source[other ? 1 : 0];
        if (!there() || column >= (other ? limit[1] : limit[0])) return -1;
        return from.slots[token_of(p, unit) * from.slots_row + column];
    }
};

__device__ __forceinline__ Record record_of(const Launch &p, int slot, bool second) {
    const Source &from = p.source[second ? 1 : 0];
    if (slot < 0) return {reinterpret_cast<uint64_t>(from.cache) | 1, from.cache};
    const int page = from.shift >= 0 ? slot >> from.shift : slot / from.page, offset = slot - page * from.page;
    const uint8_t *begin = from.cache + page * from.stride;
    return {reinterpret_cast<uint64_t>(begin + static_cast<int64_t>(offset) * DATA),
            begin + static_cast<int64_t>(from.page) * DATA + offset * 8};
}

/* Where a record's chunk lies in `raw`: each 64 bytes, which are what L2 answers with, in one 64 bytes, and
 * the same chunk of rows that are read together on different banks. */
__device__ __forceinline__ int raw_at(int row, int chunk) { return row * DATA + (chunk ^ (row >> 1 & 3)) * 16; }

} // namespace many
} // namespace attention
