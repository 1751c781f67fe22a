"""Builders of safetensors files and of EXL3 headers for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from spark_overlay.headers import DTYPE_BITS, INDEX_NAME, TensorHeader

Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]


def write_safetensors(path: Path, tensors: Tensors, pad: int = 0) -> None:
    """A valid file; ``pad`` spaces after the header move the data to another alignment."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw = json.dumps(header).encode() + b" " * pad
    body = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def write_index(root: Path, weight_map: Mapping[str, str]) -> None:
    (root / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def header(dtype: str, shape: Iterable[int], file: str = "model-1.safetensors") -> TensorHeader:
    """A header alone, for code that looks at dtype, shape and file."""
    shape = tuple(shape)
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    return TensorHeader(dtype, shape, 0, bits // 8, Path(file))


def packed(
    key: str, bits: float, rows: int = 128, columns: int = 128, codebook: str = "mul1"
) -> dict[str, TensorHeader]:
    """Headers of one packed linear."""
    tensors = {
        f"{key}.trellis": header("I16", (rows // 16, columns // 16, int(16 * bits))),
        f"{key}.suh": header("F16", (rows,)),
        f"{key}.svh": header("F16", (columns,)),
    }
    if codebook != "3inst":
        tensors[f"{key}.{codebook}"] = header("I32", ())
    return tensors
