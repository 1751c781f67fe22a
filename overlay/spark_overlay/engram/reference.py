"""Engram in torch: table rows to bf16, and the gate that adds them to the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from spark_overlay.arithmetic import wide
from spark_overlay.engram.layout import SCALE_GROUP, EngramError

#: Below this |dot| the gate's root is flat; keeps its slope finite.
GATE_FLOOR = 1e-6


def dequantize_rows(weights: Tensor, scales: Tensor) -> Tensor:
    """bf16 ``[..., dim]`` = e4m3 value * 2^(scale - 127), rounded once.

    ``weights`` must be typed float8_e4m3fn: bytes typed uint8 would convert as the integers
    0..255, which reads as fluent text and is wrong, so they are refused. Give
    ``rows.view(torch.float8_e4m3fn)``. ``scales`` uint8 ``[..., dim/32]`` are exponents, taken as
    the exponent field of a float32 (0 gives zero, 255 infinity). As vLLM 0.33.0's lookup.
    """
    if weights.dtype != torch.float8_e4m3fn or scales.dtype != torch.uint8:
        raise EngramError(
            f"rows are {weights.dtype} with {scales.dtype} scales, expected float8_e4m3fn with "
            "uint8; view the bytes, do not convert them"
        )
    if weights.shape != (*scales.shape[:-1], SCALE_GROUP * scales.shape[-1]):
        raise EngramError(
            f"rows {list(weights.shape)} with scales {list(scales.shape)}, expected one scale "
            f"for {SCALE_GROUP} columns"
        )
    scale = (scales.int() << 23).view(torch.float32)
    return (weights.float() * scale.repeat_interleave(SCALE_GROUP, dim=-1)).bfloat16()


def gate_values(
    hidden: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    token_mask: Tensor | None = None,
) -> Tensor:
    """``hidden + gate * value`` for S residual streams ``[T, S, D]``, in hidden's dtype.

    ``kv [T, (S + 1) * D]`` is wkv's output: a key for each stream, then one value for all.
    ``q_weight``, ``k_weight`` ``[S, D]`` are the norms' weights. gate = sigmoid(sign(dot) *
    sqrt(max(|dot|, 1e-6))), dot = sum(norm(hidden) * q * norm(key) * k) / sqrt(D). The gate of
    tokens whose ``token_mask [T]`` is false (image spans) is 0. Computed wide, rounded once.
    """
    tokens, streams, dim = hidden.shape
    if kv.shape != (tokens, (streams + 1) * dim):
        raise EngramError(
            f"wkv gave {list(kv.shape)} for hidden {list(hidden.shape)}, expected "
            f"{[tokens, (streams + 1) * dim]}"
        )
    h = wide(hidden)
    key, value = wide(kv).view(tokens, streams + 1, dim).split((streams, 1), dim=1)
    h_rms = torch.rsqrt(h.square().mean(-1) + eps)
    key_rms = torch.rsqrt(key.square().mean(-1) + eps)
    dot = (h * q_weight.float() * k_weight.float() * key).sum(-1) * h_rms * key_rms * dim**-0.5
    root = dot.abs().clamp_min(GATE_FLOOR).sqrt()
    gate = torch.sigmoid(torch.where(dot < 0, -root, root))
    if token_mask is not None:
        gate = gate.masked_fill(~token_mask.bool()[:, None], 0.0)
    return (h + gate[..., None] * value).to(hidden.dtype)
