"""The Engram tables as the native checkpoint ships them: shards 47 and 48 of 48, with an index.

One shard holds one layer's table: e4m3 rows with one power-of-two scale (UE8M0) per 32 columns.
The layer's small native tensors lie in the same file, as they do in the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spark_overlay.engram.layout import SCALE_GROUP, column_primes

from .shape import ENGRAM_DIM, TEXT, natives
from .shards import Raw, write_index, write_json, write_safetensors
from .streams import Stream
from .tensors import native

SHARDS = ("model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors")

#: Scale bytes 119..121 are 2^-8..2^-6. All finite e4m3 codes occur, and their root mean square is
#: about 105, so rows come out around 1.
_SCALE_BYTES = (119, 120, 121)
#: Code of each random byte: itself, but for the two NaNs, which become zeros.
_FINITE = np.arange(256, dtype=np.uint8)
_FINITE[[0x7F, 0xFF]] = (0x00, 0x80)


def table(layer: int, rows: int, seed: int) -> dict[str, Raw]:
    """``weight`` F8_E4M3 [rows, dim] and ``scale`` F8_E8M0 [rows, dim/32] of one layer."""
    name = f"layers.{layer}.engram.embed"
    codes = _FINITE[Stream(seed, f"{name}.weight").u8(rows * ENGRAM_DIM)]
    per_row = ENGRAM_DIM // SCALE_GROUP
    picks = Stream(seed, f"{name}.scale").u16(rows * per_row) % len(_SCALE_BYTES)
    scales = np.array(_SCALE_BYTES, dtype=np.uint8)[picks]
    return {
        f"{name}.weight": Raw.of("F8_E4M3", codes.reshape(rows, ENGRAM_DIM)),
        f"{name}.scale": Raw.of("F8_E8M0", scales.reshape(rows, per_row)),
    }


def write_tables(root: Path, rows_of: Sequence[int], config: Any, seed: int) -> None:
    """Fill ``root`` with the two shards, their index and ``config`` as config.json."""
    weight_map: dict[str, str] = {}
    total = 0
    for layer, rows, file in zip(TEXT["engram_layer_ids"], rows_of, SHARDS, strict=True):
        tensors = table(layer, rows, seed)
        for tensor in natives():
            if tensor.name.startswith(f"layers.{layer}.engram."):
                tensors |= native(tensor, seed)
        write_safetensors(root / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(len(raw.data) for raw in tensors.values())
    write_index(root, weight_map, total)
    write_json(root / "config.json", config)


def table_rows() -> tuple[int, ...]:
    """Rows of each layer's table: the sum of its prime-sized columns."""
    layers, orders = len(TEXT["engram_layer_ids"]), TEXT["engram_max_ngram_size"] - 1
    primes = column_primes(TEXT["engram_vocab_size"], layers, orders, TEXT["engram_n_heads"])
    return tuple(sum(sizes) for sizes in primes)
