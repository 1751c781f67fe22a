"""A set of shards for load.py: packed experts of the published sizes, of random bytes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np

from spark_overlay.exl3.layout import MARKERS
from spark_overlay.exl3.modules import scan_modules
from spark_overlay.exl3.shares import share
from spark_overlay.exl3.shares import share_bytes as packed_bytes
from spark_overlay.headers import DTYPE_BITS, INDEX_NAME, CheckpointHeaders

HIDDEN, INTER, BITS = 5120, 2304, 3
#: A native tensor of every layer: the router.
EXPERTS = 384
RANK, RANKS = 0, 2
SHARDS = 4


def layer(number: int, experts: int) -> dict[str, tuple[str, list[int]]]:
    """Tensors of a layer: dtype and shape by name."""
    found: dict[str, tuple[str, list[int]]] = {
        f"layers.{number}.ffn.gate.weight": ("BF16", [EXPERTS, HIDDEN])
    }
    for expert in range(experts):
        for name in ("w1", "w2", "w3"):
            n_in, n_out = (INTER, HIDDEN) if name == "w2" else (HIDDEN, INTER)
            key = f"layers.{number}.ffn.experts.{expert}.{name}"
            found[f"{key}.trellis"] = ("I16", [n_in // 16, n_out // 16, 16 * BITS])
            found[f"{key}.suh"] = ("F16", [n_in])
            found[f"{key}.svh"] = ("F16", [n_out])
            found[f"{key}.mul1"] = ("I32", [])
    return found


def size_of(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def make(folder: Path, nbytes: int) -> None:
    """SHARDS files of some ``nbytes`` in all, one layer each, written through to the drive."""
    folder.mkdir(parents=True)
    router, one = (sum(size_of(*each) for each in layer(0, n).values()) for n in (0, 1))
    experts = max(1, round((nbytes / SHARDS - router) / (one - router)))
    random, weight_map = np.random.default_rng(7), {}
    for number in range(SHARDS):
        file = folder / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        tensors = layer(number, experts)
        header, at = {}, 0
        for name, (dtype, shape) in tensors.items():
            end = at + size_of(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            weight_map[name] = file.name
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name, (dtype, shape) in tensors.items():
                out.write(content(random, name, size_of(dtype, shape)))
            out.flush()
            os.fsync(out.fileno())
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"o_groups": 8}))


def content(random: np.random.Generator, name: str, size: int) -> bytes:
    if name.endswith(".mul1"):
        return MARKERS["mul1"].to_bytes(4, "little", signed=True)
    if name.endswith((".suh", ".svh")):  # finite
        return random.random(size // 2, np.float32).astype(np.float16).tobytes()
    return random.bytes(size)


def share_bytes(folder: Path) -> int:
    """Bytes that the rank keeps of the packed matrices."""
    modules = scan_modules(CheckpointHeaders.scan(folder).tensors)
    return sum(packed_bytes(facts, share(facts, RANK, RANKS)) for facts in modules.values())
