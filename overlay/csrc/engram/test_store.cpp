// Exercises the store without Python, for the sanitizers: tests/test_engram_sanitizers.py builds it.
//   test_store FOLDER    exit status 0 and "ok" if every answer was right
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <thread>

#include "store.hpp"

namespace {

using engram::Store;

constexpr int64_t kRows = 6000, kLo = 1500, kHi = 5200;
constexpr uint64_t kWeights = 256, kScales = 8, kRow = kWeights + kScales;

[[noreturn]] void wrong(const std::string &what) {
    std::fprintf(stderr, "test_store: %s\n", what.c_str());
    std::exit(1);
}

void expect(bool right, const std::string &what) {
    if (!right) wrong(what);
}

uint8_t byte(int64_t row, uint64_t column) {
    return static_cast<uint8_t>((static_cast<uint64_t>(row) * 40503 + column * 977 + 1) *
                                    2654435761U >>
                                13);
}

void write(const std::string &path, const std::vector<uint8_t> &bytes) {
    std::FILE *file = std::fopen(path.c_str(), "wb");
    expect(file && std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size(), path);
    std::fclose(file);
}

// As a shard has it: weights and scales apart, at offsets aligned to 8 only.
engram_config shard(const std::string &path) {
    engram_config config{};
    config.path = path.c_str();
    config.weight_begin = 1016, config.weight_stride = config.weight_bytes = kWeights;
    config.scale_begin = 1016 + kRows * kWeights + 64;
    config.scale_stride = config.scale_bytes = kScales;
    config.rows = kRows, config.lo = kLo, config.hi = kHi;
    config.direct = 1, config.queue_depth = 16, config.threads = 6;
    config.name = "layer 14's table";
    return config;
}

engram_config packed(const std::string &path) {
    engram_config config = shard(path);
    config.weight_begin = 4096, config.scale_begin = 4096 + kWeights;
    config.weight_stride = config.scale_stride = kRow;
    config.first_row = kLo;
    config.file_bytes = 4096 + (kHi - kLo) * kRow;
    return config;
}

void make(const engram_config &config) {
    uint64_t end = config.file_bytes ? config.file_bytes : config.scale_begin + kRows * kScales;
    std::vector<uint8_t> bytes(end);
    int64_t last = config.first_row ? kHi : kRows;
    for (int64_t row = config.first_row; row < last; ++row) {
        auto i = static_cast<uint64_t>(row - config.first_row);
        for (uint64_t c = 0; c < kRow; ++c) {
            uint64_t at = c < kWeights ? config.weight_begin + i * config.weight_stride + c
                                       : config.scale_begin + i * config.scale_stride + c - kWeights;
            bytes[at] = byte(row, c);
        }
    }
    write(config.path, bytes);
}

std::vector<int64_t> some_ids(std::mt19937_64 &random, size_t n) {
    std::vector<int64_t> ids(n);
    for (int64_t &id : ids) id = static_cast<int64_t>(random() % (kRows + 3)) - 3;
    for (size_t i = 0; i + 40 < n; i += 97) ids[i + 1] = ids[i], ids[i + 2] = ids[i] + 1;
    for (int64_t &id : ids) id = std::min(id, kRows - 1);
    return ids;
}

void check(Store &store, const std::vector<int64_t> &ids, const std::string &what) {
    std::vector<uint8_t> weights(ids.size() * kWeights, 0xAA), scales(ids.size() * kScales, 0xAA);
    store.lookup(ids.data(), static_cast<int64_t>(ids.size()), {weights.data(), scales.data()});
    for (size_t i = 0; i < ids.size(); ++i) {
        bool owned = ids[i] >= kLo && ids[i] < kHi;
        for (uint64_t c = 0; c < kRow; ++c) {
            uint8_t found =
                c < kWeights ? weights[i * kWeights + c] : scales[i * kScales + c - kWeights];
            if (found != (owned ? byte(ids[i], c) : 0))
                wrong(what + ": row " + std::to_string(ids[i]) + " column " + std::to_string(c));
        }
    }
}

void together(Store &store, int threads, const std::string &what) {
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t)
        running.emplace_back([&, t] {
            std::mt19937_64 random(static_cast<uint64_t>(t));
            for (size_t n : {1UL, 2UL, 150UL, 700UL, 0UL, 33UL})
                check(store, some_ids(random, n), what);
        });
    for (std::thread &thread : running) thread.join();
}

std::string refused(const std::function<void()> &call, int code, const std::string &part) {
    try {
        call();
    } catch (const engram::Error &error) {
        std::string text = error.what();
        expect(error.code == code, "code " + std::to_string(error.code) + " of: " + text);
        expect(text.find(part) != std::string::npos, "expected \"" + part + "\" in: " + text);
        return text;
    }
    wrong("not refused: " + part);
}

// What the hook answers; the first call at each offset is the one that is disturbed.
std::mutex hook_mutex;
std::map<uint64_t, int> hook_seen;
int64_t hook_value;

void hooked(int64_t value, engram::Hook hook, const std::function<void()> &call) {
    hook_seen.clear();
    hook_value = value;
    engram::outcome_hook = hook;
    call();
    engram::outcome_hook = nullptr;
}

int64_t first_only(uint64_t offset, int64_t result) {
    std::lock_guard lock(hook_mutex);
    if (hook_seen[offset]++) return result;
    return hook_value < 0 ? hook_value : std::min(hook_value, result);
}

int64_t always(uint64_t, int64_t) { return hook_value; }

void disturbed(Store &store, const std::string &what) {
    for (int64_t value : {int64_t{-EINTR}, int64_t{-EAGAIN}, int64_t{100}, int64_t{4096}})
        hooked(value, first_only, [&] { together(store, 3, what + " disturbed"); });
    std::vector<int64_t> ids = {kLo, kHi - 1, kHi - 2, kLo + 7};
    auto ask = [&] { check(store, ids, what); };
    for (int error : {EIO, ESTALE, EINTR}) {
        std::string text;
        hooked(-error, always, [&] { text = refused(ask, ENGRAM_READ, std::strerror(error)); });
        expect(text.find("of layer 14's table at byte ") != std::string::npos, text);
    }
    hooked(0, always, [&] { refused(ask, ENGRAM_READ, "shorter than its header says"); });
    ask();  // and right again afterwards
}

void truncated(const engram_config &config, Store &store, const std::string &what) {
    int64_t last = kHi - 1;
    uint64_t at = config.weight_begin +
                  static_cast<uint64_t>(last - config.first_row) * config.weight_stride;
    expect(truncate(config.path, static_cast<off_t>(at + 100)) == 0, "truncate");
    std::vector<int64_t> ids = {last};
    refused([&] { check(store, ids, what); }, ENGRAM_READ,
            "row " + std::to_string(last) + " of layer 14's table gave ");
    std::vector<int64_t> both = {last - 1, last};  // one read, of which the first row came whole
    refused([&] { check(store, both, what); }, ENGRAM_READ,
            config.first_row ? "row " + std::to_string(last) + " of" : " table gave ");
    refused([&] { Store again(config); }, ENGRAM_READ, "it is truncated");
    make(config);
}

void all(engram_config config, const std::string &what) {
    make(config);
    for (int backend : {ENGRAM_URING, ENGRAM_POOL}) {
        config.backend = backend;
        for (uint64_t cache : {0UL, 100000UL, 1UL << 24}) {
            config.cache_bytes = cache;
            for (int direct : {0, 1}) {
                config.direct = direct;
                std::unique_ptr<Store> store;
                try {
                    store = std::make_unique<Store>(config);
                } catch (const engram::Error &error) {
                    if (error.code != ENGRAM_OTHER) throw;
                    std::printf("%s\n", error.what());  // no io_uring here
                    continue;
                }
                std::string told = what + ", " + store->backend();
                together(*store, 8, told);
                if (cache) continue;
                disturbed(*store, told);
                truncated(config, *store, told);
                std::vector<int64_t> beyond = {0, kRows, kRows + 9};
                refused([&] { check(*store, beyond, told); }, ENGRAM_BAD_ID, "2 such ids");
            }
        }
    }
    // More ids than one plan takes, on few reads in flight.
    config.cache_bytes = 0, config.threads = 1, config.queue_depth = 1;
    for (int backend : {ENGRAM_AUTO, ENGRAM_POOL}) {
        config.backend = backend;
        Store store(config);
        std::mt19937_64 random(9);
        check(store, some_ids(random, (1 << 17) + 5), what);
    }
    config.backend = ENGRAM_POOL, config.direct = 1;
    hooked(-EINVAL, first_only, [&] {
        Store store(config);
        std::string told = store.backend();
        expect(told.find("pool, buffered; O_DIRECT refused (") == 0, told);
    });
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 2) wrong("a folder is needed");
    std::string folder = argv[1];
    std::string apart = folder + "/shard.bin", beside = folder + "/packed.bin";
    all(shard(apart), "shard");
    all(packed(beside), "packed");
    refused([&] { Store store(shard(folder)); }, ENGRAM_READ, "is no regular file");
    std::puts("ok");
    return 0;
}
