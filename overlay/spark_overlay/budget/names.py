"""Class and place of a tensor by its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from spark_overlay.exl3.kmap import classify
from spark_overlay.exl3.names import Exl3NameError
from spark_overlay.exl3.shares import split_of

#: How ranks share a tensor. A file's is in no memory at all.
Split = Literal["columns", "rows", "groups", "vocabulary", "heads", "none", "file"]
#: Which part of the model it belongs to; a layer has its number.
Where = Literal["layer", "draft", "vision", "embedding", "top", "everywhere"]


@dataclass(frozen=True)
class Place:
    """``element``: bytes of one element in memory; 0 for a packed linear, whose rate says it."""

    name: str
    split: Split
    where: Where
    layer: int | None = None
    element: int = 0


#: Pattern of a native tensor's name (below its layer), class, split, bytes of an element.
_NATIVE: tuple[tuple[str, str, Split, int], ...] = (
    (r"embed\.weight", "embedding", "vocabulary", 2),
    (r"image_(start|end|newline)", "image vectors", "none", 4),
    (r"(vision|aligner)\..+", "vision", "none", 2),
    (r"(main_|attn_|ffn_)?norm\.weight", "norms", "none", 2),
    (r"attn\.((q|kv)_norm|compressor\.norm|indexer\.k_norm)\.weight", "norms", "none", 2),
    (r"attn\.attn_sink", "attention sinks", "heads", 4),
    (r"attn\.indexer\.weights_proj\.weight", "indexer", "none", 2),
    (r"ffn\.gate\.weight", "router", "none", 2),
    (r"ffn\.gate\.(bias|bias_vl)", "router", "none", 4),
    (r"hc_(attn|ffn)_(fn|base|scale)", "hyper-connections", "none", 4),
    (r"engram\.[qk]_weight", "Engram projection", "none", 2),
    (r"engram\.embed(_tokens)?\..+", "Engram tables", "file", 0),
    (r"markov_head\.(embed|head)\.weight", "Markov head", "none", 2),
    (r"confidence_head\.proj\.weight", "confidence head", "none", 4),
)
_CLASSES = {
    "routed": "routed experts",
    "shared": "shared experts",
    "attention": "attention",
    "indexer.wk": "indexer",
    "engram.wkv": "Engram projection",
}
_PREFIX = re.compile(r"(layers|mtp)\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def one_expert(key: str) -> str:
    """The key of expert 0 in place of another's: experts of a layer differ in nothing here."""
    return _EXPERT.sub(".experts.0.", key)


@cache
def packed_place(key: str) -> Place:
    """Of a packed linear. Raises Exl3NameError for a name that V4.1 does not have."""
    weight_class, layer = classify(key)
    split = split_of(key)
    if weight_class == "head":
        return Place("head", "vocabulary", "top")
    if weight_class == "mtp":
        below = key.split(".", 2)[2]
        name = "main projection"
        if below != "main_proj":
            name = _CLASSES[classify(f"layers.0.{below}")[0]]
        return Place(f"draft {name}", split, "draft", layer)
    name = _CLASSES[weight_class]
    if ".compressor." in key:
        name = "compressor"
    elif ".indexer." in key:
        name = "indexer"
    return Place(name, split, "layer", layer)


@cache
def native_place(tensor: str) -> Place | None:
    """Of a tensor that is not packed; None if V4.1 has no place for it."""
    found = _PREFIX.fullmatch(tensor)
    for pattern, name, split, size in _NATIVE:
        if not re.fullmatch(pattern, found[3] if found else tensor):
            continue
        if found is None:
            return Place(name, split, _where(tensor), None, size)
        if found[1] == "mtp":
            return Place(f"draft {name}", split, "draft", int(found[2]), size)
        return Place(name, split, "layer", int(found[2]), size)
    return _unpacked(tensor)


def _where(tensor: str) -> Where:
    if tensor.startswith("embed."):
        return "embedding"
    return "top" if tensor.startswith("norm.") else "vision"


def _unpacked(tensor: str) -> Place | None:
    """A linear that this checkpoint keeps in bf16."""
    key, _, leaf = tensor.rpartition(".")
    try:
        place = packed_place(f"{key}.slice.0" if key.endswith(".attn.wo_a") else key)
    except Exl3NameError:
        return None
    if leaf != "weight":
        return None
    return Place(place.name, place.split, place.where, place.layer, 2)
