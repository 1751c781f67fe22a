"""Small Engram tables by the real rules, in which every row says which row it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from _packs import write_index, write_safetensors

from spark_overlay.engram.layout import EngramLayout, column_primes

SHARDS = ("model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors")


def small_config(**change: Any) -> dict[str, Any]:
    config = {
        "engram_layer_ids": [1, 3],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_head_dim": 64,
        "engram_vocab_size": 62,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 19,
    }
    config |= change
    primes = column_primes(
        config["engram_vocab_size"],
        len(config["engram_layer_ids"]),
        config["engram_max_ngram_size"] - 1,
        config["engram_n_heads"],
    )
    return {"engram_num_embeddings": [sum(p) for p in primes]} | config


def small_layout(**change: Any) -> EngramLayout:
    layout = EngramLayout.from_config(small_config(**change))
    assert layout is not None
    return layout


def table(layer_id: int, rows: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights uint8 ``[rows, dim]`` and scales ``[rows, dim/32]``: a function of layer and row."""

    def row_bytes(width: int, salt: int) -> np.ndarray:
        row, column = np.arange(rows)[:, None], np.arange(width)[None]
        mixed = (row * 40503 + column * 977 + layer_id * 131 + salt) * 2654435761
        return (mixed >> 13).astype(np.uint8)

    return row_bytes(dim, 1), row_bytes(dim // 32, 2)


def write_tables(root: Path, config: dict[str, Any], pad: int = 1) -> None:
    """A slim directory: config.json, index, and one shard a layer, with other tensors beside."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps({"text_config": config}))
    weight_map = {}
    shards = zip(config["engram_layer_ids"], config["engram_num_embeddings"], SHARDS, strict=True)
    for layer_id, rows, shard in shards:
        dim = config["engram_head_dim"]
        weights, scales = table(layer_id, rows, dim)
        base = f"layers.{layer_id}.engram"
        tensors = {
            f"{base}.q_weight": ("BF16", (4, 8), bytes(64)),
            f"{base}.embed.scale": ("F8_E8M0", scales.shape, scales.tobytes()),
            f"{base}.embed.weight": ("F8_E4M3", weights.shape, weights.tobytes()),
        }
        write_safetensors(root / shard, tensors, pad)
        weight_map |= {f"{base}.embed.{leaf}": shard for leaf in ("weight", "scale")}
    write_index(root, weight_map)
