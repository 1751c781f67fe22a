"""Who is being loaded: how a model tells the reader, far below vLLM's loader, what it wants."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from spark_overlay.headers import TensorHeader
from spark_overlay.loading.plan import Wanted


class Taker(Protocol):
    """A model's side: where its weights stay, and what of some files it wants."""

    @property
    def device(self) -> torch.device: ...

    def wanted(
        self, files: Collection[Path], prepared: Mapping[str, TensorHeader] | None = None
    ) -> list[Wanted]: ...


_takers: list[Taker] = []


@contextmanager
def asking(taker: Taker) -> Iterator[None]:
    """While the block runs, files that vLLM's loader comes to are read for ``taker``."""
    _takers.append(taker)
    try:
        yield
    finally:
        _takers.pop()


def current() -> Taker | None:
    return _takers[-1] if _takers else None


def portions(
    weights: Iterable[tuple[str, torch.Tensor]], limit: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """``weights`` in lists of at most ``limit`` bytes, or of one tensor; at least one list.

    For a loader that keeps all it is given until the last has come."""
    held: list[tuple[str, torch.Tensor]] = []
    size, count = 0, 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > limit:
            yield held
            held, size, count = [], 0, count + 1
        held.append((name, tensor))
        size += tensor.nbytes
    if held or not count:
        yield held
