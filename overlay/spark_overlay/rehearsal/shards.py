"""Safetensors files with a layout that depends on nothing but the tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spark_overlay.headers import DTYPE_BITS, INDEX_NAME


@dataclass(frozen=True, slots=True)
class Raw:
    """A tensor as a file holds it: safetensors dtype, shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, dtype: str, array: NDArray[np.generic]) -> Raw:
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return cls(dtype, array.shape, little.tobytes())


def bf16(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Bits of ``values`` in bfloat16, rounded to nearest even from float32. Finite input only."""
    word = values.astype(np.float32).view(np.uint32)
    return ((word + (0x7FFF + ((word >> 16) & 1))) >> 16).astype(np.uint16)


def bf16_values(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """``values`` as bfloat16 keeps them, in float32."""
    return (bf16(values).astype(np.uint32) << 16).view(np.float32)


def write_safetensors(path: Path, tensors: Mapping[str, Raw]) -> None:
    """Write one file: wide dtypes first, then by name, so that every tensor is aligned."""
    order = sorted(tensors, key=lambda name: (-DTYPE_BITS[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        raw = tensors[name]
        end = at + len(raw.data)
        header[name] = {
            "dtype": raw.dtype,
            "shape": list(raw.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(tensors[name].data)


def write_sharded(root: Path, modules: Sequence[Mapping[str, Raw]], count: int) -> dict[str, str]:
    """Write ``modules`` in order as ``count`` shards of about one size; no module is cut.

    Returns the weight map (tensor name -> file name) and leaves it as the index beside them.
    """
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_cut(modules, count), start=1):
        file = f"model-{number:05}-of-{count:05}.safetensors"
        write_safetensors(root / file, shard)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(len(raw.data) for module in modules for raw in module.values())
    write_index(root, weight_map, total)
    return weight_map


def write_index(root: Path, weight_map: Mapping[str, str], total: int) -> None:
    write_json(
        root / INDEX_NAME,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _cut(modules: Iterable[Mapping[str, Raw]], count: int) -> Iterator[dict[str, Raw]]:
    modules = list(modules)
    sizes = [sum(len(raw.data) for raw in module.values()) for module in modules]
    total, done, shard, number = sum(sizes), 0, dict[str, Raw](), 1
    for module, size in zip(modules, sizes, strict=True):
        if done * count >= number * total:
            yield shard
            shard, number = {}, number + 1
        shard.update(module)
        done += size
    yield shard
