#include "store.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace engram {

namespace {

// Ids of one plan: 8192 tokens of 12 columns and more; bounds the memory of a lookup.
constexpr int64_t kBlock = 1 << 17;
constexpr size_t kPlansKept = 4;
// Neighbours are read together up to this many bytes.
constexpr uint64_t kSlot = 4 * kPage;
constexpr uint64_t kLongestRow = 1 << 16;

std::string number(uint64_t value) { return std::to_string(value); }
std::string number(int64_t value) { return std::to_string(value); }

[[noreturn]] void fail(int code, const std::string &text) { throw Error(code, text); }

Table table_of(const engram_config &config) {
    Table table{{config.weight_begin, config.weight_stride, config.weight_bytes},
                {config.scale_begin, config.scale_stride, config.scale_bytes},
                config.rows,
                config.lo,
                config.hi,
                config.first_row};
    std::string path = config.path ? config.path : "";
    if (table.lo < 0 || table.lo > table.hi || table.hi > table.rows || table.first < 0 ||
        table.first > table.lo)
        fail(ENGRAM_OTHER, path + ": rows " + number(table.lo) + ".." + number(table.hi) +
                               " asked of a table of " + number(table.rows) +
                               " rows; use EngramLayout.rank_range");
    for (const Region &region : {table.weights, table.scales})
        if (region.bytes == 0 || region.bytes > kLongestRow || region.stride < region.bytes)
            fail(ENGRAM_OTHER, path + ": rows of " + number(region.bytes) + " bytes, " +
                                   number(region.stride) + " apart, are no Engram rows");
    return table;
}

int number_of(int asked, const char *what) {
    if (asked < 1 || asked > 4096)
        fail(ENGRAM_OTHER, std::string(what) + " is " + std::to_string(asked) +
                               ", expected 1 to 4096 reads in flight");
    return asked;
}

}  // namespace

File::File(const engram_config &config, const Table &table) {
    std::string path = config.path ? config.path : "";
    auto refused = [&](const char *what) {
        int error = errno;
        if (fd >= 0) ::close(fd);
        fail(ENGRAM_READ, path + ": cannot be " + what + " (" + std::strerror(error) +
                              "). Check the path and its permissions");
    };
    struct stat found {};
    if (::stat(path.c_str(), &found) != 0) refused("opened");
    if (!S_ISREG(found.st_mode))  // asked before opening: a pipe would wait for its writer
        fail(ENGRAM_READ, path + ": is no regular file. Point to the file with the table");
    if (config.direct) {
        fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
        int error = fd < 0 ? errno : 0;
        if (fd < 0 && error != EINVAL && error != ENOTSUP) refused("opened");
        if (fd >= 0 && table.hi > table.lo) {  // some file systems refuse only the read
            uint64_t at = table.at(table.weights, table.lo) & ~(kPage - 1);
            Pages page = make_pages(kPage);
            int64_t got = ::pread(fd, page.get(), kPage, static_cast<off_t>(at));
            got = outcome(at, got < 0 ? -errno : got);
            if (got < 0) error = static_cast<int>(-got);
        }
        direct = error == 0;
        if (error == EINVAL || error == ENOTSUP) {
            note = std::string("O_DIRECT refused (") + std::strerror(error) + ")";
            if (fd >= 0) ::close(fd);
            fd = -1;
        } else if (error) {
            errno = error;
            refused("read");
        }
    }
    if (fd < 0) {
        fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) refused("opened");
        ::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);  // no pages beside those of the rows
    }
    if (::fstat(fd, &found) != 0) refused("opened");
    auto size = static_cast<uint64_t>(found.st_size);
    uint64_t needed = config.file_bytes ? config.file_bytes : table.end();
    if (config.file_bytes ? size != needed : size < needed) {
        ::close(fd);
        fail(ENGRAM_READ, path + ": is " + number(size) + " bytes long, but " +
                              (config.name ? config.name : "its table") + " makes it " +
                              number(needed) +
                              (size < needed ? ": it is truncated" : ": it is another file") +
                              ". Make or download it again");
    }
}

File::~File() {
    if (fd >= 0) ::close(fd);
}

Store::Store(const engram_config &config)
    : path_(config.path ? config.path : ""),
      name_(config.name ? config.name : "the table"),
      table_(table_of(config)),
      slot_bytes_(std::max(kSlot, table_.longest())),
      file_(config, table_),
      cache_(table_, config.cache_bytes) {
    int depth = number_of(config.queue_depth, "the queue depth");
    int threads = number_of(config.threads, "the number of threads");
    std::string why;
    if (config.backend != ENGRAM_POOL) {
        reader_ = make_uring(file_.fd, depth, slot_bytes_, why);
        if (!reader_ && config.backend == ENGRAM_URING)
            fail(ENGRAM_OTHER, path_ + ": " + why + ". Choose the pool of threads");
    }
    backend_ = reader_ ? "io_uring" : "pool";
    if (!reader_) reader_ = make_pool(threads, slot_bytes_);
    backend_ += file_.direct ? ", direct" : ", buffered";
    for (const std::string &note : {why, file_.note})
        if (!note.empty()) backend_ += "; " + note;
}

void Store::check(const int64_t *ids, int64_t n) const {
    int64_t beyond = 0, first = 0;
    for (int64_t i = n; i-- > 0;)
        if (ids[i] >= table_.rows) ++beyond, first = ids[i];
    if (beyond)
        fail(ENGRAM_BAD_ID, path_ + ": row " + number(first) + " asked of " + name_ + " of " +
                                number(table_.rows) + " rows (" + number(beyond) +
                                " such ids): the ids are of another layout or another layer");
}

void Store::lookup(const int64_t *ids, int64_t n, Out out) {
    using Clock = std::chrono::steady_clock;
    auto began = Clock::now();
    check(ids, n);
    Plan plan = take();
    for (int64_t at = 0; at < n; at += kBlock) {
        Out here{out.weights + static_cast<uint64_t>(at) * table_.weights.bytes,
                 out.scales + static_cast<uint64_t>(at) * table_.scales.bytes};
        block(plan, ids + at, static_cast<uint32_t>(std::min(kBlock, n - at)), here);
    }
    give(std::move(plan));
    uint64_t took = static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began).count());
    lookups_ += 1;
    ids_ += static_cast<uint64_t>(n);
    time_ += took;
    uint64_t longest = longest_.load();
    while (took > longest && !longest_.compare_exchange_weak(longest, took)) {
    }
}

void Store::block(Plan &plan, const int64_t *ids, uint32_t count, Out out) {
    plan.want(table_, ids, count, out);
    owned_ += plan.places.size();
    rows_ += plan.rows.size();
    if (cache_) {
        size_t before = plan.rows.size();
        std::erase_if(plan.rows, [&](const Row &row) { return cache_.get(plan, row, out); });
        hits_ += before - plan.rows.size();
    }
    plan.cut(table_, slot_bytes_);
    if (plan.extents.empty()) return;
    if (auto failure = reader_->read({file_.fd, table_, plan, out, counts_}))
        fail(ENGRAM_READ, told(plan, *failure));
    if (!cache_) return;
    for (const Row &row : plan.rows) {
        uint64_t at = plan.places[row.begin];
        cache_.put(row.row, out.weights + at * table_.weights.bytes,
                   out.scales + at * table_.scales.bytes);
    }
}

std::string Store::told(const Plan &plan, const Failure &failure) const {
    const Extent &extent = failure.extent;
    uint64_t there = extent.offset + failure.got;
    // The first row of the read that did not come whole.
    uint32_t i = extent.first;
    Piece at = piece(table_, extent.part, plan.rows[i].row);
    while (i + 1 < extent.last && at.offset + at.bytes <= there)
        at = piece(table_, extent.part, plan.rows[++i].row);
    std::string what = path_ + (extent.part == Part::scales ? ": scales of row " : ": row ") +
                       number(plan.rows[i].row) + " of " + name_;
    if (failure.error)
        return what + " at byte " + number(at.offset) + " cannot be read (" +
               std::strerror(failure.error) +
               "). Stop the server and look after the drive and its file system; dmesg says more";
    uint64_t have = there > at.offset ? std::min(there - at.offset, at.bytes) : 0;
    return what + " gave " + number(have) + " of " + number(at.bytes) + " bytes at byte " +
           number(at.offset) + ": the file is shorter than its header says. Stop the server and " +
           (table_.together() ? "pack this file again" : "download this shard again");
}

void Store::stats(uint64_t *out) const {
    std::fill(out, out + ENGRAM_STATS, 0);
    out[ENGRAM_LOOKUPS] = lookups_;
    out[ENGRAM_IDS] = ids_;
    out[ENGRAM_OWNED_IDS] = owned_;
    out[ENGRAM_ROWS] = rows_;
    out[ENGRAM_READS] = counts_.reads;
    out[ENGRAM_BYTES] = counts_.bytes;
    out[ENGRAM_NANOSECONDS] = time_;
    out[ENGRAM_LONGEST_NANOSECONDS] = longest_;
    out[ENGRAM_CACHE_HITS] = hits_;
    out[ENGRAM_CONTINUED] = counts_.continued;
    out[ENGRAM_DIRECT] = file_.direct;
    out[ENGRAM_DEPTH] = static_cast<uint64_t>(reader_->depth());
    out[ENGRAM_CACHE_BYTES] = cache_.bytes();
}

Plan Store::take() {
    std::lock_guard lock(mutex_);
    if (plans_.empty()) return {};
    Plan plan = std::move(plans_.back());
    plans_.pop_back();
    return plan;
}

void Store::give(Plan plan) {
    std::lock_guard lock(mutex_);
    if (plans_.size() < kPlansKept) plans_.push_back(std::move(plan));
}

}  // namespace engram
