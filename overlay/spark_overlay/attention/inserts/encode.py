"""Numbers to e4m3 and powers of two by integer operations.

SM80 and SM86 have no instruction for e4m3, and Triton has none for its type there.
"""

from __future__ import annotations

import triton
import triton.language as tl

AMAX_FLOOR = tl.constexpr(1e-4)
INVERSE_MAX = tl.constexpr(1.0 / 448.0)


@triton.jit
def encode_e4m3(x):
    """float32 within +-448 -> its e4m3 code 0..255 as int32, rounded to nearest, ties to even. A
    NaN becomes 0x7F or 0xFF."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Three bits of the mantissa stay; the exponent's bias falls from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Added to 2^14, a float32 keeps multiples of 2^-9: e4m3's below 2^-6.
    lifted = size.to(tl.float32, bitcast=True) + 16384.0
    tiny = lifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, tiny, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def ceil_log2(x):
    """The least ``e`` with ``x <= 2**e``, int32, for a normal float32 above zero."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """``2**exponent`` as float32, from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_exponent(amax):
    """Exponent of the scale under which ``amax`` fits e4m3: int32."""
    return ceil_log2(tl.maximum(amax, AMAX_FLOOR) * INVERSE_MAX)


@triton.jit
def scaled_e4m3(x, exponent):
    """``x / 2**exponent`` held to e4m3's range and encoded, as uint8."""
    within = tl.minimum(tl.maximum(x * power_of_two(-exponent), -448.0), 448.0)
    return encode_e4m3(within).to(tl.uint8)
