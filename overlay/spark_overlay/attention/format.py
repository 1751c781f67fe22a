"""Byte layout of the fp8_ds_mla KV record (584 bytes a token), the one every GPU but SM100 uses.

A page of ``block_size`` tokens is two regions: the token data (576 bytes each: 448 e4m3 NoPE
values, then 64 bf16 RoPE values, already rotated), then the scales (8 bytes each: seven UE8M0
exponents, one per 64 NoPE values, and a zero). Pages may lie further apart than their own size, so
every access goes through the page's stride. Source: vLLM 0.33.0,
``fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert``."""

from __future__ import annotations

from typing import Final

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
