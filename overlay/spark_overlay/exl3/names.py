"""Where each packed linear of a DeepSeek V4.1 checkpoint goes, and back.

A key such as ``layers.3.attn.wkv`` names a packed linear: its tensors are the key with a leaf
(``.trellis``, ``.suh``, ...). A module is the place in vLLM that one or several keys fill, named
below its layer: ``attn.fused_wqa_wkv`` holds wq_a and wkv. Both directions read the same table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Stage = Literal["layers", "mtp", "top"]

#: Path below a layer in the checkpoint -> module, shard of a merged module.
_BELOW_LAYER: Mapping[str, tuple[str, int | None]] = {
    "attn.wq_a": ("attn.fused_wqa_wkv", 0),
    "attn.wkv": ("attn.fused_wqa_wkv", 1),
    "attn.wq_b": ("attn.wq_b", None),
    "attn.wo_b": ("attn.wo_b", None),
    "attn.indexer.wq_b": ("attn.indexer.wq_b", None),
    "attn.indexer.wk": ("attn.indexer.wk", None),
    # Only a compressor that pools two tokens has a gate.
    "attn.compressor.wkv": ("attn.compressor.fused_wkv_wgate", 0),
    "attn.compressor.wgate": ("attn.compressor.fused_wkv_wgate", 1),
    "ffn.shared_experts.w1": ("ffn.shared_experts.gate_up_proj", 0),
    "ffn.shared_experts.w3": ("ffn.shared_experts.gate_up_proj", 1),
    "ffn.shared_experts.w2": ("ffn.shared_experts.down_proj", None),
    "engram.wkv": ("engram.wkv", None),
    "main_proj": ("main_proj", None),
}
_WO_A = "attn.wo_a"
_EXPERTS = "ffn.experts"
#: Gate, down and up; the checkpoint's own names serve as shard ids.
_EXPERT_SHARDS = ("w1", "w2", "w3")
#: Named in full: ``mtp.2.markov_head.head`` is another one.
_HEAD, _LM_HEAD = "head", "lm_head"

_NUMBER = r"(0|[1-9]\d*)"
_IN_LAYER = re.compile(rf"(layers|mtp)\.{_NUMBER}\.(.+)")
_SLICE = re.compile(rf"attn\.wo_a\.slice\.{_NUMBER}")
_EXPERT = re.compile(rf"ffn\.experts\.{_NUMBER}\.(w[123])")


class Exl3NameError(ValueError):
    """A packed linear under a name that DeepSeek V4.1 has no place for."""


@dataclass(frozen=True, slots=True)
class Target:
    """The place a packed linear fills.

    ``stage`` "layers" is the backbone, "mtp" the draft, with the draft stage as ``layer``, and
    "top" the head. ``shard`` is the part of a merged module (0, 1) or the expert's matrix ("w1"
    gate, "w2" down, "w3" up); ``slice`` is the output group of ``attn.wo_a``.
    """

    stage: Stage
    layer: int | None
    module: str
    shard: int | str | None = None
    expert: int | None = None
    slice: int | None = None


def parse(key: str) -> Target:
    """The place of a checkpoint key. Raises Exl3NameError if V4.1 has none for it."""
    if key == _HEAD:
        return Target("top", None, _LM_HEAD)
    if match := _IN_LAYER.fullmatch(key):
        stage: Stage = "mtp" if match[1] == "mtp" else "layers"
        layer, below = int(match[2]), match[3]
        if below in _BELOW_LAYER and _exists(stage, layer, below):
            module, shard = _BELOW_LAYER[below]
            return Target(stage, layer, module, shard)
        if found := _SLICE.fullmatch(below):
            return Target(stage, layer, _WO_A, slice=int(found[1]))
        if found := _EXPERT.fullmatch(below):
            return Target(stage, layer, _EXPERTS, shard=found[2], expert=int(found[1]))
    raise Exl3NameError(
        f"{key}: packed as EXL3, but DeepSeek V4.1 has no packed linear of that name. "
        "The pack is of another model or follows newer names; use one made for V4.1"
    )


def checkpoint_keys(module: str, *, slices: int = 0, experts: int = 0) -> list[str]:
    """Keys that together fill a module, in shard, slice or expert order.

    ``module`` is named by its layer in the checkpoint: ``layers.3.attn.fused_wqa_wkv``,
    ``mtp.0.main_proj``, ``lm_head``. ``attn.wo_a`` consists of ``slices`` (o_groups) keys and
    ``ffn.experts`` of three for each of ``experts``. Empty if V4.1 never packs that module.
    """
    if module == _LM_HEAD:
        return [_HEAD]
    match = _IN_LAYER.fullmatch(module)
    if match is None:
        return []
    base, below = f"{match[1]}.{match[2]}", match[3]
    if below == _WO_A:
        return [f"{base}.{_WO_A}.slice.{i}" for i in range(slices)]
    if below == _EXPERTS:
        return [f"{base}.{_EXPERTS}.{e}.{w}" for e in range(experts) for w in _EXPERT_SHARDS]
    return [
        f"{base}.{path}"
        for path, (target, _) in _BELOW_LAYER.items()
        if target == below and _exists(match[1], int(match[2]), path)
    ]


def _exists(stage: str, layer: int, below: str) -> bool:
    """The draft has no Engram, and only its first stage takes in the target's hidden states."""
    if below == "main_proj":
        return stage == "mtp" and layer == 0
    return stage == "layers" or not below.startswith("engram.")
