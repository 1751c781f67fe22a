"""Torch references of manifold-constrained hyper-connections (mHC) with a delayed pre-mix.

``S`` residual streams (4) run beside each other. Each sublayer reads one mixture of them, and its
output is written back to all. The mixture's coefficients (pre-mix) are computed one sublayer ahead
from the same projection that gives this sublayer's post and residual mixes.
Source: DeepSeek V4.1 as vLLM 0.33.0 runs it (``mhc_pre_delayed``, ``mhc_post``, ``hc_collapse``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spark_overlay.arithmetic import einsum, wide


class Mixes(NamedTuple):
    """Coefficients of one sublayer, float32: ``post [T, S]``, ``residual [T, S, S]``, ``next_pre
    [T, S]``."""

    post: Tensor
    residual: Tensor
    next_pre: Tensor


def sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """``logits [T, S, S]`` -> nearly doubly stochastic: softmax over rows, then columns and rows
    normalised in turn, ``iterations`` column passes in all."""
    mix = torch.softmax(logits, -1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


def mixes(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_gain: float,
    iterations: int,
) -> Mixes:
    """``x [T, D]`` (all streams, or the embedding on the first layer), ``fn [S*(S+2), D]`` float32,
    ``scale [3]``, ``base [S*(S+2)]``. The projection is divided by x's root mean square afterwards.
    """
    x = wide(x)
    projected = x @ wide(fn).t() * torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps)
    projected = projected.float()
    streams = round((1 + projected.shape[-1]) ** 0.5) - 1
    pre, post, comb = projected.split((streams, streams, streams * streams), -1)
    base_pre, base_post, base_comb = base.split((streams, streams, streams * streams))
    logits = (comb * scale[2] + base_comb).unflatten(-1, (streams, streams))
    return Mixes(
        post=torch.sigmoid(wide(post * scale[1] + base_post)).float() * post_gain,
        residual=sinkhorn(wide(logits), sinkhorn_eps, iterations).float(),
        next_pre=torch.sigmoid(wide(pre * scale[0] + base_pre)).float() + pre_eps,
    )


def collapse(streams: Tensor, pre: Tensor | None) -> Tensor:
    """``sum_s pre_s * stream_s``: ``[T, S, H]``, ``[T, S]`` -> ``[T, H]``; stream 0 where pre is
    None."""
    if pre is None:
        return streams[:, 0]
    return (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)


def expand(output: Tensor, streams: Tensor, post: Tensor, residual: Tensor) -> Tensor:
    """``stream'_j = post_j * output + sum_i residual[i, j] * stream_i``; dtype of ``streams``."""
    mixed = einsum("tij,tih->tjh", residual, streams)
    return (mixed + post.float().unsqueeze(-1) * output.float().unsqueeze(1)).to(streams.dtype)
