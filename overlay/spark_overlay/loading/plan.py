"""Which bytes are read, in which order, in blocks of a bounded size. No numpy, no torch.

Files one after the other, each from its front to its back: what lies close together is read at
once, what is far from anything wanted is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_overlay.headers import TensorHeader
from spark_overlay.loading.cuts import Cut

PAGE = 4096
#: Bytes of one read. Shorter ones cost speed, and longer ones staging memory.
BLOCK = 8 << 20
#: What is left out between two reads: by less, a drive is faster at reading through.
GAP = 256 << 10


@dataclass(slots=True)
class Wanted:
    """One tensor to be read: where it lies, and what of it. ``into`` is the taker's own."""

    name: str
    header: TensorHeader
    cut: Cut
    into: Any = None
    #: Bytes still to come.
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.cut.nbytes


@dataclass(frozen=True, slots=True)
class Block:
    """One read: ``length`` bytes from ``begin`` on, both multiples of a page (the file may end
    before), with the tensors that have bytes in it."""

    file: Path
    begin: int
    length: int
    tensors: tuple[Wanted, ...]

    @property
    def end(self) -> int:
        return self.begin + self.length

    @property
    def needed(self) -> int:
        """Bytes from ``begin`` on that the file must have."""
        return min(self.end, self.tensors[-1].cut.end) - self.begin


def blocks(wanted: Iterable[Wanted], size: int = BLOCK, gap: int = GAP) -> Iterator[Block]:
    """Every wanted byte is in a block of at most ``size`` bytes (a multiple of a page), those of
    each file in rising order, and no byte is in two. Tensors must not overlap; one of no bytes is
    in no block. Raises ValueError for a size that is no multiple of a page, or a gap below two."""
    if size < PAGE or size % PAGE or gap < 2 * PAGE:
        raise ValueError(
            f"found blocks of {size} bytes and gaps of {gap}; needed multiples of {PAGE}, and gaps "
            f"of {2 * PAGE} at least"
        )
    by_file: dict[Path, list[Wanted]] = {}
    for one in wanted:
        if one.left:
            by_file.setdefault(one.header.file, []).append(one)
    for file in sorted(by_file):
        tensors = sorted(by_file[file], key=lambda one: one.cut.first)
        yield from _of_file(file, tensors, size, gap)


def _of_file(file: Path, tensors: Sequence[Wanted], size: int, gap: int) -> Iterator[Block]:
    at = 0  # the first tensor that may reach into the next block
    for low, high in _ranges(tensors, gap):
        for begin in range(low - low % PAGE, high, size):
            end = min(begin + size, high + -high % PAGE)
            while tensors[at].cut.end <= begin:
                at += 1
            last = at
            while last < len(tensors) and tensors[last].cut.first < end:
                last += 1
            if last > at:  # a gap may be longer than a block
                yield Block(file, begin, end - begin, tuple(tensors[at:last]))


def _ranges(tensors: Sequence[Wanted], gap: int) -> Iterator[tuple[int, int]]:
    """Ranges of the file that are read through, a gap or more apart."""
    low = high = -1
    for one in tensors:
        for begin, end in _runs(one.cut, gap):
            if low >= 0 and begin - high < gap:
                high = max(high, end)
                continue
            if low >= 0:
                yield low, high
            low, high = begin, end
    if low >= 0:
        yield low, high


def _runs(cut: Cut, gap: int) -> Iterator[tuple[int, int]]:
    if cut.stride - cut.run < gap:
        yield cut.first, cut.end
        return
    for number in range(cut.count):
        begin = cut.first + number * cut.stride
        yield begin, begin + cut.run
