"""What the layers of one pass share: where a compressed cache's records lie, and which were chosen.

Layers 20 to 39 read layer 20's cache, so its geometry is made once, by layer 20; the slots of the
chosen records change with the index source (20, 24, 28, 32, 36) and are made once by each.

Both hang on the pass's own metadata of that cache, which vLLM builds for each step, chunk and
replay sub-batch: another pass finds nothing. A source makes its own anew whenever it runs, so that
metadata that serves twice (a warm-up before a capture) hands on nothing from before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_NAME = "spark_shared"


@dataclass(frozen=True)
class Geometry:
    """``block_table`` int32 [requests, pages]; ``request`` int32 [T], of a token, -1 where the row
    is padding; ``states``: records of a page."""

    block_table: Tensor
    request: Tensor
    states: int


@dataclass
class Shared:
    """Of one compressed cache in one pass; ``chosen``: slots int32 [T, K] by index source."""

    geometry: Geometry | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)


def shared(metadata: Any) -> Shared:
    """What hangs on a pass's metadata of a compressed cache."""
    found: Shared | None = vars(metadata).get(_NAME)
    if found is None:
        found = Shared()
        setattr(metadata, _NAME, found)
    return found


def geometry(metadata: Any, ratio: int, valid: Tensor, *, anew: bool) -> Geometry:
    """Of the tokens of ``valid`` bool [T]; made ``anew`` by the cache's own layer, else reused."""
    held = shared(metadata)
    if anew or held.geometry is None:
        request = metadata.req_id_per_token[: valid.shape[0]]
        held.geometry = Geometry(
            metadata.block_table,
            torch.where(valid, request, -1),
            metadata.block_size // ratio,
        )
    return held.geometry


def chosen(metadata: Any, source: int, make: Callable[[], Tensor], *, anew: bool) -> Tensor:
    """Slots int32 [T, K] of what index source ``source`` chose, -1 for none; made ``anew`` by that
    layer, else reused."""
    held = shared(metadata).chosen
    if anew or source not in held:
        held[source] = make()
    return held[source]


def slots_of(topk: Tensor, where: Geometry) -> Tensor:
    """The torch reference of the kernel: ``topk`` int32 [T, K], positions within each request, to
    physical slots; -1 for what is negative, beyond the request's table, or of a padded row."""
    request = where.request[: topk.shape[0], None].long()
    page = topk.long() // where.states
    pages = where.block_table.shape[1]
    exists = (topk >= 0) & (request >= 0) & (page < pages)
    block = where.block_table[request.clamp_min(0), page.clamp(0, pages - 1)]
    return torch.where(exists, block * where.states + topk % where.states, -1).to(topk.dtype)
