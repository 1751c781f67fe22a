"""The Engram tables as the native checkpoint ships them: shards 47 and 48 of 48, with an index.

One shard holds one layer's table: e4m3 rows with one power-of-two scale (UE8M0) per 32 columns.
The layer's small native tensors lie in the same file, as they do in the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .shape import ENGRAM_DIM, TEXT, natives
from .shards import Raw, write_index, write_json, write_safetensors
from .streams import Stream
from .tensors import native

SHARDS = ("model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors")
SCALE_COLUMNS = 32

#: Scale bytes 119..121 are 2^-8..2^-6. All finite e4m3 codes occur, and their root mean square is
#: about 105, so rows come out around 1.
_SCALE_BYTES = (119, 120, 121)
#: The two NaN codes of e4m3 become zeros of the same sign.
_FINITE = np.arange(256, dtype=np.uint8)
_FINITE[[0x7F, 0xFF]] = (0x00, 0x80)


def table(layer: int, rows: int, seed: int) -> dict[str, Raw]:
    """``weight`` F8_E4M3 [rows, dim] and ``scale`` F8_E8M0 [rows, dim/32] of one layer."""
    name = f"layers.{layer}.engram.embed"
    codes = _FINITE[Stream(seed, f"{name}.weight").u8(rows * ENGRAM_DIM)]
    per_row = ENGRAM_DIM // SCALE_COLUMNS
    picks = Stream(seed, f"{name}.scale").u16(rows * per_row) % len(_SCALE_BYTES)
    scales = np.array(_SCALE_BYTES, dtype=np.uint8)[picks]
    return {
        f"{name}.weight": Raw.of("F8_E4M3", codes.reshape(rows, ENGRAM_DIM)),
        f"{name}.scale": Raw.of("F8_E8M0", scales.reshape(rows, per_row)),
    }


def write_tables(root: Path, table_rows: Sequence[int], config: Any, seed: int) -> None:
    """Fill ``root`` with the two shards, their index and the native config.json."""
    weight_map: dict[str, str] = {}
    total = 0
    for layer, rows, file in zip(TEXT["engram_layer_ids"], table_rows, SHARDS, strict=True):
        tensors = table(layer, rows, seed)
        for tensor in natives():
            if tensor.name.startswith(f"layers.{layer}.engram."):
                tensors |= native(tensor, seed)
        write_safetensors(root / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(len(raw.data) for raw in tensors.values())
    write_index(root, weight_map, total)
    write_json(root / "config.json", config)


def table_rows() -> list[int]:
    """Rows of each layer's table: the sum of its 24 prime-sized buckets."""
    rows, seen = [], set()
    def prime(n):
        return n > 1 and all(n % d for d in range(2, int(n**.5) + 1))
    for _ in TEXT["engram_layer_ids"]:
        total = 0
        for _ in range(TEXT["engram_max_ngram_size"] - 1):
            c = TEXT["engram_vocab_size"] - 1
            for _ in range(TEXT["engram_n_heads"]):
                c += 1
                while not prime(c) or c in seen:
                    c += 1
                seen.add(c)
                total += c
        rows.append(total)
    return rows
