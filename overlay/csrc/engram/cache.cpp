#include "cache.hpp"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace engram {

Cache::Cache(const Table &table, uint64_t budget)
    : table_(table), slot_bytes_(table.weights.bytes + table.scales.bytes) {
    uint64_t set_bytes = kWays * (sizeof(uint64_t) + slot_bytes_) + 1;
    uint64_t most = (static_cast<uint64_t>(table.hi - table.lo) + kWays - 1) / kWays;
    sets_ = budget / set_bytes < most ? budget / set_bytes : most;
    if (sets_ == 0) return;
    size_ = sets_ * set_bytes;
    void *memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    keys_ = static_cast<uint64_t *>(memory);
    victims_ = reinterpret_cast<uint8_t *>(keys_ + sets_ * kWays);
    slots_ = victims_ + sets_;
}

Cache::~Cache() {
    if (keys_) munmap(keys_, size_);
}

uint64_t Cache::set_of(int64_t row) const {
    // Rows of one n-gram lie far apart, those of small tables side by side: mixed, both spread.
    auto mixed = static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15ULL;
    return static_cast<uint64_t>((static_cast<unsigned __int128>(mixed) * sets_) >> 64);
}

bool Cache::get(const Plan &plan, const Row &row, Out out) {
    uint64_t set = set_of(row.row), key = static_cast<uint64_t>(row.row) + 1;
    std::lock_guard lock(locks_[set % kLocks]);
    for (uint64_t i = set * kWays; i < (set + 1) * kWays; ++i) {
        if (keys_[i] != key) continue;
        place(table_, plan, row, slot(i), slot(i) + table_.weights.bytes, out);
        return true;
    }
    return false;
}

void Cache::put(int64_t row, const uint8_t *weights, const uint8_t *scales) {
    uint64_t set = set_of(row), key = static_cast<uint64_t>(row) + 1;
    std::lock_guard lock(locks_[set % kLocks]);
    for (uint64_t i = set * kWays; i < (set + 1) * kWays; ++i)
        if (keys_[i] == key) return;  // another thread was first
    uint64_t at = set * kWays + victims_[set];
    victims_[set] = static_cast<uint8_t>((victims_[set] + 1) % kWays);
    if (keys_[at] == 0) used_.fetch_add(slot_bytes_ + sizeof key, std::memory_order_relaxed);
    keys_[at] = key;
    std::memcpy(slot(at), weights, table_.weights.bytes);
    std::memcpy(slot(at) + table_.weights.bytes, scales, table_.scales.bytes);
}

}  // namespace engram
