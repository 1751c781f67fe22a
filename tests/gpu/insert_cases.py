"""Inputs of the cache inserts; expected pages by the references. ``gpu``: as a GPU's kernels write
them, which add some products unrounded, where Triton's interpreter rounds all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spark_overlay.attention import reference as attention
from spark_overlay.attention.format import RECORD_BYTES
from spark_overlay.attention.inserts import ops
from spark_overlay.compressor.reference import insert_latent
from spark_overlay.indexer import reference as indexer
from spark_overlay.indexer.format import STATE_BYTES

EPS = 1e-6
POISON = 0xA5


@dataclass
class Rows:
    """``rows [T, 512]`` bf16 of very different sizes, ``slots`` at random with some -1, positions
    of several requests one after the other."""

    rows: Tensor
    keys: Tensor
    weight: Tensor
    q: Tensor
    positions: Tensor
    slots: Tensor
    cos_sin: Tensor

    def to(self, device: str) -> Rows:
        return Rows(**{name: value.to(device) for name, value in vars(self).items()})


def draw(tokens: int, states: int, heads: int = 3, seed: int = 0) -> Rows:
    """``states``: slots that the cache has."""
    g = torch.Generator().manual_seed(seed + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    rows = normal(tokens, 512) * torch.exp(3 * normal(tokens, 1))
    if tokens > 6:
        # Zeros, what bf16 has at its end, powers of two and their neighbours, subnormal codes.
        rows[1], rows[2] = 0.0, 3e38
        rows[3] = 448.0 * 2.0 ** torch.randint(-9, 9, (512,), generator=g)
        rows[4, ::64], rows[5] = 448.0, 2.0**-20
        rows[6] *= torch.exp(-8 * torch.rand(512, generator=g))
    angle = 3 * normal(4096, 32)
    slots = torch.randperm(states, generator=g)[:tokens].long()
    slots[tokens // 2 :: 7] = -1
    starts = torch.randint(0, 3000, (1 + tokens // 9,), generator=g)
    return Rows(
        rows=rows.bfloat16(),
        keys=(normal(tokens, 128) * torch.exp(2 * normal(tokens, 1))).bfloat16(),
        weight=(1 + 0.1 * normal(128)).bfloat16(),
        q=normal(tokens, heads, 512).bfloat16(),
        positions=(starts.repeat_interleave(9)[:tokens] + torch.arange(tokens) % 9).long(),
        slots=slots,
        cos_sin=torch.cat((angle.cos(), angle.sin()), -1),
    )


def cache(blocks: int, block: int, width: int, device: str = "cpu", gap: int = 448) -> Tensor:
    """Pages full of a pattern, further apart than their bytes."""
    stride = block * width + gap
    room = torch.full((blocks * stride,), POISON, dtype=torch.uint8, device=device)
    return room.as_strided((blocks, block, width), (stride, width, 1))


def whole(pages: Tensor) -> Tensor:
    """All bytes of a cache, its gaps included."""
    stride = pages.stride(0)
    return pages.as_strided((pages.shape[0] * stride,), (1,)).cpu()


def latents(rows: Rows, pages: Tensor, ratio: int, ours: bool, gpu: bool = False) -> Tensor:
    given = (rows.rows, rows.positions, rows.cos_sin, pages, rows.slots, ratio)
    if ours:
        ops.rope_quant_insert(*given)
    else:
        insert_latent(*given, "cosine" if gpu else None)
    return whole(pages)


def keys(rows: Rows, pages: Tensor, ratio: int, ours: bool, gpu: bool = False) -> Tensor:
    given = (rows.keys, rows.positions, rows.cos_sin, rows.weight, EPS, pages, rows.slots, ratio)
    if ours:
        ops.indexer_k_norm_rope_store(*given, False)
    else:
        indexer.store_keys(*given, "cosine" if gpu else None)
    return whole(pages)


def window(
    rows: Rows, pages: Tensor, padded: int, ours: bool, gpu: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotated queries and the cache's bytes."""
    unrounded: attention.Unrounded = "even" if gpu else None
    block = pages.shape[1]
    if ours:
        found = ops.rotate_queries_and_insert(
            rows.q, rows.rows, pages, rows.slots, rows.positions, rows.cos_sin, padded, block
        )
    else:
        found = rows.q.new_zeros(rows.q.shape[0], padded, 512)
        found[:, : rows.q.shape[1]] = attention.rotate_tail(
            rows.q, rows.cos_sin, rows.positions, unrounded=unrounded
        )
        attention.insert_kv(
            rows.rows, pages, rows.slots, rows.positions, rows.cos_sin, block, unrounded
        )
    return found.cpu(), whole(pages)


WIDTHS = {"record": RECORD_BYTES, "key": STATE_BYTES}
