"""Safetensors headers, read and checked without touching a byte of tensor data.

File layout: 8 bytes little-endian length N, N bytes of JSON, then the data. The JSON maps a
tensor's name to ``{"dtype", "shape", "data_offsets": [begin, end]}`` with offsets relative to the
data; ``__metadata__`` is free text. The data is covered without gaps or overlaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from spark_overlay.collector import paused

INDEX_NAME = "model.safetensors.index.json"

#: The format's own limit; a longer header means the first 8 bytes are not a length.
MAX_HEADER_BYTES = 100_000_000

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


class HeaderError(ValueError):
    """A checkpoint whose headers or index cannot be trusted; the message says how to mend it."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of one file. ``begin``/``end`` are absolute byte offsets in ``file``."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: Path

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Headers of every tensor in ``path``. Raises HeaderError on anything damaged."""
    raw, data_start, size = _read_raw(path)
    entries = _parse_json(path, raw)
    entries.pop("__metadata__", None)
    tensors = {name: _entry(path, name, e, data_start, size) for name, e in entries.items()}
    _check_cover(path, tensors, data_start, size)
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The free text of a file, by name; empty if it has none. Raises HeaderError."""
    raw, _, _ = _read_raw(path)
    found = _parse_json(path, raw).get("__metadata__")
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        _damaged(path, "holds __metadata__ that is no text by name", "download this file again")
    return found


def read_index(root: Path) -> dict[str, str] | None:
    """``weight_map`` of the directory's index (tensor name -> file name); None without an index."""
    path = root / INDEX_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _damaged(path, f"cannot be read ({error})", "check its permissions and the disk")
    again = "download the index again"
    weight_map = _parse_json(path, raw).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _damaged(path, "holds no weight_map", again)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or file != os.path.basename(file):
            _damaged(path, f"places tensor {name} in {file!r}, which is no file name", again)
    return weight_map


@dataclass(frozen=True)
class CheckpointHeaders:
    """All tensors of a checkpoint directory by name.

    ``unlisted`` are ``*.safetensors`` files that lie in the directory but that its index does not
    name; vLLM does not load them, and neither are they part of ``tensors``.
    """

    root: Path
    tensors: Mapping[str, TensorHeader]
    unlisted: tuple[str, ...] = ()

    @classmethod
    @paused()
    def scan(cls, root: Path, *, whole: bool = False) -> CheckpointHeaders:
        """Read the index (if there is one) and the header of every shard of ``root``.

        Raises HeaderError if a file is absent or damaged, if the index names a tensor that its
        file does not hold, or if two files hold the same tensor; for a ``whole`` checkpoint also
        if a file holds a tensor that the index does not name (a slim index leaves some out).
        """
        present = sorted(p.name for p in root.glob("*.safetensors"))
        index = read_index(root)
        files = present if index is None else sorted(set(index.values()))
        if not files:
            _damaged(root, "holds no *.safetensors file", "point to a checkpoint directory")
        tensors = _merge(root / name for name in files)
        for name, file in (index or {}).items():
            found = tensors.get(name)
            if found is None or found.file.name != file:
                where = "no file" if found is None else found.file.name
                _damaged(
                    root / INDEX_NAME,
                    f"places tensor {name} in {file}, but {where} holds it",
                    "index and shards are of different downloads: download both again",
                )
        for name, header in tensors.items():
            if whole and index is not None and name not in index:
                _damaged(
                    root / INDEX_NAME,
                    f"does not name tensor {name}, which {header.file.name} holds",
                    "index and shards are of different downloads: download both again",
                )
        return cls(root, tensors, tuple(sorted(set(present) - set(files))))


def _merge(paths: Iterable[Path]) -> dict[str, TensorHeader]:
    tensors: dict[str, TensorHeader] = {}
    for path in paths:
        for name, header in read_header(path).items():
            if name in tensors:
                _damaged(
                    path,
                    f"holds tensor {name}, which {tensors[name].file.name} holds too",
                    "remove the shard that does not belong to this checkpoint",
                )
            tensors[name] = header
    return tensors


def _read_raw(path: Path) -> tuple[bytes, int, int]:
    """Header bytes, offset of the data, size of the file."""
    again = "download this file again"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                _damaged(path, f"is {size} bytes long, too short for any tensor", again)
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                what = f"announces a header of {length} bytes (limit {MAX_HEADER_BYTES})"
                _damaged(path, f"{what}: this is not a safetensors file", again)
            if length > size - 8:
                what = f"announces a header of {length} bytes but is {size} bytes long"
                _damaged(path, what, again)
            raw = file.read(length)
    except FileNotFoundError:
        _damaged(path, "is missing", again)
    except OSError as error:
        _damaged(path, f"cannot be read ({error})", "check its permissions and the disk")
    if len(raw) != length:
        _damaged(path, f"ended after {len(raw)} of {length} header bytes", again)
    return raw, 8 + length, size


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            _damaged(path, f"names {twice!r} twice", "download this file again")
        return entries

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, absurd nesting
        _damaged(path, f"does not hold readable JSON ({error})", "download this file again")
    if not isinstance(parsed, dict):
        _damaged(path, "holds JSON that is not an object", "download this file again")
    return parsed


def _entry(path: Path, name: str, entry: object, data_start: int, size: int) -> TensorHeader:
    again = "download this file again"
    if not isinstance(entry, dict):
        _damaged(path, f"describes tensor {name} by {type(entry).__name__}, not an object", again)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _damaged(path, f"gives tensor {name} the unknown dtype {dtype!r}", again)
    if not _is_naturals(shape):
        _damaged(path, f"gives tensor {name} the shape {shape!r}", again)
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _damaged(path, f"gives tensor {name} the offsets {offsets!r}", again)
    begin, end = (data_start + offset for offset in offsets)
    if end > size:
        what = f"is {size} bytes long but tensor {name} ends at byte {end}: it is truncated"
        _damaged(path, what, again)
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        what = f"gives tensor {name} {end - begin} bytes, which are not those of {dtype} {shape}"
        _damaged(path, what, again)
    return TensorHeader(dtype, tuple(shape), begin, end, path)


def _is_naturals(value: object) -> TypeGuard[list[int]]:
    # Below 2^63, so that a hostile number can never be too long to print.
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _check_cover(path: Path, tensors: Mapping[str, TensorHeader], start: int, size: int) -> None:
    """The tensors, in order, must fill the data from its first byte to its last."""
    again = "download this file again"
    at = start
    for name, header in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if header.begin != at:
            kind = "overlaps the tensor before it" if header.begin < at else "leaves a gap before"
            _damaged(path, f"{kind}: tensor {name} at byte {header.begin}, expected {at}", again)
        at = header.end
    if at != size:
        _damaged(path, f"has {size - at} bytes that belong to no tensor", again)


def _damaged(path: Path, what: str, mend: str) -> NoReturn:
    raise HeaderError(f"{path}: {what}. To mend: {mend}.")
