"""e4m3 and UE8M0 within Triton kernels, by integers: no GPU's own fp8 conversion is asked for."""

from __future__ import annotations

import os

import triton
import triton.language as tl

#: Under Triton's interpreter there is no PTX: the plain forms compute.
COMPILED = os.environ.get("TRITON_INTERPRET") != "1"

#: Four e4m3 codes times four bf16 scales: two words of bf16 pairs. A code's seven bits of magnitude
#: go to where bf16 has the end of its exponent; 2^120 is what they then lack. Both products are
#: exact but for results that bf16 rounds anyway. A NaN among the four makes all four NaN: the row
#: of the dot product is NaN then in any case.
_PRODUCT = tl.constexpr(
    """
    {
    .reg .b32 w, low, high, sign, nan, one, two;
    .reg .pred p;
    and.b32 w, $2, 0x7f7f7f7f;
    add.u32 w, w, 0x01010101;
    and.b32 nan, w, 0x80808080;
    setp.ne.u32 p, nan, 0;
    selp.b32 one, 0x7fc07fc0, $3, p;
    selp.b32 two, 0x7fc07fc0, $4, p;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 sign, low, 0x80008000;
    shr.u32 low, low, 4;
    and.b32 low, low, 0x07f007f0;
    or.b32 low, low, sign;
    and.b32 sign, high, 0x80008000;
    shr.u32 high, high, 4;
    and.b32 high, high, 0x07f007f0;
    or.b32 high, high, sign;
    mov.b32 w, 0x7b807b80;
    mov.b32 sign, 0x80008000;
    fma.rn.bf16x2 low, low, w, sign;
    fma.rn.bf16x2 high, high, w, sign;
    fma.rn.bf16x2 $0, low, one, sign;
    fma.rn.bf16x2 $1, high, two, sign;
    }
    """
)


@triton.jit
def ue8m0(codes):
    """uint8 -> float32, exact."""
    wide = codes.to(tl.int32)
    ends = (((wide + 1) & 0xFF) <= 1).to(tl.int32)
    return (wide << 23 | ends << 22).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(codes):
    """uint8 -> float32, exact."""
    wide = codes.to(tl.int32)
    bits = (wide & 0x7F) << 20 | (wide & 0x80) << 24
    value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def product(codes, scales, PTX: tl.constexpr):
    """``codes`` uint8 times ``scales`` (bf16, broadcast alike): bf16, rounded once."""
    codes, scales = tl.broadcast(codes, scales)
    if PTX:
        return tl.inline_asm_elementwise(
            _PRODUCT, "=r,=r,r,r,r", [codes, scales], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return (e4m3(codes) * scales.to(tl.float32)).to(tl.bfloat16)
