"""Comparisons bit by bit, on whatever device the values are."""

from __future__ import annotations

import torch
from torch import Tensor


def differ(one: Tensor, other: Tensor) -> Tensor:
    """bool ``[tokens]``: whether two bf16 ``[tokens, ...]`` differ there in a bit."""
    return (one.view(torch.int16) != other.view(torch.int16)).flatten(1).any(1)
