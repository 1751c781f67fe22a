"""The tiny model's Engram tables as the native checkpoint ships them: shards 47 and 48 of 48.

One shard holds one layer's table: e4m3 rows with one power-of-two scale (UE8M0) per 32 columns.
The layer's small native tensors lie in the same file, as they do in the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spark_overlay.engram import synthetic
from spark_overlay.engram.layout import column_primes

from .shape import ENGRAM_DIM, TEXT, natives
from .shards import Raw
from .tensors import native


def write_tables(root: Path, rows_of: Sequence[int], config: Any, seed: int) -> None:
    """Fill ``root`` with the two shards, their index and ``config`` as config.json."""
    layers = TEXT["engram_layer_ids"]
    beside: dict[int, dict[str, Raw]] = {}
    for layer in layers:
        own = [t for t in natives() if t.name.startswith(f"layers.{layer}.engram.")]
        beside[layer] = {name: raw for t in own for name, raw in native(t, seed).items()}
    synthetic.write_tables(root, layers, rows_of, ENGRAM_DIM, config, seed, beside)


def table_rows() -> tuple[int, ...]:
    """Rows of each layer's table: the sum of its prime-sized columns."""
    layers, orders = len(TEXT["engram_layer_ids"]), TEXT["engram_max_ngram_size"] - 1
    primes = column_primes(TEXT["engram_vocab_size"], layers, orders, TEXT["engram_n_heads"])
    return tuple(sum(sizes) for sizes in primes)
