// Rows kept in memory within a budget: set-associative by row id, the oldest of a set goes first.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "rows.hpp"

namespace engram {

class Cache {
  public:
    // Holds nothing where the budget is too small for one set.
    Cache(const Table &table, uint64_t budget);
    ~Cache();
    Cache(const Cache &) = delete;
    Cache &operator=(const Cache &) = delete;

    explicit operator bool() const { return sets_ != 0; }
    uint64_t bytes() const { return used_.load(std::memory_order_relaxed); }

    // Copies the row to its places if it is here.
    bool get(const Plan &plan, const Row &row, Out out);
    void put(int64_t row, const uint8_t *weights, const uint8_t *scales);

  private:
    static constexpr uint64_t kWays = 8, kLocks = 256;

    uint64_t set_of(int64_t row) const;
    uint8_t *slot(uint64_t index) const { return slots_ + index * slot_bytes_; }

    Table table_;
    uint64_t sets_ = 0, slot_bytes_, size_ = 0;
    std::atomic<uint64_t> used_{0};
    // One mapping, touched as it fills: keys (row + 1; 0 is free), then the next way of each set to
    // go, then rows.
    uint64_t *keys_ = nullptr;
    uint8_t *victims_ = nullptr, *slots_ = nullptr;
    std::array<std::mutex, kLocks> locks_;
};

}  // namespace engram
