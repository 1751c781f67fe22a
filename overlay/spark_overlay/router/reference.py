"""Torch reference of V4.1's expert router."""

from __future__ import annotations

import torch
from torch import Tensor

from spark_overlay.arithmetic import wide


def sqrt_softplus_top_k(
    logits: Tensor, bias: Tensor, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """``logits [T, E]``, ``bias [E]`` -> weights float32 and experts int32, both ``[T, top_k]``.

    An expert's score is ``sqrt(softplus(logit))``. The bias steers the choice only; the chosen
    scores, divided by their sum and times ``scaling``, are the weights ("noaux_tc").
    """
    score = torch.nn.functional.softplus(wide(logits)).sqrt().float()
    experts = (score + bias.float()).topk(top_k, -1)[1]
    weights = score.gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) * scaling, experts.int()
