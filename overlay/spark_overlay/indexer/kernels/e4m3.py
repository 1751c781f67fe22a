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

# Four bytes a register: bytes to the upper halves, then exponent and mantissa one down.
_FOUR = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 1;
shr.u32 d, b, 1;
and.b32 c, c, 0x3f803f80;
and.b32 d, d, 0x3f803f80;
lop3.b32 $0, a, 0x80008000, c, 0xea;
lop3.b32 $1, b, 0x80008000, d, 0xea;
}""")


@triton.jit
def as_float16(byte, PACKED: tl.constexpr):
    """``byte`` uint8, any shape -> float16 of the value / 256.

    ``PACKED`` takes four bytes at once in PTX (eight integer instructions); False is the same in
    Triton's own operations, for its interpreter."""
    if PACKED:
        return tl.inline_asm_elementwise(
            _FOUR, "=r,=r,r", [byte], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        wide = byte.to(tl.uint16)
        return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
