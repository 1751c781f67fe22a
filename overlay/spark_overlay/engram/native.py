"""Rows of a table by the native library: batched, direct reads that fill the caller's buffers.

``_native.so`` (overlay/csrc/engram) is built when the overlay is installed. ctypes gives up the
interpreter's lock during a call, so lookups of several threads run at the same time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.packed import HEADER_BYTES, PackedFile
from spark_overlay.engram.source import TableSource
from spark_overlay.engram.store import Bytes, EngramReadError, Rows, StoreStats
from spark_overlay.native_library import opened

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_native.so")

Backend = Literal["auto", "uring", "pool"]

_ABI = 1
_ERROR_BYTES = 1024
_READ = 2  # the code of an error of the file
_STATS = 16


@dataclass(frozen=True, slots=True)
class NativeStats(StoreStats):
    """Besides the plain totals: ``owned`` ids, cache ``hits``, reads that had to go on, the longest
    lookup in seconds, whether reads are ``direct``, reads in flight at most, bytes of the cache."""

    owned: int = 0
    hits: int = 0
    continued: int = 0
    longest: float = 0.0
    direct: bool = False
    depth: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """How rows are read. ``depth``: reads in flight of one lookup. ``backend``: io_uring, a pool of
    threads, or the first that the kernel allows. ``cache_bytes``: rows kept in memory."""

    depth: int = 32
    direct: bool = True
    backend: Backend = "auto"
    cache_bytes: int = 0


class Work(ctypes.Structure):
    """``engram_work`` of api.h: what ``engram_host`` is called with."""

    _fields_ = (
        ("store", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("path", ctypes.c_char_p),
        ("weight_begin", ctypes.c_uint64),
        ("weight_stride", ctypes.c_uint64),
        ("weight_bytes", ctypes.c_uint64),
        ("scale_begin", ctypes.c_uint64),
        ("scale_stride", ctypes.c_uint64),
        ("scale_bytes", ctypes.c_uint64),
        ("rows", ctypes.c_int64),
        ("lo", ctypes.c_int64),
        ("hi", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("file_bytes", ctypes.c_uint64),
        ("direct", ctypes.c_int),
        ("queue_depth", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("backend", ctypes.c_int),
        ("cache_bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
    )


@cache
def load(path: Path = LIBRARY) -> ctypes.CDLL:
    """The native library. Raises EngramError where it is missing or of another version."""
    mend = (
        "Install g++, pkg-config and liburing-dev and then the overlay again, or set "
        "ENGRAM_STORE=plain (slow: one read at a time)"
    )
    library = opened(path, "engram", _ABI, "a compiler", mend, EngramError)
    pointer, text = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_size_t)
    library.engram_open.argtypes = (ctypes.POINTER(_Config), *text)
    library.engram_open.restype = pointer
    library.engram_lookup.argtypes = (pointer, pointer, ctypes.c_int64, pointer, pointer, *text)
    library.engram_lookup.restype = ctypes.c_int
    library.engram_stats.argtypes = (pointer, ctypes.POINTER(ctypes.c_uint64))
    library.engram_stats.restype = None
    library.engram_backend.argtypes = (pointer,)
    library.engram_backend.restype = ctypes.c_char_p
    library.engram_close.argtypes = (pointer,)
    library.engram_close.restype = None
    return library


class NativeRowStore:
    """Rows ``[lo, hi)`` of a table, from its shard or from this rank's packed file.

    A ``RowStore``; ``lookup_into`` fills buffers of the caller. Any thread may call.
    """

    def __init__(
        self,
        source: TableSource,
        lo: int,
        hi: int,
        packed: PackedFile | None = None,
        options: NativeOptions | None = None,
        library: Path = LIBRARY,
    ) -> None:
        self.source, self.lo, self.hi = source, lo, hi
        self.packed = packed is not None
        self.path = source.file if packed is None else packed.path
        self._library = load(library)
        self._handle: int | None = None
        self._users = 0
        self._changed = threading.Condition()
        config = _config(source, lo, hi, packed, options or NativeOptions())
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        handle = self._library.engram_open(ctypes.byref(config), error, len(error))
        if not handle:
            # A range outside the table is the caller's fault; the rest is the file's.
            text = error.value.decode(errors="replace")
            raise (EngramReadError if 0 <= lo <= hi <= source.rows else EngramError)(text)
        self._handle = handle
        self.backend: str = self._library.engram_backend(handle).decode()
        _tell(self.path, self.backend)

    @property
    def handle(self) -> int:
        """``engram_store*``, valid until ``close``."""
        if self._handle is None:
            raise EngramError(f"{self.path}: lookup after close")
        return self._handle

    @property
    def host_function(self) -> int:
        """Address of ``engram_host``, which takes the address of a ``Work``."""
        address = ctypes.cast(self._library.engram_host, ctypes.c_void_p).value
        assert address is not None
        return address

    def lookup(self, ids: npt.NDArray[np.int64]) -> Rows:
        n = len(ids)
        weights = np.empty((n, self.source.dim), np.uint8)
        scales = np.empty((n, self.source.scale_dim), np.uint8)
        self.lookup_into(ids, weights, scales)
        return Rows(weights, scales, (ids >= self.lo) & (ids < self.hi))

    def lookup_into(self, ids: npt.NDArray[np.int64], weights: Bytes, scales: Bytes) -> None:
        """Fill ``weights [n, dim]`` and ``scales [n, dim/32]``. Raises EngramError."""
        if ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
            raise EngramError(f"ids are {ids.dtype} {list(ids.shape)}, expected int64 [n]")
        n = len(ids)
        for what, array, width in (
            ("weights", weights, self.source.dim),
            ("scales", scales, self.source.scale_dim),
        ):
            right = array.dtype == np.uint8 and array.shape == (n, width)
            if not (right and array.flags.c_contiguous and array.flags.writeable):
                raise EngramError(
                    f"{what} are {array.dtype} {list(array.shape)}, expected writable contiguous "
                    f"uint8 {[n, width]}"
                )
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        with self._used() as handle:
            status = self._library.engram_lookup(
                handle,
                ids.ctypes.data,
                n,
                weights.ctypes.data,
                scales.ctypes.data,
                error,
                len(error),
            )
        if status:
            kind = EngramReadError if status == _READ else EngramError
            raise kind(error.value.decode(errors="replace"))

    def stats(self) -> NativeStats:
        out = (ctypes.c_uint64 * _STATS)()
        with self._used() as handle:
            self._library.engram_stats(handle, out)
        return NativeStats(
            lookups=out[0],
            ids=out[1],
            rows=out[3],
            reads=out[4],
            bytes=out[5],
            seconds=out[6] / 1e9,
            owned=out[2],
            hits=out[8],
            continued=out[9],
            longest=out[7] / 1e9,
            direct=bool(out[10]),
            depth=out[11],
            cache_bytes=out[12],
        )

    def close(self) -> None:
        """Waits for running lookups, then gives back file and memory; a later lookup is an
        error."""
        with self._changed:
            handle, self._handle = self._handle, None
            self._changed.wait_for(lambda: self._users == 0)
        if handle is not None:
            self._library.engram_close(handle)

    def __enter__(self) -> NativeRowStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _used(self) -> Iterator[int]:
        with self._changed:
            handle = self.handle
            self._users += 1
        try:
            yield handle
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()


def _config(
    source: TableSource, lo: int, hi: int, packed: PackedFile | None, options: NativeOptions
) -> _Config:
    dim, scale_dim = source.dim, source.scale_dim
    begin, scale_begin, stride, scale_stride = (
        source.weight_begin,
        source.scale_begin,
        dim,
        scale_dim,
    )
    path, first, size = source.file, 0, 0
    name = f"layer {source.layer_id}'s table"
    if packed is not None:
        header = packed.header
        if (header.layer_id, header.lo, header.hi) != (source.layer_id, lo, hi):
            raise EngramError(
                f"{packed.path}: holds rows {header.lo}..{header.hi} of layer {header.layer_id}, "
                f"not {lo}..{hi} of layer {source.layer_id}"
            )
        begin, scale_begin = HEADER_BYTES, HEADER_BYTES + dim
        stride = scale_stride = dim + scale_dim
        path, first, size = packed.path, lo, header.file_bytes
    return _Config(
        path=os.fsencode(path),
        weight_begin=begin,
        weight_stride=stride,
        weight_bytes=dim,
        scale_begin=scale_begin,
        scale_stride=scale_stride,
        scale_bytes=scale_dim,
        rows=source.rows,
        lo=lo,
        hi=hi,
        first_row=first,
        file_bytes=size,
        direct=options.direct,
        queue_depth=options.depth,
        threads=options.depth,
        backend=get_args(Backend).index(options.backend),
        cache_bytes=options.cache_bytes,
        name=name.encode(),
    )


_told: set[tuple[int, str]] = set()


def _tell(path: Path, backend: str) -> None:
    """One notice a file system where reads go another way than they should."""
    _, _, why = backend.partition("; ")
    key = (path.stat().st_dev, why)
    if not why or key in _told:
        return
    _told.add(key)
    logger.warning(
        "Engram reads %s by %s%s",
        path,
        backend,
        ": the page cache takes memory that the GPU could use" if "O_DIRECT" in why else "",
    )
