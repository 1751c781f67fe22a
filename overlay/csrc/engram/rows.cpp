#include "rows.hpp"

#include <algorithm>
#include <cstring>

namespace engram {

namespace {

uint64_t down(uint64_t value) { return value & ~(kPage - 1); }
uint64_t up(uint64_t value) { return down(value + kPage - 1); }

}  // namespace

uint64_t Table::end() const {
    if (hi == lo) return 0;
    return std::max(at(weights, hi - 1) + weights.bytes, at(scales, hi - 1) + scales.bytes);
}

uint64_t Table::longest() const {
    uint64_t bytes = std::max(weights.bytes, scales.bytes);
    if (together()) bytes = weights.bytes + scales.bytes;
    return up(bytes + kPage - 1);
}

Piece piece(const Table &table, Part part, int64_t row) {
    if (part == Part::scales) return {table.at(table.scales, row), table.scales.bytes};
    uint64_t more = part == Part::both ? table.scales.bytes : 0;
    return {table.at(table.weights, row), table.weights.bytes + more};
}

void Plan::want(const Table &table, const int64_t *ids, uint32_t count, Out out) {
    rows.clear();
    places.clear();
    extents.clear();
    wanted_.clear();
    for (uint32_t i = 0; i < count; ++i) {
        if (ids[i] >= table.lo && ids[i] < table.hi) {
            wanted_.push_back({ids[i], i});
            continue;
        }
        std::memset(out.weights + i * table.weights.bytes, 0, table.weights.bytes);
        std::memset(out.scales + i * table.scales.bytes, 0, table.scales.bytes);
    }
    std::sort(wanted_.begin(), wanted_.end(), [](const Wanted &a, const Wanted &b) {
        return a.row != b.row ? a.row < b.row : a.place < b.place;
    });
    for (const Wanted &wanted : wanted_) {
        auto at = static_cast<uint32_t>(places.size());
        if (rows.empty() || rows.back().row != wanted.row) rows.push_back({wanted.row, at, at});
        places.push_back(wanted.place);
        rows.back().end = at + 1;
    }
}

void Plan::cut(const Table &table, uint64_t limit) {
    extents.clear();
    if (table.together()) {
        cut(table, Part::both, limit);
    } else {
        cut(table, Part::weights, limit);
        cut(table, Part::scales, limit);
    }
}

void Plan::cut(const Table &table, Part part, uint64_t limit) {
    bool fresh = true;
    for (uint32_t i = 0; i < rows.size(); ++i) {
        Piece wanted = piece(table, part, rows[i].row);
        uint64_t begin = down(wanted.offset), end = wanted.offset + wanted.bytes;
        if (!fresh) {
            Extent &last = extents.back();
            if (begin <= last.offset + last.bytes && up(end) - last.offset <= limit) {
                last.bytes = static_cast<uint32_t>(up(end) - last.offset);
                last.need = static_cast<uint32_t>(end - last.offset);
                last.last = i + 1;
                continue;
            }
        }
        extents.push_back({begin, static_cast<uint32_t>(up(end) - begin),
                           static_cast<uint32_t>(end - begin), i, i + 1, part});
        fresh = false;
    }
}

void place(const Table &table, const Plan &plan, const Row &row, const uint8_t *weights,
           const uint8_t *scales, Out out) {
    for (uint32_t i = row.begin; i < row.end; ++i) {
        uint64_t at = plan.places[i];
        if (weights)
            std::memcpy(out.weights + at * table.weights.bytes, weights, table.weights.bytes);
        if (scales) std::memcpy(out.scales + at * table.scales.bytes, scales, table.scales.bytes);
    }
}

void scatter(const Table &table, const Plan &plan, const Extent &extent, const uint8_t *pages,
             Out out) {
    for (uint32_t i = extent.first; i < extent.last; ++i) {
        const Row &row = plan.rows[i];
        const uint8_t *bytes = pages + (piece(table, extent.part, row.row).offset - extent.offset);
        bool both = extent.part == Part::both, scales = extent.part == Part::scales;
        place(table, plan, row, scales ? nullptr : bytes,
              both ? bytes + table.weights.bytes : (scales ? bytes : nullptr), out);
    }
}

}  // namespace engram
