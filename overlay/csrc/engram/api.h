/* What ctypes and CUDA's host functions call. Everything else in this folder is behind it. */
#ifndef SPARK_ENGRAM_API_H
#define SPARK_ENGRAM_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ENGRAM_ABI 1
#define ENGRAM_API __attribute__((visibility("default")))

enum { ENGRAM_OK = 0, ENGRAM_BAD_ID = 1, ENGRAM_READ = 2, ENGRAM_OTHER = 3 };
enum { ENGRAM_AUTO = 0, ENGRAM_URING = 1, ENGRAM_POOL = 2 };

/* Places in engram_stats' answer. */
enum {
    ENGRAM_LOOKUPS = 0,
    ENGRAM_IDS,
    ENGRAM_OWNED_IDS,
    ENGRAM_ROWS, /* distinct owned rows of each lookup, from the cache or the file */
    ENGRAM_READS,
    ENGRAM_BYTES,
    ENGRAM_NANOSECONDS,
    ENGRAM_LONGEST_NANOSECONDS,
    ENGRAM_CACHE_HITS,
    ENGRAM_CONTINUED, /* short reads that went on, and reads that a signal interrupted */
    ENGRAM_DIRECT,    /* 1: O_DIRECT, 0: through the page cache */
    ENGRAM_DEPTH,     /* reads in flight of one lookup, at most */
    ENGRAM_CACHE_BYTES,
    ENGRAM_STATS = 16
};

typedef struct engram_store engram_store;

typedef struct {
    const char *path;
    uint64_t weight_begin, weight_stride, weight_bytes;
    uint64_t scale_begin, scale_stride, scale_bytes;
    int64_t rows, lo, hi; /* of the table; the ids [lo, hi) are answered */
    int64_t first_row;    /* the row at weight_begin: 0 in a shard, lo in a packed file */
    uint64_t file_bytes;  /* the file's size; 0: not known */
    int direct;           /* 1: O_DIRECT where the file system takes it */
    int queue_depth;      /* reads in flight by io_uring */
    int threads;          /* reads in flight by the pool */
    int backend;
    uint64_t cache_bytes;
    const char *name; /* in messages: "layer 14's table" */
} engram_config;

ENGRAM_API int engram_abi(void);

/* NULL on an error, with its text in `error`. */
ENGRAM_API engram_store *engram_open(const engram_config *config, char *error, size_t error_size);

/* Rows of ids[n] into weights [n, weight_bytes] and scales [n, scale_bytes]. An id below zero or of
   another rank gives zeros. Any thread may call, several at once. */
ENGRAM_API int engram_lookup(engram_store *store, const int64_t *ids, int64_t n,
                             uint8_t *weights, uint8_t *scales, char *error, size_t error_size);

ENGRAM_API void engram_stats(engram_store *store, uint64_t out[ENGRAM_STATS]);

/* How rows are read, in words; why not as asked, if so. Lives as long as the store. */
ENGRAM_API const char *engram_backend(engram_store *store);

/* No lookup may be running. */
ENGRAM_API void engram_close(engram_store *store);

typedef struct {
    engram_store *store;
    const int64_t *ids;
    int64_t n;
    uint8_t *weights;
    uint8_t *scales;
} engram_work;

/* For cudaLaunchHostFunc. An error is printed and ends the process: rows are never invented. */
ENGRAM_API void engram_host(void *work);

#ifdef __cplusplus
}
#endif
#endif
