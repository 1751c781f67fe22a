#include "api.h"

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "store.hpp"

struct engram_store {
    explicit engram_store(const engram_config &config) : store(config) {}
    engram::Store store;
};

namespace {

void say(char *error, size_t size, const char *text) {
    if (error && size) std::snprintf(error, size, "%s", text);
}

// No exception may leave: the caller is C.
template <class Call>
int guarded(char *error, size_t size, Call call) {
    try {
        call();
        return ENGRAM_OK;
    } catch (const engram::Error &found) {
        say(error, size, found.what());
        return found.code;
    } catch (const std::exception &found) {
        say(error, size, found.what());
        return ENGRAM_OTHER;
    }
}

}  // namespace

extern "C" {

int engram_abi(void) { return ENGRAM_ABI; }

engram_store *engram_open(const engram_config *config, char *error, size_t error_size) {
    engram_store *store = nullptr;
    guarded(error, error_size, [&] { store = new engram_store(*config); });
    return store;
}

int engram_lookup(engram_store *store, const int64_t *ids, int64_t n, uint8_t *weights,
                  uint8_t *scales, char *error, size_t error_size) {
    return guarded(error, error_size, [&] { store->store.lookup(ids, n, {weights, scales}); });
}

void engram_stats(engram_store *store, uint64_t out[ENGRAM_STATS]) { store->store.stats(out); }

const char *engram_backend(engram_store *store) { return store->store.backend(); }

void engram_close(engram_store *store) { delete store; }

void engram_host(void *work) {
    auto *asked = static_cast<engram_work *>(work);
    char error[1024] = "";
    int status = engram_lookup(asked->store, asked->ids, asked->n, asked->weights, asked->scales,
                               error, sizeof error);
    if (status == ENGRAM_OK) return;
    std::fprintf(stderr, "Engram: %s. This rank ends: rows are never made up.\n", error);
    std::fflush(stderr);
    std::abort();
}

}  // extern "C"
