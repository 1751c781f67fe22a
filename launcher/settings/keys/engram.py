"""Engram tables."""

from launcher.settings.setting import Setting

KEYS = (
    Setting(
        "ENGRAM_STORE",
        "engram",
        "choice",
        "file",
        "file: rows are read when needed, by native code; plain: the same by plain reads, for a "
        "machine without a compiler; memory: tables are loaded (95 GiB each for the real model)",
        choices=("file", "plain", "memory"),
    ),
    Setting("DSV41_IO_THREADS", "engram", "integer", "32", "reads in flight", limits=(1, 1024)),
    Setting("DSV41_CACHE_GIB", "engram", "decimal", "0", "row cache of a node", limits=(0, 1024)),
    Setting(
        "DSV41_STATS_SECONDS",
        "engram",
        "integer",
        "60",
        "seconds between lines of read statistics; 0: none",
        limits=(0, 86400),
    ),
    Setting(
        "HEAD_PACKED_DIR",
        "engram",
        "path",
        "~/dsv41-engram",
        "packed rows and prepared weights of rank 0 (`pack`, `prepare`)",
    ),
    Setting(
        "WORKER_PACKED_DIR",
        "engram",
        "path",
        "",
        "the same of rank 1; empty: as on the head",
    ),
)
