"""Tables made from a seed, by the real rules: any row can be made alone, and says which it is.

Row i is a function of seed, layer and i, so a store's answer is checked without the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spark_overlay.engram.layout import SCALE_GROUP
from spark_overlay.engram.store import Bytes
from spark_overlay.rehearsal.shards import Raw, write_index, write_json, write_safetensors
from spark_overlay.rehearsal.streams import Stream

#: Names of the native checkpoint's two shards with tables.
SHARDS = ("model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors")

#: Scale bytes 119..121 are 2^-8..2^-6. All finite e4m3 codes occur, and their root mean square is
#: about 105, so rows come out around 1.
_SCALE_BYTES = np.array((119, 120, 121), dtype=np.uint8)
#: Code of each random byte: itself, but for the two NaNs, which become zeros.
_FINITE = np.arange(256, dtype=np.uint8)
_FINITE[[0x7F, 0xFF]] = (0x00, 0x80)


def rows(layer: int, lo: int, hi: int, dim: int, seed: int) -> tuple[Bytes, Bytes]:
    """Weights ``[hi - lo, dim]`` and scales ``[hi - lo, dim/32]`` of rows lo..hi-1."""
    name, per_row = f"layers.{layer}.engram.embed", dim // SCALE_GROUP
    codes = Stream(seed, f"{name}.weight").skip(lo * dim // 2).u8((hi - lo) * dim)
    picks = Stream(seed, f"{name}.scale").skip(lo * per_row).u16((hi - lo) * per_row)
    weights = _FINITE[codes].reshape(-1, dim)
    return weights, _SCALE_BYTES[picks % len(_SCALE_BYTES)].reshape(-1, per_row)


def table(layer: int, count: int, dim: int, seed: int) -> dict[str, Raw]:
    """A whole layer's tensors, by their names in the checkpoint."""
    weights, scales = rows(layer, 0, count, dim, seed)
    name = f"layers.{layer}.engram.embed"
    return {
        f"{name}.weight": Raw.of("F8_E4M3", weights),
        f"{name}.scale": Raw.of("F8_E8M0", scales),
    }


def write_tables(
    root: Path,
    layers: Sequence[int],
    counts: Sequence[int],
    dim: int,
    config: Any,
    seed: int,
    beside: Mapping[int, Mapping[str, Raw]] | None = None,
) -> None:
    """Fill ``root`` with one shard a layer, their index and ``config`` as config.json.

    ``counts``: rows of each layer's table. ``beside``: a layer's other tensors in the same shard.
    """
    root.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for layer, count, file in zip(layers, counts, SHARDS, strict=True):
        tensors = table(layer, count, dim, seed) | dict((beside or {}).get(layer, {}))
        write_safetensors(root / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(len(raw.data) for raw in tensors.values())
    write_index(root, weight_map, total)
    write_json(root / "config.json", config)
