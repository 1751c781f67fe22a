"""Byte layout of the fp8_ds_mla KV record (584 bytes a token), the one every GPU but SM100 uses,
and its number formats: e4m3 and UE8M0 as integers, for numpy and torch.

A page of ``block_size`` tokens is two regions: the token data (576 bytes each: 448 e4m3 NoPE
values, then 64 bf16 RoPE values, already rotated), then the scales (8 bytes each: seven UE8M0
exponents, one per 64 NoPE values, and a zero). Pages may lie further apart than their own size, so
every access goes through the page's stride. Source: vLLM 0.33.0,
``fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert``.

e4m3 ``s eeee mmm``: no infinity; 0x7F and 0xFF are NaN; ``eeee`` of 0 counts in units of 2^-9.
UE8M0: ``2^(byte - 127)``, 255 is NaN (OCP MX). As float32 that is the byte shifted left by 23, but
for 0 (2^-127, which float32 has as a subnormal number) and 255 (the shift gives an infinity): both
take the highest bit of the mantissa besides. vLLM's writers give 105 to 247 for finite values; the
two may stand in pages that nobody wrote. Its readers take 255 for an infinity.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIM: Final = 512
ROPE_DIM: Final = 64
NOPE_DIM: Final = HEAD_DIM - ROPE_DIM
SCALE_GROUP: Final = 64
SCALE_GROUPS: Final = NOPE_DIM // SCALE_GROUP
DATA_BYTES: Final = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES: Final = SCALE_GROUPS + 1
RECORD_BYTES: Final = DATA_BYTES + SCALE_BYTES

E4M3_MAX: Final = 448.0
AMAX_FLOOR: Final = 1e-4
UE8M0_BIAS: Final = 127
#: e4m3's magnitude, its seven bits at float32's exponent and mantissa, lacks this factor.
E4M3_LIFT: Final = 2.0**120


def e4m3_to_float32(codes: Any) -> Any:
    """numpy uint8, any shape -> float32, exact."""
    import numpy as np

    wide = np.asarray(codes, np.uint8).astype(np.uint32)
    bits = (wide & 0x7F) << 20 | (wide & 0x80) << 24
    found = bits.view(np.float32) * np.float32(E4M3_LIFT)
    return np.where((wide & 0x7F) == 0x7F, np.float32("nan"), found)


def ue8m0_to_float32(codes: Any) -> Any:
    """numpy uint8, any shape -> float32, exact."""
    import numpy as np

    wide = np.asarray(codes, np.uint8).astype(np.uint32)
    ends = (((wide + 1) & 0xFF) <= 1).astype(np.uint32)
    return (wide << 23 | ends << 22).view(np.float32)


def float32_to_e4m3(values: Any) -> Any:
    """numpy float32, any shape -> uint8: to nearest, ties to even; saturates at 448; NaN 0x7F."""
    import numpy as np

    x = np.asarray(values, np.float32)
    sign = (x.view(np.uint32) >> 24).astype(np.uint8) & 0x80
    size = np.nan_to_num(np.minimum(np.abs(x), np.float32(E4M3_MAX)), nan=0.0)
    # Units of the last place: 2^-9 below 2^-6, an eighth of the power of two above.
    exponent = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, -6), -6)
    steps = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int32)
    # steps: 0 to 7 subnormal, 8 to 16 else; 16 carries into the exponent by itself.
    code = np.where(np.isnan(x), 0x7F, (exponent + 6) * 8 + steps)
    return sign | code.astype(np.uint8)


def float32_to_ue8m0(exponents: Any) -> Any:
    """numpy: whole exponents (any numeric type) -> uint8, saturating at 0 and 254."""
    import numpy as np

    return np.clip(np.asarray(exponents) + UE8M0_BIAS, 0, 254).astype(np.uint8)


def e4m3_values(codes: Tensor) -> Tensor:
    """torch uint8, any shape, any device -> float32, exact."""
    if codes.device.type != "cpu":
        return _e4m3_computed(codes)
    # A CPU looks up faster than it computes, and the rehearsal mostly does this.
    return _e4m3_table().index_select(0, codes.flatten().int()).view(codes.shape)


@functools.cache
def _e4m3_table() -> Tensor:
    import torch

    return _e4m3_computed(torch.arange(256, dtype=torch.uint8, device="cpu"))


def _e4m3_computed(codes: Tensor) -> Tensor:
    import torch

    wide = codes.to(torch.int32)
    # The sign goes to the top by a shift that wraps: torch has no uint32 shifts.
    bits = (wide & 0x7F) << 20 | (wide & 0x80) << 24
    return torch.where((wide & 0x7F) == 0x7F, torch.nan, bits.view(torch.float32) * E4M3_LIFT)


def ue8m0_values(codes: Tensor) -> Tensor:
    """torch uint8, any shape, any device -> float32, exact."""
    import torch

    wide = codes.to(torch.int32)
    ends = (((wide + 1) & 0xFF) <= 1).to(torch.int32)
    return (wide << 23 | ends << 22).view(torch.float32)
