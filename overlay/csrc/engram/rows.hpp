// From ids to reads: which rows are wanted, where they lie, which pages cover them. No I/O here.
#pragma once

#include <cstdint>
#include <vector>

namespace engram {

// Of addresses, lengths and offsets of all reads: what O_DIRECT asks for on any drive.
inline constexpr uint64_t kPage = 4096;

struct Region {
    uint64_t begin, stride, bytes;
};

struct Table {
    Region weights, scales;
    int64_t rows, lo, hi, first;

    // Whether a row's scales follow its weights, so that one read gives both.
    bool together() const {
        return scales.begin == weights.begin + weights.bytes && scales.stride == weights.stride;
    }
    uint64_t at(const Region &region, int64_t row) const {
        return region.begin + static_cast<uint64_t>(row - first) * region.stride;
    }
    // The first byte behind the owned rows.
    uint64_t end() const;
    // Bytes of the longest read that one row alone can need.
    uint64_t longest() const;
};

struct Out {
    uint8_t *weights, *scales;
};

// A distinct row, wanted at places[begin..end).
struct Row {
    int64_t row;
    uint32_t begin, end;
};

enum class Part : uint8_t { both, weights, scales };

// One read: whole pages that hold the rows [first, last) of the plan.
struct Extent {
    uint64_t offset;
    uint32_t bytes;
    uint32_t need;  // up to the end of its last row; the file may end before the last page does
    uint32_t first, last;
    Part part;
};

struct Piece {
    uint64_t offset, bytes;
};

struct Plan {
    std::vector<Row> rows;  // ascending
    std::vector<uint32_t> places;
    std::vector<Extent> extents;

    // Sorts and de-duplicates the owned ids; the other places of `out` are filled with zeros.
    void want(const Table &table, const int64_t *ids, uint32_t count, Out out);
    // Cuts `rows` into reads of at most `limit` bytes each; neighbours share one.
    void cut(const Table &table, uint64_t limit);

  private:
    struct Wanted {
        int64_t row;
        uint32_t place;
    };
    std::vector<Wanted> wanted_;

    void cut(const Table &table, Part part, uint64_t limit);
};

// Where a part of a row lies.
Piece piece(const Table &table, Part part, int64_t row);

// Copies the rows of an extent from its pages to all places that want them.
void scatter(const Table &table, const Plan &plan, const Extent &extent, const uint8_t *pages,
             Out out);

// Copies one row to its places.
void place(const Table &table, const Plan &plan, const Row &row, const uint8_t *weights,
           const uint8_t *scales, Out out);

}  // namespace engram
