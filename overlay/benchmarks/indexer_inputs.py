"""Steps of the indexer at V4.1's shapes, random, as many as no cache holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

HEADS, KEY_DIM, STATE_BYTES, COUNT = 32, 128, 132, 512
BLOCKS, SIZE = 2048, 8
STATES = 64
SETS_BYTES = 192 << 20  # of keys between two uses of the same


@dataclass(frozen=True)
class Shape:
    """``requests`` of ``rows`` rows each, which see ``context`` positions."""

    name: str
    requests: int
    rows: int
    context: int

    @property
    def total(self) -> int:
        return self.requests * self.rows

    @property
    def key_bytes(self) -> int:
        """Each request's keys once."""
        return self.requests * self.context * STATE_BYTES

    def limited_bytes(self) -> int:
        """Each row's candidate blocks once."""
        return self.total * min(self.context, BLOCKS * SIZE) * STATE_BYTES

    @property
    def flops(self) -> float:
        return 2.0 * self.total * self.context * HEADS * KEY_DIM


@dataclass
class Inputs:
    """One set. ``chosen [T, 2048]``: random candidate blocks, ascending."""

    q: Any
    weights: Any
    cache: Any
    step: Any
    chosen: Any
    final: Any


def seen(shape: Shape) -> Any:
    """``[T]`` int32: positions that each row sees."""
    import torch

    one = torch.arange(shape.context - shape.rows, shape.context, device="cuda") + 1
    return one.repeat(shape.requests).int()


def sets_of(shape: Shape, most: int = 12) -> list[Inputs]:
    count = min(most, max(2, math.ceil(SETS_BYTES / shape.key_bytes)))
    return [inputs(shape, seed) for seed in range(count)]


def inputs(shape: Shape, seed: int) -> Inputs:
    import torch

    from spark_overlay.indexer.kernels.launch import Step

    gpu = "cuda"
    draw = torch.Generator(gpu).manual_seed(seed)
    pages = -(-shape.context // STATES)
    blocks = pages * shape.requests
    # A page lies beside its main cache's records, as vLLM packs a block.
    stride = STATES * STATE_BYTES
    cache = torch.randint(0, 0x58, (blocks, stride), generator=draw, device=gpu, dtype=torch.uint8)
    sign = torch.randint(0, 2, (blocks, stride), generator=draw, device=gpu, dtype=torch.uint8)
    cache |= sign << 7
    cache[:, STATES * KEY_DIM :] = torch.tensor(
        [0, 0, 0, 0x3C], dtype=torch.uint8, device=gpu
    ).repeat(STATES)
    q = torch.randn(shape.total, HEADS, KEY_DIM, generator=draw, device=gpu)
    requests = torch.arange(shape.requests, device=gpu)
    chosen = torch.full((shape.total, BLOCKS), -1, dtype=torch.int32, device=gpu)
    tops = -(-shape.context // SIZE)
    for row in range(shape.total):
        some = torch.randperm(tops, generator=draw, device=gpu)[:BLOCKS].sort().values
        chosen[row, : len(some)] = some
    return Inputs(
        q=q.to(torch.float8_e4m3fn),
        weights=torch.randn(shape.total, HEADS, generator=draw, device=gpu) / 64,
        cache=cache.view(blocks, STATES, STATE_BYTES),
        step=Step(
            request=requests.repeat_interleave(shape.rows).int(),
            starts=torch.arange(0, shape.total + 1, shape.rows, device=gpu).int(),
            lengths=torch.full((shape.requests,), shape.context, dtype=torch.int32, device=gpu),
            table=torch.randperm(blocks, generator=draw, device=gpu).int().view(-1, pages),
            longest=shape.rows,
            bound=shape.context,
        ),
        chosen=chosen,
        final=torch.empty(shape.total, COUNT, dtype=torch.int32, device=gpu),
    )
