"""Index queries: rotated, quantised to e4m3, their scales folded into the heads' weights.

By integers where vLLM's kernel converts to a type that GPUs before sm_89 have not. Reference:
``quantise_queries``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spark_overlay.indexer.format import KEY_DIM
from spark_overlay.indexer.kernels.e4m3 import from_float32


@triton.jit
def quantise(
    q,
    weights,
    positions,
    cos_sin,
    out,
    out_weights,
    q_stride,
    head_stride,
    weight_stride,
    table_stride,
    softmax_scale,
    head_scale,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """One token; the last ``2 * HALF`` of a head's ``DIM`` values are rotated, in pairs."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED)
    there = (head < HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    table = cos_sin + tl.load(positions + token) * table_stride
    cos, sin = tl.load(table + pair).to(tl.float32), tl.load(table + HALF + pair).to(tl.float32)
    line = q + token * q_stride + head[:, None] * head_stride
    tail: tl.constexpr = DIM - 2 * HALF
    plain = tl.arange(0, tail)[None, :]
    even = tl.load(line + tail + 2 * pair, mask=there, other=0.0).to(tl.float32)
    odd = tl.load(line + tail + 2 * pair + 1, mask=there, other=0.0).to(tl.float32)
    kept = tl.load(line + plain, mask=there, other=0.0).to(tl.float32)
    left = (even * cos - odd * sin).to(tl.bfloat16).to(tl.float32)
    right = (odd * cos + even * sin).to(tl.bfloat16).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1))
    most = tl.maximum(most, tl.max(tl.abs(kept), axis=1))
    # The power of two from which on 448 reaches the largest.
    ratio = tl.div_rn(tl.maximum(most, 1e-4), 448.0).to(tl.int32, bitcast=True)
    exponent = (ratio >> 23) + ((ratio & 0x7FFFFF) > 0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    target = out + (token * HEADS + head[:, None]) * DIM
    tl.store(target + plain, from_float32(kept * shrink), mask=there)
    tl.store(target + tail + 2 * pair, from_float32(left * shrink), mask=there)
    tl.store(target + tail + 2 * pair + 1, from_float32(right * shrink), mask=there)
    weight = tl.load(weights + token * weight_stride + head, mask=head < HEADS, other=0.0)
    folded = weight.to(tl.float32) * scale * softmax_scale * head_scale
    tl.store(out_weights + token * HEADS + head, folded, mask=head < HEADS)


def quantise_queries(
    query: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    softmax_scale: float,
    head_scale: float,
) -> tuple[Tensor, Tensor]:
    """As the reference of this name: ``query [T, H, 128]`` bf16, ``weights [T, H]``, ``positions
    [T]`` int64, ``cos_sin [P, 64]`` -> e4m3 ``[T, H, 128]``, float32 ``[T, H]``.

    Raises ValueError for another shape."""
    tokens, heads, dim = query.shape
    if dim != KEY_DIM or query.stride(2) != 1 or weights.stride(1) != 1:
        raise ValueError(f"index queries must be whole rows [T, H, {KEY_DIM}], not {query.shape}")
    out = torch.empty(query.shape, dtype=torch.float8_e4m3fn, device=query.device)
    folded = torch.empty(weights.shape, dtype=torch.float32, device=query.device)
    if tokens:
        quantise[(tokens,)](
            query,
            weights,
            positions,
            cos_sin,
            out.view(torch.uint8),
            folded,
            query.stride(0),
            query.stride(1),
            weights.stride(0),
            cos_sin.stride(0),
            softmax_scale,
            head_scale,
            HEADS=heads,
            PADDED=triton.next_power_of_2(heads),
            DIM=dim,
            HALF=cos_sin.shape[1] // 2,
            num_warps=4,
        )
    return out, folded
