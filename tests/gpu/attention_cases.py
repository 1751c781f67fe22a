"""Paged records and queries for the attention kernels' tests and measurements; torch only."""

from __future__ import annotations

import torch
from torch import Tensor

from spark_overlay.attention.format import DATA_BYTES, NOPE_DIM, RECORD_BYTES, SCALE_BYTES
from spark_overlay.attention.kernels import Source


def made(seed: int, device: str = "cuda") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def cache(
    pages: int, block: int, seed: int, device: str = "cuda", *, pad: int = 0, scales: int = 118
) -> Tensor:
    """uint8 ``[pages, block, 584]``, ``pad`` bytes between: any finite e4m3 code, RoPE values of
    N(0, 1), UE8M0 from ``scales`` to ``scales + 3``; the bytes between pages are 0xFF."""
    size = block * RECORD_BYTES + pad
    source = made(seed, device)
    raw = torch.randint(0, 256, (pages, size), dtype=torch.uint8, device=device, generator=source)
    data = raw[:, : block * DATA_BYTES].unflatten(1, (block, DATA_BYTES))
    nope = data[..., :NOPE_DIM]
    nope.sub_(((nope & 0x7F) == 0x7F).to(torch.uint8))
    rope = torch.randn(pages, block, 64, device=device, generator=source).bfloat16()
    data[..., NOPE_DIM:] = rope.view(torch.uint8)
    tail = raw[:, block * DATA_BYTES : block * RECORD_BYTES].unflatten(1, (block, SCALE_BYTES))
    tail[..., :7] = torch.randint(
        scales, scales + 4, (pages, block, 7), dtype=torch.uint8, device=device, generator=source
    )
    tail[..., 7] = 0
    raw[:, block * RECORD_BYTES :] = 0xFF
    return raw.as_strided((pages, block, RECORD_BYTES), (size, RECORD_BYTES, 1))


def slots(tokens: int, width: int, count: int, seed: int, device: str = "cuda") -> Tensor:
    """int32 ``[tokens, width]`` of ``count`` slots, each at most once a row where it has room."""
    source = made(seed, device)
    if count >= 4 * width:  # distinct within a row: one of each stride's own range
        stride = count // width
        base = torch.arange(width, device=device) * stride
        drawn = torch.randint(0, stride, (tokens, width), device=device, generator=source)
        return (base + drawn).int()
    return torch.randint(
        0, count, (tokens, width), dtype=torch.int32, device=device, generator=source
    )


def queries(tokens: int, heads: int, seed: int, device: str = "cuda") -> Tensor:
    return torch.randn(tokens, heads, 512, device=device, generator=made(seed, device)).bfloat16()


def real(
    tokens: int, seed: int, device: str = "cuda", *, context: int = 16384
) -> tuple[Source, Source]:
    """A window of 128 in pages of 32 and a choice of 512 in pages of 64, of ``context`` records."""
    window = cache(max(8, context // 32), 32, seed, device)
    chosen = cache(max(16, context // 64), 64, seed + 1, device)
    count = window.shape[0] * 32
    first = torch.randint(0, count - 127, (tokens, 1), device=device, generator=made(seed, device))
    recent = (first + torch.arange(128, device=device)).int()
    picks = slots(tokens, 512, chosen.shape[0] * 64, seed + 2, device)
    lengths = torch.full((tokens,), 128, dtype=torch.int32, device=device)
    return Source(window, recent, lengths), Source(chosen, picks)


def tolerance(right: Tensor) -> float:
    """Twice the largest error that rounding the exact result to bf16 makes."""
    return 2 * (right.bfloat16().double() - right).abs().max().item()


def bits(x: Tensor) -> Tensor:
    """Any NaN is like any other."""
    return torch.where(x.isnan(), 0x7FC0, x.contiguous().view(torch.int16).int() & 0xFFFF)


def every_number() -> Tensor:
    """One page of 256 records: record s has scale s in all groups, and codes 0 to 255 in each half
    of its first 448 values and again."""
    raw = torch.zeros(256 * 584, dtype=torch.uint8, device="cuda")
    data = raw[: 256 * 576].view(256, 576)
    data[:, :448] = (torch.arange(448, device="cuda") % 256).to(torch.uint8)
    raw[256 * 576 :].view(256, 8)[:, :7] = torch.arange(256, device="cuda").to(torch.uint8)[:, None]
    return raw.view(1, 256, 584)
