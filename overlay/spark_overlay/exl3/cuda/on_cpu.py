"""The ops on a CPU: the torch reference, behind the same arguments."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from spark_overlay.exl3 import reference
from spark_overlay.exl3.cuda.checks import NUMBERED, Routed, check_group
from spark_overlay.exl3.format import Codebook


def group(
    xs: list[Tensor],
    trellis: list[Tensor],
    suh: list[Tensor],
    svh: list[Tensor],
    bias: list[Tensor | None],
    codebooks: list[int],
    dtype: torch.dtype,
) -> Tensor:
    check_group(xs, trellis, suh, svh, bias, codebooks, dtype)
    every = xs if len(xs) == len(trellis) else xs * len(trellis)
    parts = [
        reference.linear(x.float(), t, u, v, NUMBERED[book], b)
        for x, t, u, v, b, book in zip(every, trellis, suh, svh, bias, codebooks, strict=True)
    ]
    return torch.cat(parts, -1).to(dtype)


def experts(a: Routed) -> Tensor:
    out = torch.zeros(a.x.shape, dtype=torch.float32)
    clamp = a.limit if a.limit > 0 else math.inf
    local = a.ids.long() - a.first_id
    for entry in sorted({i for i in local.flatten().tolist() if 0 <= i < a.experts}):
        token, choice = (local == entry).nonzero(as_tuple=True)
        y = _one_expert(a.x[token].float(), a.table[:, entry], a.inter, clamp)
        out.index_add_(0, token, y * a.weights[token, choice, None])
    if a.shared:
        out += _one_expert(a.x.float(), a.table[:, a.experts], a.inter, clamp)
    return out.to(a.dtype)


def _one_expert(x: Tensor, entry: Tensor, inter: int, limit: float) -> Tensor:
    """From the addresses of one expert, which on a CPU can be followed."""
    hidden = x.shape[1]
    gate, up = (_at(entry[i], hidden, inter) for i in (0, 1))
    inner = torch.nn.functional.silu(reference.linear(x, *gate).clamp_max(limit))
    return reference.linear(
        inner * reference.linear(x, *up).clamp(-limit, limit), *_at(entry[2], inter, hidden)
    )


def _at(entry: Tensor, n_in: int, n_out: int) -> tuple[Tensor, Tensor, Tensor, Codebook]:
    trellis, suh, svh, packed = entry.tolist()
    k2 = packed & 0xFF

    def read(address: int, dtype: torch.dtype, *shape: int) -> Tensor:
        held = (ctypes.c_char * (2 * math.prod(shape))).from_address(address)
        return torch.frombuffer(held, dtype=dtype).view(shape)

    tiles = read(trellis, torch.int16, n_in // 16, n_out // 16, 8 * k2)
    scales = (read(suh, torch.float16, n_in), read(svh, torch.float16, n_out))
    return tiles, *scales, NUMBERED[packed >> 8]


def decode(trellis: Tensor, codebook: int) -> Tensor:
    return reference.decode_torch(trellis, NUMBERED[codebook])
