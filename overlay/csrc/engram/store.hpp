// One table of one rank: checks ids, plans, reads, counts.
#pragma once

#include <stdexcept>
#include <vector>

#include "api.h"
#include "cache.hpp"
#include "reader.hpp"

namespace engram {

// What went wrong and what to do; `code` is the API's.
struct Error : std::runtime_error {
    Error(int code, const std::string &text) : std::runtime_error(text), code(code) {}
    int code;
};

class File {
  public:
    // A regular file at least `needed` bytes long; `direct` says how it was opened.
    File(const engram_config &config, const Table &table);
    ~File();
    File(const File &) = delete;
    File &operator=(const File &) = delete;

    int fd = -1;
    bool direct = false;
    std::string note;  // why it is not direct, if so
};

class Store {
  public:
    explicit Store(const engram_config &config);

    // Throws Error.
    void lookup(const int64_t *ids, int64_t n, Out out);
    void stats(uint64_t *out) const;
    const char *backend() const { return backend_.c_str(); }

  private:
    void check(const int64_t *ids, int64_t n) const;
    void block(Plan &plan, const int64_t *ids, uint32_t count, Out out);
    Plan take();
    void give(Plan plan);
    std::string told(const Plan &plan, const Failure &failure) const;

    std::string path_, name_, backend_;
    Table table_;
    uint64_t slot_bytes_;
    File file_;
    Cache cache_;
    std::unique_ptr<Reader> reader_;
    Counts counts_;
    std::atomic<uint64_t> lookups_{0}, ids_{0}, owned_{0}, rows_{0}, hits_{0}, time_{0},
        longest_{0};
    std::mutex mutex_;
    std::vector<Plan> plans_;  // their memory, kept for the next lookup
};

}  // namespace engram
