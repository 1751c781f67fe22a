// Reads by io_uring: one thread keeps `depth` reads in flight and copies rows out as they arrive.
#include "reader.hpp"

#ifndef HAVE_LIBURING

namespace engram {

std::unique_ptr<Reader> make_uring(int, int, uint64_t, std::string &why) {
    why = "built without liburing";
    return nullptr;
}

}  // namespace engram

#else

#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

namespace engram {

namespace {

// Newer than the liburing of some distributions; a kernel that lacks it answers EINVAL.
constexpr unsigned kCoopTaskrun = 1U << 8;
// Rings of one store, for lookups at the same time; more than this wait for one another.
constexpr size_t kRings = 4;
constexpr uint64_t kRingsBytes = 16U << 20;

struct Slot {
    uint32_t extent;
    Progress progress;
};

struct Ring {
    io_uring ring{};
    Pages pages;
    std::vector<Slot> slots;
    std::vector<uint32_t> free;
    uint64_t slot_bytes = 0;
    bool open = false, fixed_file = false, fixed_pages = false;

    ~Ring() {
        if (open) io_uring_queue_exit(&ring);
    }

    // 0, or -errno.
    int start(int fd, int depth, uint64_t bytes) {
        slot_bytes = bytes;
        int status = -EINVAL;
        for (unsigned flags : {kCoopTaskrun, 0U}) {
            io_uring_params params{};
            params.flags = flags;
            status = io_uring_queue_init_params(static_cast<unsigned>(depth), &ring, &params);
            if (status != -EINVAL) break;
        }
        if (status < 0) return status;
        open = true;
        pages = make_pages(static_cast<uint64_t>(depth) * bytes);
        slots.resize(static_cast<size_t>(depth));
        // Both save work for each read; a limit on locked memory may refuse the second.
        fixed_file = io_uring_register_files(&ring, &fd, 1) == 0;
        iovec whole{pages.get(), static_cast<size_t>(depth) * bytes};
        fixed_pages = io_uring_register_buffers(&ring, &whole, 1) == 0;
        return 0;
    }

    uint8_t *at(uint32_t slot) { return pages.get() + slot * slot_bytes; }

    void queue(const Job &job, uint32_t slot) {
        const Extent &extent = job.plan.extents[slots[slot].extent];
        uint32_t done = slots[slot].progress.done;
        io_uring_sqe *entry = io_uring_get_sqe(&ring);  // as many entries as slots: never null
        int fd = fixed_file ? 0 : job.fd;
        if (fixed_pages)
            io_uring_prep_read_fixed(entry, fd, at(slot) + done, extent.bytes - done,
                                     extent.offset + done, 0);
        else
            io_uring_prep_read(entry, fd, at(slot) + done, extent.bytes - done,
                               extent.offset + done);
        if (fixed_file) entry->flags |= IOSQE_FIXED_FILE;
        entry->user_data = slot;
    }
};

class UringReader : public Reader {
  public:
    UringReader(int fd, int depth, uint64_t slot_bytes)
        : fd_(fd), depth_(depth), slot_bytes_(slot_bytes) {
        uint64_t each = static_cast<uint64_t>(depth) * slot_bytes;
        most_ = std::clamp<size_t>(kRingsBytes / each, 1, kRings);
    }

    int start() {
        auto ring = std::make_unique<Ring>();
        int status = ring->start(fd_, depth_, slot_bytes_);
        if (status == 0) {
            made_ = 1;
            idle_.push_back(std::move(ring));
        }
        return status;
    }

    int depth() const override { return depth_; }

    std::optional<Failure> read(const Job &job) override {
        std::unique_ptr<Ring> ring = take();
        if (!ring) return Failure{ENOMEM, 0, job.plan.extents.front()};
        std::optional<Failure> failure;
        if (run(*ring, job, failure))
            give(std::move(ring));
        else
            drop(std::move(ring));
        return failure;
    }

  private:
    // Null only where no ring is left and the kernel gives no other.
    std::unique_ptr<Ring> take() {
        std::unique_lock lock(mutex_);
        if (idle_.empty() && made_ < most_ && (!refused_ || made_ == 0)) {
            ++made_;
            lock.unlock();
            auto ring = std::make_unique<Ring>();
            int status = ring->start(fd_, depth_, slot_bytes_);
            if (status == 0) return ring;
            lock.lock();  // a limit of the machine: the rings that there are must do
            --made_;
            refused_ = true;
            if (made_ == 0) return nullptr;
        }
        returned_.wait(lock, [&] { return !idle_.empty(); });
        auto ring = std::move(idle_.back());
        idle_.pop_back();
        return ring;
    }

    void give(std::unique_ptr<Ring> ring) {
        {
            std::lock_guard lock(mutex_);
            idle_.push_back(std::move(ring));
        }
        returned_.notify_one();
    }

    // A ring whose reads cannot be waited for: the kernel may still write to its pages.
    void drop(std::unique_ptr<Ring> ring) {
        static_cast<void>(ring.release());
        auto fresh = std::make_unique<Ring>();
        if (fresh->start(fd_, depth_, slot_bytes_) == 0) return give(std::move(fresh));
        std::lock_guard lock(mutex_);
        --made_;
    }

    // Whether nothing is in flight any more.
    bool run(Ring &ring, const Job &job, std::optional<Failure> &failure) {
        const std::vector<Extent> &extents = job.plan.extents;
        uint32_t next = 0, flying = 0;
        uint64_t reads = 0, bytes = 0, continued = 0;
        ring.free.clear();
        for (uint32_t i = static_cast<uint32_t>(ring.slots.size()); i-- > 0;)
            ring.free.push_back(i);
        bool fine = true;
        while (true) {
            while (!failure && next < extents.size() && !ring.free.empty()) {
                uint32_t slot = ring.free.back();
                ring.free.pop_back();
                ring.slots[slot] = {next++, {}};
                ring.queue(job, slot);
                ++flying, ++reads;
            }
            if (flying == 0) break;
            // A few at a time: a call for each costs more than it gains.
            unsigned some = std::max(1U, std::min(flying, static_cast<unsigned>(depth_) / 8));
            int status = io_uring_submit_and_wait(&ring.ring, some);
            if (status < 0 && status != -EINTR && status != -EAGAIN && status != -EBUSY) {
                failure = Failure{-status, 0, extents[next ? next - 1 : 0]};
                fine = false;
                break;
            }
            io_uring_cqe *done[64];
            while (unsigned count = io_uring_peek_batch_cqe(&ring.ring, done, 64)) {
                for (unsigned i = 0; i < count; ++i) {
                    auto slot = static_cast<uint32_t>(done[i]->user_data);
                    Progress &progress = ring.slots[slot].progress;
                    const Extent &extent = extents[ring.slots[slot].extent];
                    int64_t result = outcome(extent.offset + progress.done, done[i]->res);
                    if (result > 0) bytes += static_cast<uint64_t>(result);
                    Failure found{};
                    Next verdict = judge(extent, result, progress, found);
                    if (verdict == Next::again && !failure) {
                        ring.queue(job, slot);
                        ++continued;
                        continue;
                    }
                    if (verdict == Next::complete)
                        scatter(job.table, job.plan, extent, ring.at(slot), job.out);
                    if (verdict == Next::failed && !failure) failure = found;
                    ring.free.push_back(slot);
                    --flying;
                }
                io_uring_cq_advance(&ring.ring, count);
            }
        }
        job.counts.reads += reads;
        job.counts.bytes += bytes;
        job.counts.continued += continued;
        return fine;
    }

    int fd_, depth_;
    uint64_t slot_bytes_;
    size_t most_ = 1, made_ = 0;
    bool refused_ = false;
    std::mutex mutex_;
    std::condition_variable returned_;
    std::vector<std::unique_ptr<Ring>> idle_;
};

}  // namespace

std::unique_ptr<Reader> make_uring(int fd, int depth, uint64_t slot_bytes, std::string &why) {
    auto reader = std::make_unique<UringReader>(fd, depth, slot_bytes);
    int status = reader->start();
    if (status == 0) return reader;
    why = "io_uring refused (" + std::string(std::strerror(-status)) + ")";
    return nullptr;
}

}  // namespace engram

#endif
