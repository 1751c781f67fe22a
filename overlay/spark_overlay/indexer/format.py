"""Byte layout of the indexer's key cache (132 bytes a state).

A page is two regions: 128 e4m3 values per state, then one float32 scale (a power of two) per state.
Source: vLLM 0.33.0, ``indexer_k_norm_rope_store``.
"""

from __future__ import annotations

from typing import Final

KEY_DIM: Final = 128
SCALE_BYTES: Final = 4
STATE_BYTES: Final = KEY_DIM + SCALE_BYTES
