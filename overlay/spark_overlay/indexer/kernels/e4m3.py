"""e4m3 bytes to float16 by integer operations: the same on every GPU from sm_80 on.

A float16 that takes an e4m3 value's bits (sign at 15, exponent and mantissa from 13 down) is that
value / 256, subnormal values too. Nothing is multiplied back: two such factors make a product
2**-16 of the true one, exactly, and the heads' weights bring it back (``UNDO``).

A NaN byte (0x7f, 0xff) reads as +-480. Nothing that stores keys writes one.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Factor that undoes the 1/256 of both operands of a product.
UNDO = tl.constexpr(65536.0)

# Two words' bytes of one place: to the upper bytes of two halves, then exponent and mantissa one
# down. What the permutation leaves in the lower bytes is masked away.
_PAIR = tl.constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $1, $2, SELECTED;
shr.u32 b, a, 1;
and.b32 b, b, 0x3f803f80;
lop3.b32 $0, a, 0x80008000, b, 0xea;
}""")
_PAIRS = [
    tl.constexpr(_PAIR.value.replace("SELECTED", selected))
    for selected in ("0x4004", "0x5014", "0x6024", "0x7034")
]
_FIRST, _SECOND, _THIRD, _FOURTH = _PAIRS


@triton.jit
def halves(word, PLACE: tl.constexpr, PACKED: tl.constexpr):
    """Byte ``PLACE`` of int32 ``word``, any shape -> float16 of its value / 256.

    ``PACKED`` takes two words at once in PTX (four integer instructions); False is the same in
    Triton's own operations, for its interpreter."""
    if PACKED:
        if PLACE == 0:
            text: tl.constexpr = _FIRST
        elif PLACE == 1:
            text: tl.constexpr = _SECOND
        elif PLACE == 2:
            text: tl.constexpr = _THIRD
        else:
            text: tl.constexpr = _FOURTH
        return tl.inline_asm_elementwise(
            text, "=r,r,r", [word], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        byte = (word >> (8 * PLACE)).to(tl.uint16)
        return (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def from_float32(value):
    """float32 of any size -> e4m3's byte: to the nearest, ties to even, at most 448."""
    bits = value.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(value), 448.0)
    # From 2**-6 on the upper bits are e4m3's but for the exponent's bias: round off twenty.
    whole = size.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    # Below, steps are of 2**-9: those of a float32 at 2**14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
