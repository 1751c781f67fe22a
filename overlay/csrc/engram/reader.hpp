// The two ways to read a plan's extents, and what they share: when a read is done, goes on or fails.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "rows.hpp"

namespace engram {

struct Failure {
    int error;     // errno, or 0: the file ended
    uint64_t got;  // bytes from the extent's begin that are there
    Extent extent;
};

struct Counts {
    std::atomic<uint64_t> reads{0}, bytes{0}, continued{0};
};

struct Job {
    int fd;
    const Table &table;
    const Plan &plan;
    Out out;
    Counts &counts;
};

class Reader {
  public:
    virtual ~Reader() = default;
    // Fills the job's places, or says which read failed first; nothing is in flight afterwards.
    virtual std::optional<Failure> read(const Job &job) = 0;
    virtual int depth() const = 0;
};

// How far a read got, when it may need more than one call.
struct Progress {
    uint32_t done = 0;   // bytes in the buffer; whole pages until the last call
    uint32_t tries = 0;  // calls that brought nothing
};

enum class Next : uint8_t { complete, again, failed };

// Judges one call's result (bytes, or -errno) for an extent. Sets `failure` if it failed.
Next judge(const Extent &extent, int64_t result, Progress &progress, Failure &failure);

// For tests: sees each call's offset and result, and answers the result to go on with.
using Hook = int64_t (*)(uint64_t offset, int64_t result);
extern std::atomic<Hook> outcome_hook;

inline int64_t outcome(uint64_t offset, int64_t result) {
    Hook hook = outcome_hook.load(std::memory_order_acquire);
    return hook ? hook(offset, result) : result;
}

// Page-aligned memory.
struct Free {
    void operator()(uint8_t *memory) const { std::free(memory); }
};
using Pages = std::unique_ptr<uint8_t[], Free>;

inline Pages make_pages(uint64_t bytes) {
    auto *memory = static_cast<uint8_t *>(std::aligned_alloc(kPage, bytes));
    if (!memory) throw std::bad_alloc();
    return Pages(memory);
}

// Null with the reason in `why` where the kernel refuses io_uring or it was not compiled in.
std::unique_ptr<Reader> make_uring(int fd, int depth, uint64_t slot_bytes, std::string &why);
std::unique_ptr<Reader> make_pool(int threads, uint64_t slot_bytes);

}  // namespace engram
