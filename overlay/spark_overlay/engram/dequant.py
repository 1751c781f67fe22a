"""Table rows to bf16 on a GPU: a Triton kernel that works on the bytes as integers.

The oracle is ``reference.dequantize_rows``; every value agrees with it bit for bit, a NaN is a NaN.
No instruction converts fp8, which the A100 and the RTX 30 series do not have: an e4m3 value times a
power of two is a bf16 but for its rounding below 2^-126, so its fields are moved, not computed.

A program of 4 warps takes 32 scale groups. Compiled by Triton 3.9 for SM80, 86, 90 and 121 it uses
no shared memory and 31 to 40 registers a thread, and spills none; a test compiles it for all four
and holds it to that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spark_overlay.engram.layout import SCALE_GROUP, EngramError

GROUPS = 32
WARPS = 4


@triton.jit(do_not_specialize=["groups"])
def _dequantize_kernel(codes, scales, out, groups, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """``codes`` uint8 ``[groups, WIDTH]``, ``scales`` uint8 ``[groups]``, ``out`` bf16 as int16."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = (group < groups)[:, None]
    place = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    code = tl.load(codes + place, inside, other=0).to(tl.int32)
    scale = tl.load(scales + group, group < groups, other=0).to(tl.int32)[:, None]

    size = code & 0x7F
    mantissa = size & 7
    normal = size > 7
    # A subnormal's leading bit becomes the hidden one.
    lead = (mantissa > 1).to(tl.int32) + (mantissa > 3).to(tl.int32)
    fraction = tl.where(normal, mantissa, (mantissa << (3 - lead)) & 7)
    exponent = tl.where(normal, (size >> 3) - 7, lead - 9) + scale
    regular = (exponent << 7) | (fraction << 4)
    # Below bf16's normal range: shift right, rounded to even. A carry makes the least normal.
    shift = tl.minimum(tl.maximum(1 - exponent, 1), 10)
    whole = 128 + (fraction << 4)
    odd = (whole >> shift) & 1
    tiny = (whole + (1 << (shift - 1)) - 1 + odd) >> shift

    bits = tl.where(exponent < 1, tiny, regular)
    bits = tl.where((exponent > 254) | (scale == 255), 0x7F80, bits)
    # Scale 0 is the float32 of exponent field 0, which is zero; zero times infinity is no number.
    bits = tl.where((size == 0) | (scale == 0), 0, bits)
    bits |= (code & 0x80) << 8
    nan = (size == 0x7F) | ((size == 0) & (scale == 255))
    bits = tl.where(nan, 0x7FC0, bits)
    tl.store(out + place, bits.to(tl.int16), inside)


def dequantize_into(weights: Tensor, scales: Tensor, out: Tensor) -> None:
    """``out`` bf16 ``[…, dim]`` = rows ``weights`` float8_e4m3fn ``[…, dim]`` under their scales,
    uint8 ``[…, dim/32]``; all contiguous, on the current stream.

    Raises TypeError for rows that are not typed float8_e4m3fn: bytes typed uint8 are not yet known
    to be rows, and whoever converts them as integers writes fluent garbage.
    """
    if weights.dtype != torch.float8_e4m3fn or scales.dtype != torch.uint8:
        raise TypeError(
            f"rows are {weights.dtype} with {scales.dtype} scales, expected float8_e4m3fn with "
            "uint8; view the bytes, do not convert them"
        )
    if out.dtype != torch.bfloat16:
        raise TypeError(f"rows become bfloat16, not {out.dtype}")
    groups = scales.numel()
    if weights.numel() != groups * SCALE_GROUP or out.numel() != weights.numel():
        raise EngramError(
            f"rows {list(weights.shape)} with scales {list(scales.shape)} into {list(out.shape)}, "
            f"expected one scale for {SCALE_GROUP} columns and as many values as codes"
        )
    if not (weights.is_contiguous() and scales.is_contiguous() and out.is_contiguous()):
        raise EngramError("rows, scales and what they become must be contiguous")
    if groups:
        _dequantize_kernel[(triton.cdiv(groups, GROUPS),)](
            weights.view(torch.uint8),
            scales,
            out.view(torch.int16),
            groups,
            GROUPS=GROUPS,
            WIDTH=SCALE_GROUP,
            num_warps=WARPS,
        )
