"""Torch references of the attention operations: RoPE, KV records, sparse attention with a sink.

No vLLM import. They run on any device and are the oracle of the kernels beside them; on a CPU they
are also what serves. Byte-exact with vLLM 0.32/0.33's own kernels where a record is written, if
``unrounded`` says what those kernels' compilers contract.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spark_overlay.arithmetic import fma, wide
from spark_overlay.attention.format import (
    AMAX_FLOOR,
    DATA_BYTES,
    E4M3_MAX,
    NOPE_DIM,
    ROPE_DIM,
    SCALE_BYTES,
    SCALE_GROUP,
    SCALE_GROUPS,
    UE8M0_BIAS,
    e4m3_values,
    ue8m0_values,
)

#: Bytes of a record: what is multiplied, the scales.
RECORD = (DATA_BYTES, SCALE_BYTES)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x [..., D]`` scaled to unit root mean square, times ``weight [D]``; float32 out."""
    x = wide(x)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * wide(weight)).float()


#: Of a turned pair's products, those that a GPU adds unrounded: the cosine's (vLLM's Triton
#: kernels), or the even value's (its CUDA kernel of queries and window). None: all are rounded.
Unrounded = Literal["cosine", "even"] | None


def rotate(
    x: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    *,
    inverse: bool = False,
    unrounded: Unrounded = None,
) -> Tensor:
    """GPT-J (interleaved) RoPE of the last ``ROPE_DIM`` values.

    ``x [T, ..., 64]`` float32, ``cos_sin [P, 64]`` = 32 cosines then 32 sines, ``positions [T]``.
    Pairs ``(2i, 2i+1)`` turn by the angle of position and frequency ``i``; ``inverse`` turns back.
    """
    half = ROPE_DIM // 2
    table = cos_sin[positions].float()
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    cos, sin = table[:, :half].view(shape), table[:, half:].view(shape)
    if inverse:
        sin = -sin
    even, odd = x[..., 0::2], x[..., 1::2]
    if unrounded is None:
        turned = even * cos - odd * sin, odd * cos + even * sin
    elif unrounded == "cosine":
        turned = fma(even, cos, -(odd * sin)), fma(odd, cos, even * sin)
    else:
        turned = fma(even, cos, -(odd * sin)), fma(even, sin, odd * cos)
    return torch.stack(turned, -1).flatten(-2)


def rotate_tail(
    x: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    *,
    inverse: bool = False,
    unrounded: Unrounded = None,
) -> Tensor:
    """``x [T, ..., D]`` with its last 64 values rotated in float32; same dtype out."""
    tail = x[..., -ROPE_DIM:].float()
    tail = rotate(tail, cos_sin, positions, inverse=inverse, unrounded=unrounded)
    return torch.cat((x[..., :-ROPE_DIM], tail.to(x.dtype)), -1)


def e4m3_exponent(amax: Tensor) -> Tensor:
    """Power of two that brings ``amax`` under e4m3's largest value, as a float exponent."""
    return torch.ceil(torch.log2(amax.clamp_min(AMAX_FLOOR) * (1.0 / E4M3_MAX)))


def to_e4m3(x: Tensor, exponent: Tensor) -> Tensor:
    """``x / 2**exponent`` rounded to e4m3, as bytes. ``exponent`` broadcasts against ``x``."""
    scaled = (x * torch.exp2(-exponent)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def fields(cache: Tensor, block: int, widths: tuple[int, ...]) -> list[Tensor]:
    """The fields of a paged ``uint8`` cache as views ``[blocks, block, width]``: a page holds one
    field of all its entries after the other. Pages lie at the cache's own block stride."""
    blocks, stride, begin = cache.shape[0], cache.stride(0), cache.storage_offset()
    found = []
    for width in widths:
        found.append(cache.as_strided((blocks, block, width), (stride, width, 1), begin))
        begin += block * width
    return found


def encode_records(
    kv: Tensor, positions: Tensor, cos_sin: Tensor, unrounded: Unrounded = None
) -> tuple[Tensor, Tensor]:
    """KV rows to records.

    ``kv [T, 512]`` (normalised, not rotated) -> ``data [T, 576]`` and ``scales [T, 8]``, uint8.
    """
    x = kv.float()
    nope = x[:, :NOPE_DIM].unflatten(-1, (SCALE_GROUPS, SCALE_GROUP))
    exponent = e4m3_exponent(nope.abs().amax(-1))
    values = to_e4m3(nope, exponent[..., None]).flatten(-2)
    rope = rotate(x[:, NOPE_DIM:], cos_sin, positions, unrounded=unrounded)
    rope = rope.bfloat16().contiguous().view(torch.uint8)
    scales = torch.zeros(x.shape[0], SCALE_BYTES, dtype=torch.uint8, device=x.device)
    scales[:, :SCALE_GROUPS] = (exponent + UE8M0_BIAS).clamp(0, 255).to(torch.uint8)
    return torch.cat((values, rope), -1), scales


def write_records(cache: Tensor, slots: Tensor, data: Tensor, scales: Tensor, block: int) -> None:
    """Store records at ``slots`` (``block * block_size + offset``); negative slots are skipped."""
    keep = slots >= 0
    slots = slots[keep].long()
    where = slots // block, slots % block
    for stored, given in zip(fields(cache, block, RECORD), (data, scales), strict=True):
        stored[where] = given[keep]


def read_records(cache: Tensor, slots: Tensor) -> Tensor:
    """Records at ``slots`` (any shape, all >= 0) as float32 ``[..., 512]``, bf16-rounded.

    ``cache [blocks, block_size, 584]`` uint8, pages at any stride.
    """
    block = cache.shape[1]
    where = slots // block, slots % block
    data, scale = (stored[where] for stored in fields(cache, block, RECORD))
    nope = e4m3_values(data[..., :NOPE_DIM]).unflatten(-1, (SCALE_GROUPS, SCALE_GROUP))
    nope = nope * ue8m0_values(scale[..., :SCALE_GROUPS])[..., None]
    rope = data[..., NOPE_DIM:].contiguous().view(torch.bfloat16)
    return torch.cat((nope.flatten(-2).bfloat16(), rope), -1).float()


def insert_kv(
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    block: int,
    unrounded: Unrounded = None,
) -> None:
    """Encode ``kv [>=T, 512]`` and store it at ``slots [T]``."""
    count = slots.numel()
    data, scales = encode_records(kv[:count], positions[:count], cos_sin, unrounded)
    write_records(cache, slots, data, scales, block)


def sparse_attention(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Attention of each query over its own list of keys, with a per-head sink.

    ``q [T, H, D]``, ``kv [T, W, D]`` (key and value are the same latent), ``valid [T, W]`` bool,
    ``sink [H]``: a logit that joins the denominator and carries no value. Float32 ``[T, H, D]``.
    """
    kv = wide(kv)
    logits = torch.einsum("thd,twd->thw", wide(q), kv) * scale
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    logits = torch.cat((logits, wide(sink).view(1, -1, 1).expand(q.shape[0], -1, 1)), -1)
    peak = logits.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weight = torch.exp(logits - peak)
    # A query without a key and without a sink attends to nothing: zero, not NaN.
    weight = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.einsum("thw,twd->thd", weight[..., :-1], kv).float()
