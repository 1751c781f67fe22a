"""K of every packed matrix: mixed as the real 2.9-bit pack mixes it, and a little worse.

K is a property of each tensor; the pack's "2.9" is an average and nothing may be sized by it.
Besides the real pack's values there is a half rate, and the matrices that vLLM fuses (query and
KV projection, gate and up, the compressor's pair) differ within one module somewhere.
"""

from __future__ import annotations

import re

ATTENTION = 5.0
INDEXER_WK = 8.0
HEAD = 6.0
DRAFT = 4.0
ROUTED = 3.0
ROUTED_OF_LAYER = {4: 2.0, 7: 2.5}
SHARED = 5.0
SHARED_OF_LAYER = {3: 4.0, 4: 4.0, 5: 4.0, 6: 4.0}
ENGRAM_OF_LAYER = {1: 5.0, 3: 4.0}
EXCEPTIONS = {
    "layers.6.ffn.shared_experts.w2": 5.0,
    "layers.8.ffn.shared_experts.w3": 4.0,
    "layers.3.attn.wkv": 6.0,
    "layers.4.attn.compressor.wgate": 4.0,
}

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def bits(key: str) -> float:
    """Bits per weight of matrix ``key`` (a checkpoint name without its leaf)."""
    if key in EXCEPTIONS:
        return EXCEPTIONS[key]
    if key == "head":
        return HEAD
    if key.startswith("mtp."):
        return DRAFT
    match = _LAYER.fullmatch(key)
    if match is None:
        raise KeyError(f"{key!r} is no packed matrix of the rehearsal checkpoint")
    layer, rest = int(match[1]), match[2]
    if rest.startswith("ffn.experts."):
        return ROUTED_OF_LAYER.get(layer, ROUTED)
    if rest.startswith("ffn.shared_experts."):
        return SHARED_OF_LAYER.get(layer, SHARED)
    if rest == "engram.wkv":
        return ENGRAM_OF_LAYER[layer]
    return INDEXER_WK if rest == "attn.indexer.wk" else ATTENTION
