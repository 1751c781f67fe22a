"""Where in a file the bytes lie that a rank keeps of a tensor. No numpy, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spark_overlay.exl3.layout import Exl3Slice
from spark_overlay.headers import DTYPE_BITS, TensorHeader


class Piece(NamedTuple):
    """``rows`` rows of ``width`` bytes: every ``stride`` bytes from ``source`` on in what was read,
    one behind the other from ``target`` on in what is kept."""

    source: int
    target: int
    width: int
    stride: int
    rows: int


@dataclass(frozen=True, slots=True)
class Cut:
    """``count`` runs of ``run`` bytes, ``stride`` bytes apart; ``first`` is where in the file the
    first begins. Kept, they lie one behind the other."""

    first: int
    run: int
    stride: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.run * self.count

    @property
    def end(self) -> int:
        """End of the last run in the file."""
        return self.first + self.stride * (self.count - 1) + self.run

    def pieces(self, lo: int, hi: int) -> Iterator[Piece]:
        """What bytes ``lo..hi`` of the file hold of it; ``source`` counts from ``lo``. Three at
        most: a run whose head is missing, whole runs, and a run whose tail is."""
        at = max(0, (lo - self.first) // self.stride)
        end = min(self.count, -(-(hi - self.first) // self.stride))
        while at < end:
            begin = self.first + at * self.stride
            whole = begin >= lo and begin + self.run <= hi
            rows = 1
            if whole:  # as many as end before hi
                rows = min(end - at, (hi - self.run - begin) // self.stride + 1)
            low, high = max(begin, lo), min(begin + self.run, hi)
            if low < high:
                target = at * self.run + low - begin
                yield Piece(low - lo, target, high - low, self.stride, rows)
            at += rows


def whole(header: TensorHeader) -> Cut:
    """All of a tensor."""
    return Cut(header.begin, header.nbytes, header.nbytes, 1)


def rows(header: TensorHeader, low: int, high: int) -> Cut:
    """Entries ``low..high`` of a tensor's first dimension."""
    each = header.nbytes // header.shape[0]
    size = each * (high - low)
    return Cut(header.begin + each * low, size, size, 1)


def packed(header: TensorHeader, leaf: str, part: Exl3Slice) -> Cut:
    """A rank's part of ``trellis``, ``suh`` or ``svh``."""
    if leaf != "trellis":
        low, high, _ = (part.suh if leaf == "suh" else part.svh).indices(header.shape[0])
        return rows(header, low, high)
    height, width, _ = header.shape
    (top, bottom, _), (left, right, _) = (
        cut.indices(size) for cut, size in zip(part.trellis, (height, width), strict=True)
    )
    if right - left == width:
        return rows(header, top, bottom)
    tile = math.prod(header.shape[2:]) * DTYPE_BITS[header.dtype] // 8
    stride = width * tile
    begin = header.begin + top * stride + left * tile
    return Cut(begin, (right - left) * tile, stride, bottom - top)


def packed_shape(header: TensorHeader, leaf: str, part: Exl3Slice) -> tuple[int, ...]:
    """Shape of what `packed` keeps."""
    if leaf != "trellis":
        return (len(range(*(part.suh if leaf == "suh" else part.svh).indices(header.shape[0]))),)
    sizes = zip(part.trellis, header.shape, strict=False)
    return (*(len(range(*cut.indices(size))) for cut, size in sizes), header.shape[2])
