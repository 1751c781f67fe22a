// Reads by a pool of threads with one pread each: for kernels and containers that refuse io_uring.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "reader.hpp"

namespace engram {

std::atomic<Hook> outcome_hook{nullptr};

Next judge(const Extent &extent, int64_t result, Progress &progress, Failure &failure) {
    constexpr uint32_t kTries = 100;
    if (result == -EINTR || result == -EAGAIN) {
        if (++progress.tries < kTries) return Next::again;
    }
    if (result <= 0) {
        failure = {static_cast<int>(-result), progress.done, extent};
        return Next::failed;
    }
    uint64_t got = progress.done + static_cast<uint64_t>(result);
    if (got >= extent.need) return Next::complete;
    // A direct read can only go on at a page; bytes behind the last whole page are read again. If
    // they stay as few, the file ends here.
    auto whole = static_cast<uint32_t>(got & ~(kPage - 1));
    if (whole == progress.done && ++progress.tries > 2) {
        failure = {0, got, extent};
        return Next::failed;
    }
    if (whole > progress.done) progress = {whole, 0};
    return Next::again;
}

namespace {

struct Batch {
    explicit Batch(const Job &what) : job(what) {}

    const Job &job;
    std::atomic<size_t> next{0};
    std::atomic<bool> stop{false};
    std::mutex mutex;
    std::optional<Failure> failure;
    // Guarded by the pool's mutex.
    int helpers = 0;
    bool queued = true;
    std::condition_variable left;

    bool open() const {
        return next.load(std::memory_order_relaxed) < job.plan.extents.size() &&
               !stop.load(std::memory_order_relaxed);
    }
};

void run(Batch &batch, uint8_t *pages) {
    const Job &job = batch.job;
    const std::vector<Extent> &extents = job.plan.extents;
    uint64_t reads = 0, bytes = 0, continued = 0;
    while (!batch.stop.load(std::memory_order_relaxed)) {
        size_t index = batch.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= extents.size()) break;
        const Extent &extent = extents[index];
        Progress progress;
        Failure failure{};
        Next verdict = Next::again;
        ++reads;
        while (true) {
            uint64_t at = extent.offset + progress.done;
            int64_t result = pread(job.fd, pages + progress.done, extent.bytes - progress.done,
                                   static_cast<off_t>(at));
            result = outcome(at, result < 0 ? -errno : result);
            if (result > 0) bytes += static_cast<uint64_t>(result);
            verdict = judge(extent, result, progress, failure);
            if (verdict != Next::again) break;
            ++continued;
        }
        if (verdict == Next::complete) {
            scatter(job.table, job.plan, extent, pages, job.out);
            continue;
        }
        std::lock_guard lock(batch.mutex);
        if (!batch.failure) batch.failure = failure;
        batch.stop.store(true, std::memory_order_relaxed);
    }
    job.counts.reads += reads;
    job.counts.bytes += bytes;
    job.counts.continued += continued;
}

class PoolReader : public Reader {
  public:
    PoolReader(int threads, uint64_t slot_bytes) : depth_(threads), slot_bytes_(slot_bytes) {
        try {
            // The caller of a lookup reads too.
            for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { work(); });
        } catch (...) {
            join();
            throw;
        }
    }

    ~PoolReader() override { join(); }

    int depth() const override { return depth_; }

    std::optional<Failure> read(const Job &job) override {
        Pages pages = take_pages();
        Batch batch(job);
        if (job.plan.extents.size() > 1) {
            {
                std::lock_guard lock(mutex_);
                queue_.push_back(&batch);
            }
            wake();
            run(batch, pages.get());
            std::unique_lock lock(mutex_);
            remove(batch);
            batch.left.wait(lock, [&] { return batch.helpers == 0; });
        } else {
            run(batch, pages.get());
        }
        give_pages(std::move(pages));
        return batch.failure;
    }

  private:
    // Two wake two more each: the caller soon reads instead of calling threads.
    void wake() {
        wanted_.notify_one();
        wanted_.notify_one();
    }

    void work() {
        Pages pages = make_pages(slot_bytes_);
        std::unique_lock lock(mutex_);
        while (true) {
            wanted_.wait(lock, [&] { return stop_ || !queue_.empty(); });
            if (stop_) return;
            Batch &batch = *queue_.front();
            ++batch.helpers;
            lock.unlock();
            if (batch.open()) wake();
            run(batch, pages.get());
            lock.lock();
            remove(batch);
            if (--batch.helpers == 0) batch.left.notify_one();
        }
    }

    // Under the mutex: nobody begins with this batch any more.
    void remove(Batch &batch) {
        if (!batch.queued) return;
        batch.queued = false;
        queue_.erase(std::find(queue_.begin(), queue_.end(), &batch));
    }

    Pages take_pages() {
        std::lock_guard lock(pages_mutex_);
        if (pages_.empty()) return make_pages(slot_bytes_);
        Pages pages = std::move(pages_.back());
        pages_.pop_back();
        return pages;
    }

    void give_pages(Pages pages) {
        std::lock_guard lock(pages_mutex_);
        pages_.push_back(std::move(pages));
    }

    void join() {
        {
            std::lock_guard lock(mutex_);
            stop_ = true;
        }
        wanted_.notify_all();
        for (std::thread &thread : threads_) thread.join();
    }

    int depth_;
    uint64_t slot_bytes_;
    bool stop_ = false;
    std::mutex mutex_, pages_mutex_;
    std::condition_variable wanted_;
    std::deque<Batch *> queue_;
    std::vector<Pages> pages_;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Reader> make_pool(int threads, uint64_t slot_bytes) {
    return std::make_unique<PoolReader>(threads, slot_bytes);
}

}  // namespace engram
