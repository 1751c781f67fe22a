"""Attention over paged fp8 records against a plain computation in float64 with numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spark_overlay.attention import reference as serving
from spark_overlay.attention.format import (
    HEAD_DIM,
    NOPE_DIM,
    RECORD_BYTES,
    ROPE_DIM,
    SCALE_GROUP,
)
from spark_overlay.verify.report import Check, Outcome, within

#: A stored value against its row: e4m3 keeps 3 bits of mantissa, so half a step is 2^-4 of the
#: value, or 2^-10 of the largest of its group where it is subnormal; bf16 keeps 7.
E4M3_STEP, E4M3_LEAST, BF16_STEP = 2.0**-4, 2.0**-10, 2.0**-8
#: Attention's and RoPE's own sums are float32.
SUM = 1e-5
TOKENS, HEADS, BLOCK, WINDOW, BLOCKS = 6, 8, 64, 96, 4
Array = npt.NDArray[np.float64]


def checks(device: torch.device, on: str) -> Iterator[Check]:
    yield Check("attention records", on, lambda: records(device))
    yield Check("attention with a sink", on, lambda: attention(device))
    if device.type == "cuda":
        yield Check("attention by its kernel", on, lambda: kernel(device))


def angles(count: int) -> Array:
    """cos and sin ``[count, 64]`` of every position, 32 frequencies."""
    half = ROPE_DIM // 2
    turn = np.arange(count)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.concatenate((np.cos(turn), np.sin(turn)), -1)


def rotated(x: Array, table: Array, positions: npt.NDArray[np.int64]) -> Array:
    """Pairs of neighbours as complex numbers, turned."""
    half = ROPE_DIM // 2
    turn = table[positions, :half] + 1j * table[positions, half:]
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack((turned.real, turned.imag), -1).reshape(x.shape)


def stored(device: torch.device) -> tuple[Array, Tensor, Tensor]:
    """What was written, float64 ``[n, 512]``; the cache; the slots, in no order."""
    made = torch.Generator().manual_seed(3)
    count = TOKENS * 20
    kv = torch.randn((count, HEAD_DIM), generator=made) * torch.logspace(-3, 2, count)[:, None]
    kv = kv.bfloat16()
    slots = torch.randperm(BLOCK * BLOCKS, generator=made)[:count]
    positions = torch.arange(count) * 7
    table = angles(int(positions.max()) + 1)
    cache = torch.zeros((BLOCKS, BLOCK, RECORD_BYTES), dtype=torch.uint8, device=device)
    cos_sin = torch.from_numpy(table).float().to(device)
    serving.insert_kv(kv.to(device), cache, slots.to(device), positions.to(device), cos_sin, BLOCK)
    plain = kv.double().numpy().copy()
    plain[:, NOPE_DIM:] = rotated(plain[:, NOPE_DIM:], table, positions.numpy())
    return plain, cache, slots.to(device)


def records(device: torch.device) -> Outcome:
    """The worst of written values read again, as a part of what their format may lose."""
    plain, cache, slots = stored(device)
    read = serving.read_records(cache, slots).cpu().double().numpy()
    nope, rope = slice(None, NOPE_DIM), slice(NOPE_DIM, None)
    groups = np.abs(plain[:, nope]).reshape(len(plain), -1, SCALE_GROUP).max(-1)
    least = np.repeat(groups, SCALE_GROUP, -1) * E4M3_LEAST
    allowed = np.maximum(np.abs(plain[:, nope]) * E4M3_STEP, least)
    low = np.abs(read[:, nope] - plain[:, nope]) / allowed
    # A pair's two members share the error of the angle.
    pair = np.sqrt((plain[:, rope] ** 2).reshape(len(plain), -1, 2).sum(-1))
    high = np.abs(read[:, rope] - plain[:, rope]) / np.repeat(pair, 2, -1) / BF16_STEP
    return within(float(max(low.max(), high.max())), 1.05)


def attention(device: torch.device) -> Outcome:
    _, cache, slots = stored(device)
    made = torch.Generator().manual_seed(4)
    chosen = torch.stack(
        [torch.randperm(len(slots), generator=made)[:WINDOW] for _ in range(TOKENS)]
    )
    keys = serving.read_records(cache, slots[chosen.to(device)])
    keys = keys / keys.norm(dim=-1, keepdim=True) * 12
    q = torch.randn((TOKENS, HEADS, HEAD_DIM), generator=made).bfloat16().to(device)
    valid = torch.rand((TOKENS, WINDOW), generator=made) < 0.7
    valid[1] = False  # only the sink: zeros
    sink = torch.linspace(-4, 4, HEADS)
    scale = HEAD_DIM**-0.5
    found = serving.sparse_attention(q, keys, valid.to(device), sink.to(device), scale)
    right = plainly(
        q.cpu().double().numpy(),
        keys.cpu().double().numpy(),
        valid.numpy(),
        sink.double().numpy(),
        scale,
    )
    error = np.abs(found.cpu().double().numpy() - right).max() / np.abs(right).max()
    return within(float(error), SUM)


def kernel(device: torch.device) -> Outcome:
    """The kernel that serves on a GPU, on a step of four tokens and a chunk, against the torch
    reference."""
    from spark_overlay.attention import contest

    wrong = [contest.fault("portable", contest.case(device, tokens)) for tokens in (4, 256)]
    return Outcome(not any(wrong), "; ".join(filter(None, wrong)) or "right")


def plainly(q: Array, kv: Array, valid: npt.NDArray[np.bool_], sink: Array, scale: float) -> Array:
    """A query and a head at a time, over the keys that it may see."""
    out = np.zeros_like(q)
    for token in range(q.shape[0]):
        seen = kv[token][valid[token]]
        for head in range(q.shape[1]):
            weight = np.exp(seen @ q[token, head] * scale)
            out[token, head] = weight @ seen / (weight.sum() + np.exp(sink[head]))
    return out
