/* Which rows go to which expert, found on the device, and what lies around the products.
 *
 * Rows stand in groups of eight of one entry of the table (expert; the shared one is the last entry),
 * groups in the order of entries, the shared one's first. A wave is `wave` groups in a row: as many as
 * the pool holds rotated inputs of. An item is what a CTA takes: groups of one entry and one wave. */
#pragma once

#include "hadamard.cuh"

namespace exl3 {

constexpr int MAX_ENTRIES = 2048;
constexpr int MAX_WAVES = 60;
/* A CTA's loads may run past its item's groups, up to a whole item: room behind the last group. */
constexpr int SPARE_GROUPS = 16;

struct RouteHead {
    int32_t groups, items, reserved[2];
    int32_t wave_item[MAX_WAVES + 4]; /* the first item of each wave, and one past the last */
};

struct RouteLaunch {
    const __nv_bfloat16 *x;
    int64_t x_stride;
    const void *ids;
    const int64_t *table;
    void *y;
    int64_t y_stride;
    RouteHead *head;
    int4 *items;       /* entry, first group, groups */
    int32_t *entry_of; /* [groups] */
    int32_t *slot_of;  /* [groups * 8]: token * topk + choice; slots + token of a shared row; -1 */
    uint2 *inputs;     /* [gate, up][wave + SPARE_GROUPS][k-tiles of hidden][lane]: rotated, operands B */
    float *sums;       /* [gate, up][wave * 8]: of those inputs */
    int32_t id_bytes, tokens, topk, slots, experts, first_id, shared, fp32;
    int32_t blocks;    /* k-blocks of hidden */
    int32_t wave;      /* groups */
    int32_t waves;
    int32_t most;      /* groups an item */
};

__device__ __forceinline__ int slot_entry(const RouteLaunch &p, int slot) {
    const int64_t id = p.id_bytes == 8 ? __ldg(static_cast<const long long *>(p.ids) + slot)
                                       : __ldg(static_cast<const int32_t *>(p.ids) + slot);
    const int64_t entry = id - p.first_id;
    return entry >= 0 && entry < p.experts ? static_cast<int>(entry) : -1;
}

} // namespace exl3
