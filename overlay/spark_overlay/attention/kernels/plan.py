"""Which launch serves how many tokens, by the GPU's generation: a table, never a trial. Pure but
for asking the GPU's capability."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

#: A CTA of the reduction takes so many heads of a token.
REDUCE_HEADS: Final = 1
REDUCE_WARPS: Final = 4


@dataclass(frozen=True)
class Shape:
    """``heads`` of a CTA (16 or 32), ``keys`` of a tile (16 to 64), CTAs a token (``splits``)."""

    heads: int
    keys: int
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Cuda:
    """The library's kernel: ``keys`` of a tile (32 or 64), CTAs a token (``splits``); ``many``: the
    form in which a CTA takes whole tokens one after the other, tiles of 64, where a CTA may have
    215 KB of shared memory (SM90, SM100)."""

    keys: int
    splits: int
    many: bool = False


def shape(
    capability: tuple[int, int], tokens: int, heads: int, width: int, by_library: bool
) -> Shape | Cuda:
    """For ``tokens`` of ``heads`` with ``width`` slots each.

    Few tokens: split so that the GPU is about full once; many: whole tokens, output directly."""
    most = 16 if heads <= 16 else 32
    ctas = tokens * -(-heads // most)
    places = PLACES.get(capability, OTHERS)
    # Tiles of 64 take 117 KB of shared memory; SM86, 89 and 12x have 99 KB.
    large = capability[0] in (9, 10) or capability == (8, 0)
    keys = 64 if by_library and large and ctas > 2 else 32
    if by_library and capability[0] in (9, 10) and most == 32 and 2 * ctas > places:
        return Cuda(64, 1, many=True)
    tiles = max(1, -(-width // keys))
    splits = min(tiles, max(1, places // ctas), MOST_SPLITS)
    # Every CTA takes equally many tiles, the last one fewer: no split is empty.
    splits = -(-tiles // -(-tiles // splits))
    return Cuda(keys, splits) if by_library else Shape(most, keys, splits, 8, 1)


#: Of the library's reduction.
MOST_SPLITS: Final = 64
#: Multiprocessors of a usual GPU of each capability (A100, RTX 3090, RTX 4090, H100/H200, RTX PRO
#: 6000, GB10), each of which runs one CTA, and of those not named.
PLACES: Final = {(8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (12, 0): 188, (12, 1): 48}
OTHERS: Final = 96


@cache
def capability(device: Any) -> tuple[int, int]:
    """Of a torch device; under the interpreter, a CPU stands for SM80."""
    import torch

    if device.type != "cuda":
        return (8, 0)
    return torch.cuda.get_device_capability(device)
