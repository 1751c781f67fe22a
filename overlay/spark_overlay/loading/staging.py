"""The memory that blocks are read into, and the way from there to where weights stay.

Pinned and of a fixed size: a GB10's driver pins what it copies from with the intent to write, so a
copy from a mapped file would double each of its pages. A block goes to the GPU whole, in one copy,
and is cut there; on a CPU it is cut where it lies.
"""

from __future__ import annotations

import logging
import math
from types import TracebackType

import torch
from torch import Tensor

from spark_overlay.loading.cuts import Piece
from spark_overlay.loading.reader import ring

log = logging.getLogger("vllm.spark_overlay.loading")

#: By width in bytes; wider elements copy faster.
_ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Flat:
    """A contiguous tensor as bytes, and as the wider words that a copy may be made of."""

    def __init__(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"found strides {tensor.stride()}, needed a contiguous tensor")
        self.bytes = tensor.detach().view(-1).view(torch.uint8)
        self._offset = self.bytes.data_ptr() % 8 | self.bytes.numel() % 8
        self._words: dict[int, Tensor] = {1: self.bytes}

    @property
    def offset(self) -> int:
        """What keeps its bytes from being words of 8: 0 if nothing."""
        return self._offset

    def words(self, width: int) -> Tensor:
        found = self._words.get(width)
        if found is None:
            found = self._words[width] = self.bytes.view(_ELEMENTS[width])
        return found


def place(source: Flat, piece: Piece, target: Flat, base: int) -> None:
    """Copy a piece of what was read to ``base`` bytes and on into ``target``."""
    at = base + piece.target
    stride = piece.stride if piece.rows > 1 else 0
    # gcd(8, 0) is 8
    width = math.gcd(8, piece.source, at, piece.width, stride, source.offset, target.offset)
    there, here = target.words(width), source.words(width)
    row, first, out = piece.width // width, piece.source // width, at // width
    if piece.rows == 1:
        there[out : out + row].copy_(here[first : first + row])
        return
    there.as_strided((piece.rows, row), (row, 1), there.storage_offset() + out).copy_(
        here.as_strided((piece.rows, row), (stride // width, 1), here.storage_offset() + first)
    )


class Staging:
    """``slots`` pieces of host memory of ``size`` bytes each (a multiple of a page), pinned if
    ``device`` is a GPU, and as much on the GPU as one of them.

    A context: memory and pinning are given back at its end."""

    def __init__(self, device: torch.device, slots: int, size: int) -> None:
        self.device = device
        memory, self.views = ring(slots, size)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.host = [Flat(part) for part in whole.split(size)]
        self._pinned = 0
        self._there: Flat | None = None
        self._copied: dict[int, torch.cuda.Event] = {}
        if device.type == "cuda":
            self._pin(whole)
            self._there = Flat(torch.empty(size, dtype=torch.uint8, device=device))

    def _pin(self, whole: Tensor) -> None:
        runtime = torch.cuda.cudart()
        failed = int(runtime.cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
        if failed:
            log.warning(
                "[load] %d MiB of staging memory could not be pinned (CUDA error %d): copies to "
                "the GPU are slower. Is the container run with --ulimit memlock=-1?",
                whole.numel() >> 20,
                failed,
            )
            return
        self._pinned = whole.data_ptr()

    def upload(self, slot: int, length: int) -> Flat:
        """The first ``length`` bytes of a slot where weights stay; on a GPU until the next call."""
        if self._there is None:
            return self.host[slot]
        self._there.bytes[:length].copy_(self.host[slot].bytes[:length], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copied[slot] = event
        return self._there

    def settle(self, slot: int) -> None:
        """Wait until the slot has been copied to the GPU, so that it may be written again."""
        event = self._copied.pop(slot, None)
        if event is not None:
            event.synchronize()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self._pinned:
                torch.cuda.cudart().cudaHostUnregister(self._pinned)
        # The mapping goes with its last view; what still refers to it is ours alone.
        self.host, self.views, self._there = [], [], None
