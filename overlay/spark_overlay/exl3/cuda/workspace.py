"""Scratch of the launches: counters that stay zero between launches, partial sums that do not.

A launch leaves its counters as it found them, zero, so they are written once, when a block of them
is made. Every pair of layer and stream has its own, which is what lets any number of streams run
at once. While a graph is captured nothing can be made or zeroed; counters then come from the block
that is there, so one is made before (``reserve``), large enough for a whole model.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
from torch import Tensor

#: int32 counters of a block: 8 MiB. V4.1 in two ranks needs about 0.4 MiB for each stream.
BLOCK = 2 << 20
_ALIGN = 32  # counters: a line of the L2 cache is one layer's alone


class WorkspaceError(RuntimeError):
    """Counters ran out where none can be made."""


class Counters:
    """Zeroed counters of one device, handed out by key and never taken back."""

    def __init__(self, device: torch.device, block: int = BLOCK) -> None:
        self.device, self._size = device, block
        self._blocks: list[Tensor] = []
        self._used = 0
        self._given: dict[Hashable, Tensor] = {}
        self._lock = threading.Lock()

    def of(self, key: Hashable, count: int) -> Tensor:
        """``count`` counters for ``key``: the same ones at each call. Raises WorkspaceError."""
        found = self._given.get(key)
        if found is not None and len(found) >= count:
            return found
        with self._lock:
            given = self._given[key] = self._take(count)
        return given

    def reserve(self) -> None:
        """Have a block, so that a captured graph finds one."""
        with self._lock:
            if not self._blocks:
                self._grow(0)

    def _take(self, count: int) -> Tensor:
        count = -(-max(count, 1) // _ALIGN) * _ALIGN
        if not self._blocks or self._used + count > len(self._blocks[-1]):
            self._grow(count)
        begin, self._used = self._used, self._used + count
        return self._blocks[-1][begin : self._used]

    def _grow(self, least: int) -> None:
        cuda = self.device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            raise WorkspaceError(
                f"EXL3's {self._size} counters on {self.device} are all given away, and none can "
                "be made while a CUDA graph is captured: run the layers once before the capture"
            )
        self._blocks.append(
            torch.zeros(max(self._size, least), dtype=torch.int32, device=self.device)
        )
        self._used = 0
        if cuda:  # any stream may be the first to use them
            torch.cuda.synchronize(self.device)


_counters: dict[torch.device, Counters] = {}


def counters(device: torch.device) -> Counters:
    """The counters of a device ("cuda:0", with its index)."""
    if device not in _counters:
        _counters[device] = Counters(device)
    return _counters[device]


def scratch(size: int, device: torch.device) -> Tensor:
    """``size`` bytes of any contents, from torch's allocator: in a graph's own pool while one is
    captured, freed in stream order otherwise."""
    return torch.empty(max(size, 1), dtype=torch.uint8, device=device)
