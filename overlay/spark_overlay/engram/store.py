"""Rows of one table by id: from the shard by plain reads, or from memory.

Both stores answer alike, for the rows ``[lo, hi)`` that the rank owns: an id below zero (a token
of an image span, padding) or of another rank gives zeros, so that summing the ranks' answers is
the whole lookup; an id beyond the table and a short read are errors, never rows.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.source import TableSource

Bytes = npt.NDArray[np.uint8]

_LOAD_CHUNK = 1 << 26


class EngramReadError(EngramError, OSError):
    """The table's file did not give the bytes that its header promises."""


class Rows(NamedTuple):
    """``weights [n, dim]`` e4m3 bytes, ``scales [n, dim/32]`` exponent bytes, ``owned [n]``."""

    weights: Bytes
    scales: Bytes
    owned: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Totals since the store was opened. ``rows`` are distinct rows fetched; bytes are read."""

    lookups: int = 0
    ids: int = 0
    rows: int = 0
    reads: int = 0
    bytes: int = 0
    seconds: float = 0.0


class RowStore(Protocol):
    """A table's rows. ``lookup`` may be called from several threads."""

    def lookup(self, ids: npt.NDArray[np.int64]) -> Rows:
        """Rows of int64 ids ``[n]``, in their order. Raises EngramError."""

    def stats(self) -> StoreStats: ...

    def close(self) -> None: ...


class _Store(ABC):
    """Ids, ownership and counting; a subclass fetches distinct owned rows."""

    def __init__(
        self, source: TableSource, lo: int, hi: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not 0 <= lo <= hi <= source.rows:
            raise EngramError(
                f"{source.file}: rows {lo}..{hi} asked of layer {source.layer_id}'s table of "
                f"{source.rows} rows; use EngramLayout.rank_range"
            )
        self.source, self.lo, self.hi = source, lo, hi
        self._clock = clock
        self._closed = False
        self._stats = StoreStats()
        self._lock = threading.Lock()

    def lookup(self, ids: npt.NDArray[np.int64]) -> Rows:
        start = self._clock()
        if self._closed:
            raise EngramError(f"{self.source.file}: lookup after close")
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise EngramError(f"ids are {ids.dtype} {list(ids.shape)}, expected int64 [n]")
        beyond = ids >= self.source.rows
        if beyond.any():
            raise EngramError(
                f"row {int(ids[beyond][0])} asked of layer {self.source.layer_id}'s table of "
                f"{self.source.rows} rows ({int(beyond.sum())} such ids): the ids are of another "
                "layout or another layer"
            )
        owned = (ids >= self.lo) & (ids < self.hi)
        rows, places = np.unique(ids[owned], return_inverse=True)
        weights = np.zeros((len(ids), self.source.dim), np.uint8)
        scales = np.zeros((len(ids), self.source.scale_dim), np.uint8)
        fetched_weights, fetched_scales = self._fetch(rows)
        weights[owned], scales[owned] = fetched_weights[places], fetched_scales[places]
        self._count(lookups=1, ids=len(ids), rows=len(rows), seconds=self._clock() - start)
        return Rows(weights, scales, owned)

    def stats(self) -> StoreStats:
        return self._stats

    def close(self) -> None:
        """Give back what the store holds; a later lookup is an error."""
        self._closed = True

    @abstractmethod
    def _fetch(self, rows: npt.NDArray[np.int64]) -> tuple[Bytes, Bytes]:
        """The weight and scale bytes of distinct rows that this store owns, in their order."""

    def _count(self, **more: float) -> None:
        with self._lock:
            old = self._stats
            self._stats = replace(old, **{k: getattr(old, k) + v for k, v in more.items()})

    def _read_into(self, fd: int, buffer: Bytes, offset: int, what: str) -> None:
        """Fill ``buffer`` (contiguous) from the file, or raise EngramReadError."""
        got = os.preadv(fd, [buffer.data], offset) if buffer.size else 0
        if got != buffer.size:
            raise EngramReadError(
                f"{self.source.file}: {what} of layer {self.source.layer_id}'s table gave {got} of "
                f"{buffer.size} bytes at byte {offset}: the file is shorter than its header says. "
                "Stop the server and download this shard again"
            )


class FileRowStore(_Store):
    """Reads every distinct row from the shard: one read for its weights, one for its scales."""

    def __init__(
        self, source: TableSource, lo: int, hi: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(source, lo, hi, clock)
        self._fd = _open(source)

    def close(self) -> None:
        if not self._closed:
            os.close(self._fd)
        super().close()

    def __enter__(self) -> FileRowStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _fetch(self, rows: npt.NDArray[np.int64]) -> tuple[Bytes, Bytes]:
        source = self.source
        weights = np.empty((len(rows), source.dim), np.uint8)
        scales = np.empty((len(rows), source.scale_dim), np.uint8)
        for i, row in enumerate(rows.tolist()):
            at = source.weight_begin + row * source.dim
            self._read_into(self._fd, weights[i], at, f"row {row}")
            at = source.scale_begin + row * source.scale_dim
            self._read_into(self._fd, scales[i], at, f"scales of row {row}")
        self._count(reads=2 * len(rows), bytes=weights.size + scales.size)
        return weights, scales


class MemoryRowStore(_Store):
    """Holds the owned rows, read once from the shard."""

    def __init__(
        self, source: TableSource, lo: int, hi: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(source, lo, hi, clock)
        start = clock()
        fd = _open(source)
        try:
            self._weights = self._load(fd, source.weight_begin, source.dim, "rows")
            self._scales = self._load(fd, source.scale_begin, source.scale_dim, "scales")
        finally:
            os.close(fd)
        self._count(seconds=clock() - start)

    def _load(self, fd: int, begin: int, width: int, what: str) -> Bytes:
        table = np.empty((self.hi - self.lo, width), np.uint8)
        flat = table.reshape(-1)
        for at in range(0, flat.size, _LOAD_CHUNK):
            part = flat[at : at + _LOAD_CHUNK]
            self._read_into(fd, part, begin + self.lo * width + at, what)
            self._count(reads=1, bytes=part.size)
        return table

    def close(self) -> None:
        super().close()
        self._weights = self._scales = np.empty((0, 0), np.uint8)

    def _fetch(self, rows: npt.NDArray[np.int64]) -> tuple[Bytes, Bytes]:
        at = rows - self.lo
        return self._weights[at], self._scales[at]


def _open(source: TableSource) -> int:
    try:
        return os.open(source.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise EngramReadError(
            f"{source.file}: cannot be opened ({error}). Check the path and its permissions"
        ) from error
