"""Rotary position tables with YaRN. Source: Peng et al., "YaRN" (2023), as DeepSeek uses it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spark_overlay.attention.format import ROPE_DIM
from spark_overlay.reference.config import Rope


def cos_sin(rope: Rope, positions: int) -> Tensor:
    """``[positions, 64]`` float32: 32 cosines, then 32 sines.

    A frequency that turns often within the original length stays; one that turns less than once is
    slowed by ``factor``; between them the two are mixed linearly.
    """
    half = ROPE_DIM // 2
    period = rope.theta ** (torch.arange(half, dtype=torch.float32) * 2 / ROPE_DIM)
    frequency = 1.0 / period
    if rope.factor != 1.0:
        low = max(0, math.floor(_turns_at(rope.beta_fast, rope)))
        high = min(ROPE_DIM - 1, math.ceil(_turns_at(rope.beta_slow, rope)))
        step = torch.arange(half, dtype=torch.float32)
        kept = 1 - ((step - low) / max(high - low, 0.001)).clamp(0, 1)
        frequency = 1.0 / (rope.factor * period) * (1 - kept) + frequency * kept
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), -1)


def _turns_at(turns: float, rope: Rope) -> float:
    """Index of the frequency that makes ``turns`` turns within the original length."""
    length = rope.original_positions / (turns * 2 * math.pi)
    return ROPE_DIM * math.log(length) / (2 * math.log(rope.theta))
