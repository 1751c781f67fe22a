"""Torch references of the lightning indexer: key store, scores, two-level candidates, top-k."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spark_overlay.arithmetic import einsum
from spark_overlay.attention.format import e4m3_values
from spark_overlay.attention.reference import (
    AMAX_FLOOR,
    E4M3_MAX,
    Unrounded,
    e4m3_exponent,
    fields,
    rms_norm,
    rotate_tail,
    to_e4m3,
)
from spark_overlay.indexer.format import KEY_DIM, SCALE_BYTES

#: Bytes of a state: the key, its float32 scale.
STATE = (KEY_DIM, SCALE_BYTES)


def store_keys(
    key: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    weight: Tensor,
    eps: float,
    cache: Tensor,
    slots: Tensor,
    ratio: int,
    unrounded: Unrounded = None,
) -> None:
    """Normalise, rotate, quantise and store index keys of group-end tokens.

    ``key [>=T, 128]``; ``cache [blocks, states, 132]`` uint8; ``slots [T]``, -1 = none. The last 64
    of the 128 values are rotated to the group's first position.
    """
    count = slots.numel()
    position = positions[:count]
    rows = ((slots >= 0) & ((position + 1) % ratio == 0)).nonzero()[:, 0]
    if rows.numel() == 0:
        return
    group = position[rows] // ratio * ratio
    normed = rms_norm(key[rows], weight, eps).bfloat16().float()
    value = rotate_tail(normed, cos_sin, group, unrounded=unrounded).bfloat16().float()
    exponent = e4m3_exponent(value.abs().amax(-1))
    block = cache.shape[1]
    slot = slots[rows].long()
    where = slot // block, slot % block
    values, scales = fields(cache, block, STATE)
    values[where] = to_e4m3(value, exponent[:, None])
    scales[where] = torch.exp2(exponent)[:, None].contiguous().view(torch.uint8)


def read_keys(cache: Tensor, slots: Tensor) -> Tensor:
    """Index keys at ``slots`` (any shape, all >= 0) as float32 ``[..., 128]``."""
    block = cache.shape[1]
    where = slots // block, slots % block
    value, scale = (stored[where] for stored in fields(cache, block, STATE))
    return e4m3_values(value) * scale.contiguous().view(torch.float32)


def quantise_queries(
    query: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    softmax_scale: float,
    head_scale: float,
) -> tuple[Tensor, Tensor]:
    """Rotate and quantise index queries; their scales go into the heads' weights.

    ``query [T, H, 128]``, rotated in float32 and rounded to bf16, ``weights [T, H]`` ->
    e4m3 values ``[T, H, 128]`` and float32 ``[T, H]``: weight x query's scale x both scales.
    """
    value = rotate_tail(query.float(), cos_sin, positions).bfloat16().float()
    # Divided, where e4m3_exponent multiplies: as vLLM's query kernel does.
    exponent = torch.ceil(torch.log2(value.abs().amax(-1).clamp_min(AMAX_FLOOR) / E4M3_MAX))
    folded = weights.float() * torch.exp2(exponent) * softmax_scale * head_scale
    return to_e4m3(value, exponent[..., None]).view(torch.float8_e4m3fn), folded


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """``sum_h w_h * relu(q_h . k)``: ``q [T, H, 128]``, ``weights [T, H]``, ``keys [N, 128]`` ->
    float32 ``[T, N]``."""
    return einsum("th,thn->tn", weights, einsum("thd,nd->thn", q, keys).relu())


def candidate_blocks(score: Tensor, visible: Tensor, count: int, size: int) -> Tensor:
    """Best ``count`` blocks of ``size`` positions by their best score, ``[T, count]`` int32, -1
    padded.

    ``score [T, N]`` already -inf beyond ``visible [T]``. A token's newest block is always chosen.
    """
    tokens, positions = score.shape
    blocks = -(-positions // size)
    padded = F.pad(score, (0, blocks * size - positions), value=float("-inf"))
    best = padded.view(tokens, blocks, size).amax(-1)
    seen = (visible > 0).nonzero()[:, 0]
    best[seen, (visible[seen] - 1) // size] = float("inf")
    return top_positions(best, count)


def keep_candidates(score: Tensor, chosen: Tensor, size: int) -> Tensor:
    """``score [T, N]`` with everything outside the ``chosen [T, B]`` blocks set to -inf."""
    blocks = -(-score.shape[1] // size)
    keep = torch.zeros(score.shape[0], blocks + 1, dtype=torch.bool, device=score.device)
    # Column `blocks` collects the padding (-1) and blocks that begin past the scored range.
    outside = (chosen < 0) | (chosen >= blocks)
    keep.scatter_(1, torch.where(outside, blocks, chosen).long(), True)
    block_of = torch.arange(score.shape[1], device=score.device) // size
    return score.masked_fill(~keep[:, block_of], float("-inf"))


def top_positions(score: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` best finite scores, ``[T, count]`` int32, -1 padded.

    Scores tie exactly (the ReLU makes many zero); the earlier position wins, so that the choice
    does not depend on how far the row was scored."""
    value, index = torch.sort(score, dim=-1, descending=True, stable=True)
    chosen = torch.where(value == float("-inf"), -1, index).int()[:, :count]
    return F.pad(chosen, (0, count - chosen.shape[1]), value=-1)


def all_visible(positions: Tensor, count: int, ratio: int) -> Tensor:
    """``[T, count]`` int32 of ``0 .. visible-1`` then -1: every compressed position a token may
    see."""
    column = torch.arange(count, device=positions.device)[None]
    return torch.where(column < ((positions + 1) // ratio)[:, None], column, -1).int()
