"""Torch references of the KV compressor: pooling with its ring of open groups, and insertion."""

from __future__ import annotations

import torch
from torch import Tensor

from spark_overlay.arithmetic import wide
from spark_overlay.attention.reference import Unrounded, encode_records, rms_norm, write_records


def pool_and_norm(
    kv_score: Tensor,
    positions: Tensor,
    ring: Tensor | None,
    slots: Tensor,
    query_start: Tensor | None,
    request: Tensor | None,
    weight: Tensor,
    eps: float,
    ratio: int,
    latent: Tensor,
) -> None:
    """Pool ``ratio`` consecutive tokens into one normalised latent; keep the open rows in the ring.

    Ratio 1: ``kv_score [T, 512]`` float32 is the latent itself. Ratio 2: ``kv_score [T, 1024]`` =
    value and score; at every odd position the pair's values are mixed by an elementwise softmax
    over its two scores. ``latent [T, 512]`` bf16 is written at group ends only. ``ring [R, C,
    1024]`` holds the last ``C`` rows of each request, addressed by ``slots`` (``r * C + position %
    C``, -1 = none). ``query_start [N+1]``, ``request [T]``: the batch's requests, needed for ratio
    2."""
    count = slots.numel()
    if count == 0:
        return
    slots = slots.long()
    live = slots >= 0
    if ratio == 1:
        rows = live.nonzero()[:, 0]
        latent[rows] = rms_norm(kv_score[rows], weight, eps).to(latent.dtype)
        return
    if ratio != 2 or ring is None or query_start is None or request is None:
        raise ValueError(f"ratio {ratio} needs a ring and the batch's requests; only 1 and 2 exist")
    half = latent.shape[-1]
    capacity = ring.shape[1]
    position = positions[:count]
    token = torch.arange(count, device=slots.device)
    request = request[:count].long()
    closes = live & (position % 2 == 1)
    opens_step = closes & (token == query_start[request].long())

    previous = torch.zeros_like(kv_score[:count])
    within = (closes & ~opens_step).nonzero()[:, 0]
    previous[within] = kv_score[within - 1]
    from_ring = opens_step.nonzero()[:, 0]
    previous[from_ring] = ring[slots[from_ring] // capacity, (position[from_ring] - 1) % capacity]

    end = closes.nonzero()[:, 0]
    first, second = previous[end], kv_score[end]
    mix = torch.softmax(wide(torch.stack((first[:, half:], second[:, half:]))), 0)
    pooled = mix[0] * first[:, :half] + mix[1] * second[:, :half]
    latent[end] = rms_norm(pooled, weight, eps).to(latent.dtype)

    tail = live & (token >= query_start[request + 1].long() - capacity)
    ring[slots[tail] // capacity, slots[tail] % capacity] = kv_score[:count][tail]


def insert_latent(
    latent: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    ratio: int,
    unrounded: Unrounded = None,
) -> None:
    """Rotate group-end latents to their group's first position and store them as records."""
    count = slots.numel()
    position = positions[:count]
    rows = ((slots >= 0) & ((position + 1) % ratio == 0)).nonzero()[:, 0]
    if rows.numel() == 0:
        return
    group = position[rows] // ratio * ratio
    data, scales = encode_records(latent[rows], group, cos_sin, unrounded)
    write_records(cache, slots[rows], data, scales, cache.shape[1])
