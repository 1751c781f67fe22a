"""Random EXL3 matrices and layers on a device, and their float64 answers; without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spark_overlay.exl3 import format as fmt
from spark_overlay.exl3 import reference
from spark_overlay.exl3.cuda import library, ops
from spark_overlay.exl3.format import Codebook

RATES: list[tuple[Codebook, int]] = [
    (book, k2) for book in fmt.CODEBOOKS for k2 in fmt.LEGAL_K2 if book == "mul1" or k2 % 2 == 0
]
#: Relative RMS of fp32 outputs against float64.
DENSE, EXPERTS = 5e-4, 1.2e-3


@dataclass(frozen=True)
class Matrix:
    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: Codebook = "mul1"
    bias: Tensor | None = None

    @property
    def entry(self) -> ops.Entry:
        return self.trellis, self.suh, self.svh, self.codebook

    def right(self, x: Tensor) -> Tensor:
        """``x @ W`` in float64."""
        y = reference.linear(x.double(), *self.entry)
        return y if self.bias is None else y + self.bias.double()

    def cut(self, part: fmt.Exl3Slice) -> Matrix:
        trellis = part.trellis_of(self.trellis).contiguous()
        return replace(self, trellis=trellis, suh=self.suh[part.suh], svh=self.svh[part.svh])

    @property
    def tensors(self) -> list[Tensor]:
        return [self.trellis, self.suh, self.svh]


def matrix(
    n_in: int, n_out: int, k2: int, seed: int, device: str, codebook: Codebook = "mul1"
) -> Matrix:
    """Random words are a legal trellis of deviation 1; outputs have about that of the input."""
    made = torch.Generator(device).manual_seed(seed)
    tiles = (n_in // 16, n_out // 16, 8 * k2)
    trellis = torch.randint(
        -(1 << 15), 1 << 15, tiles, dtype=torch.int16, device=device, generator=made
    )
    suh, svh = (
        signed(size, made, device) * scale for size, scale in ((n_in, 1.0), (n_out, n_in**-0.5))
    )
    return Matrix(trellis, suh.half(), svh.half(), codebook)


def signed(size: int, made: torch.Generator, device: str) -> Tensor:
    """Random signs, magnitudes 0.75 to 1.25."""
    values = torch.rand(size, generator=made, device=device) * 2 - 1
    return (0.75 + 0.5 * values.abs()) * values.sign()


def rows(count: int, width: int, device: str, seed: int = 0) -> Tensor:
    made = torch.Generator(device).manual_seed(1000 + seed)
    return torch.randn((count, width), generator=made, device=device).bfloat16()


def group(
    xs: Sequence[Tensor], matrices: Sequence[Matrix], dtype: torch.dtype = torch.float32
) -> Tensor:
    trellis, suh, svh = map(list, zip(*(m.tensors for m in matrices), strict=True))
    numbers = [library.CODEBOOKS[m.codebook] for m in matrices]
    return ops.group(xs, trellis, suh, svh, [m.bias for m in matrices], numbers, dtype)


def group_right(xs: Sequence[Tensor], matrices: Sequence[Matrix]) -> Tensor:
    every = xs if len(xs) == len(matrices) else list(xs) * len(matrices)
    return torch.cat([m.right(x) for m, x in zip(matrices, every, strict=True)], -1)


class Layer:
    """Routed experts, the last one shared if ``shared``; rates by entry, in a round."""

    def __init__(
        self,
        hidden: int,
        inter: int,
        entries: int,
        rates: Sequence[int],
        device: str,
        *,
        shared: bool = False,
        codebook: Codebook = "mul1",
        seed: int = 0,
    ) -> None:
        self.hidden, self.inter, self.shared = hidden, inter, shared
        self.experts = entries - shared
        self.max_k2 = max(rates)
        self.parts = [
            [
                matrix(
                    *((inter, hidden) if which == 2 else (hidden, inter)),
                    rates[(e + which) % len(rates)],
                    seed + 3 * e + which,
                    device,
                    codebook,
                )
                for e in range(entries)
            ]
            for which in range(3)
        ]
        self.table = ops.experts_table(*([m.entry for m in part] for part in self.parts))

    def run(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        first: int = 0,
        limit: float | None = 10.0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        return ops.experts(
            x, ids, weights, self.table, self.experts, self.inter, self.max_k2,
            first_id=first, shared=self.shared, limit=limit, dtype=dtype,
        )  # fmt: skip

    def right(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        first: int = 0,
        limit: float | None = 10.0,
    ) -> Tensor:
        """In float64."""
        x = x.double()
        out = torch.zeros_like(x)
        local = ids.long() - first
        for e in sorted({i for i in local.flatten().tolist() if 0 <= i < self.experts}):
            token, choice = (local == e).nonzero(as_tuple=True)
            y = self._one(e, x[token], limit) * weights[token, choice, None].double()
            out.index_add_(0, token, y)
        return out + self._one(self.experts, x, limit) if self.shared else out

    def _one(self, e: int, x: Tensor, limit: float | None) -> Tensor:
        gate, up, down = (part[e] for part in self.parts)
        g, u = gate.right(x), up.right(x)
        if limit is not None:
            g, u = g.clamp_max(limit), u.clamp(-limit, limit)
        return down.right(torch.nn.functional.silu(g) * u)


def routing(
    tokens: int, topk: int, experts: int, device: str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Ids int64 ``[tokens, topk]``, no two alike in a token, and weights fp32."""
    made = torch.Generator(device).manual_seed(2000 + seed)
    scores = torch.rand((tokens, experts), generator=made, device=device)
    weights, ids = scores.topk(topk, -1)
    return ids, (weights / weights.sum(-1, keepdim=True) * 1.5).contiguous()


def off(found: Tensor, right: Tensor) -> float:
    """Relative RMS error."""
    return ((found.double() - right).norm() / right.norm()).item()
