"""Which store a rank's rows come from, by the settings. No torch, no vLLM."""

from __future__ import annotations

import logging
from pathlib import Path

from spark_overlay.engram.layout import EngramLayout
from spark_overlay.engram.native import NativeOptions, NativeRowStore
from spark_overlay.engram.packed import attach, file_name
from spark_overlay.engram.source import TableSource
from spark_overlay.engram.store import FileRowStore, MemoryRowStore, RowStore
from spark_overlay.settings import OverlaySettings

log = logging.getLogger("vllm.spark_overlay.engram")


def open_store(
    settings: OverlaySettings, source: TableSource, layout: EngramLayout, rank: int, tp: int
) -> RowStore:
    """This rank's rows of one table. A packed file that is there and right is used by itself; one
    that is damaged, stale or of something else raises EngramError by name, as does
    ``engram_store`` "file" without the native library."""
    lo, hi = layout.rank_range(source.layer_id, rank, tp).rows
    layer, folder = source.layer_id, settings.engram_packed_dir
    if settings.engram_store != "file":
        unused = f"; packed rows in {folder} are not used by ENGRAM_STORE=" if folder else ""
        how = "loaded into memory" if settings.engram_store == "memory" else "by plain reads"
        told = f"{unused}{settings.engram_store}" if unused else ""
        log.info("Engram layer %d: rows from %s %s%s", layer, source.file, how, told)
        if settings.engram_store == "memory":
            return MemoryRowStore(source, lo, hi)
        return FileRowStore(source, lo, hi)
    packed = None
    if folder is not None:
        packed = attach(Path(folder), source, layout, rank, tp)
        if packed is None:
            name = file_name(layer, rank, tp)
            log.info("Engram layer %d: %s has no %s; the shard is read", layer, folder, name)
    cache = int(settings.engram_cache_gib * 2**30) // len(layout.layer_ids)
    options = NativeOptions(depth=settings.engram_io_threads, cache_bytes=cache)
    store = NativeRowStore(source, lo, hi, packed, options)
    kind = "packed rows" if packed else "rows"
    log.info("Engram layer %d: %s from %s by %s", layer, kind, store.path, store.backend)
    return store
