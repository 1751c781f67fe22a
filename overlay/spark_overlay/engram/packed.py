"""A rank's rows of one table in one file: each row's weights and scales side by side.

``engram-l{layer}-r{rank}of{tp}.bin``: a header of 4096 bytes, then the rows lo..hi-1, each of
``dim`` e4m3 bytes and ``dim / 32`` scale bytes. All numbers are little-endian:

    0    8s  b"SPKENGRM"
    8    u32 version, u32 layer, u32 rank, u32 tp, u32 dim, u32 bytes of a row
    32   u64 lo, u64 hi, u64 rows of the whole table
    56   32s sha256 of what index and shard header say of the table
    88   32s sha256 of rows of the shard, evenly spread over lo..hi
    120  64s name of the table's weights, filled with zeros
    4092 u32 CRC-32 of the bytes before
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from spark_overlay.engram.layout import SCALE_GROUP, EngramError, EngramLayout
from spark_overlay.engram.source import TableSource
from spark_overlay.engram.store import Bytes, FileRowStore

MAGIC = b"SPKENGRM"
VERSION = 1
HEADER_BYTES = 4096
SAMPLES = 64

_FORMAT = struct.Struct("<8s6I3Q32s32s64s")
_CRC = struct.Struct("<I")
_AGAIN = "Remove it and run ./start.sh pack again"


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """What a packed file says of itself. ``index`` and ``sample`` tell whose rows it holds."""

    layer_id: int
    rank: int
    tp: int
    dim: int
    lo: int
    hi: int
    rows: int
    index: bytes
    sample: bytes

    @property
    def row_bytes(self) -> int:
        return self.dim + self.dim // SCALE_GROUP

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + (self.hi - self.lo) * self.row_bytes

    @property
    def file_name(self) -> str:
        return file_name(self.layer_id, self.rank, self.tp)

    def to_bytes(self) -> bytes:
        name = f"layers.{self.layer_id}.engram.embed.weight".encode()
        raw = _FORMAT.pack(
            MAGIC,
            VERSION,
            self.layer_id,
            self.rank,
            self.tp,
            self.dim,
            self.row_bytes,
            self.lo,
            self.hi,
            self.rows,
            self.index,
            self.sample,
            name,
        )
        raw = raw.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return raw + _CRC.pack(zlib.crc32(raw))


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A packed file whose header was read, and whose size agrees with it."""

    path: Path
    header: PackedHeader


def file_name(layer_id: int | str, rank: int, tp: int) -> str:
    return f"engram-l{layer_id}-r{rank}of{tp}.bin"


def parse_header(path: Path, raw: bytes) -> PackedHeader:
    """Raises EngramError if ``raw``, the file's first bytes, is no header of ours."""
    if raw[: len(MAGIC)] != MAGIC:
        raise EngramError(f"{path}: is no packed Engram file of this kit. {_AGAIN}")
    if len(raw) < HEADER_BYTES:
        raise EngramError(f"{path}: ends after {len(raw)} of {HEADER_BYTES} header bytes. {_AGAIN}")
    body, crc = raw[: HEADER_BYTES - _CRC.size], raw[HEADER_BYTES - _CRC.size : HEADER_BYTES]
    version = struct.unpack_from("<I", raw, len(MAGIC))[0]
    if version != VERSION:
        raise EngramError(f"{path}: has format {version}, this kit reads {VERSION}. {_AGAIN}")
    if _CRC.unpack(crc)[0] != zlib.crc32(body):
        raise EngramError(f"{path}: its header is damaged (CRC). {_AGAIN}")
    _, _, layer, rank, tp, dim, row_bytes, lo, hi, rows, index, sample, _ = _FORMAT.unpack_from(raw)
    header = PackedHeader(layer, rank, tp, dim, lo, hi, rows, index, sample)
    if row_bytes != header.row_bytes or not lo <= hi <= rows:
        raise EngramError(f"{path}: its header contradicts itself. {_AGAIN}")
    return header


def read_packed(path: Path) -> PackedFile:
    """Header of a packed file. Raises EngramError, FileNotFoundError where there is none."""
    try:
        with path.open("rb") as file:
            raw, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EngramError(
            f"{path}: cannot be read ({error}). Check its permissions and the disk"
        ) from error
    header = parse_header(path, raw)
    if size != header.file_bytes:
        raise EngramError(
            f"{path}: is {size} bytes long, its header makes it {header.file_bytes}: it is "
            f"{'truncated' if size < header.file_bytes else 'another file'}. {_AGAIN}"
        )
    return PackedFile(path, header)


def index_digest(source: TableSource) -> bytes:
    """sha256 of what index and shard header say of the table; a slim directory says the same."""
    base = f"layers.{source.layer_id}.engram.embed"
    said = {
        "shard": source.file.name,
        f"{base}.weight": ["F8_E4M3", [source.rows, source.dim], source.weight_begin],
        f"{base}.scale": ["F8_E8M0", [source.rows, source.scale_dim], source.scale_begin],
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()


def sample_digest(source: TableSource, lo: int, hi: int) -> bytes:
    """sha256 of rows spread over lo..hi, the first and the last among them.

    Tables of another training have the same names and sizes; this tells them apart.
    """
    ids = np.unique(np.linspace(lo, hi - 1, SAMPLES, dtype=np.int64))
    with FileRowStore(source, lo, hi) as store:
        rows = store.lookup(ids)
    return hashlib.sha256(rows.weights.tobytes() + rows.scales.tobytes()).digest()


def expected_header(source: TableSource, layout: EngramLayout, rank: int, tp: int) -> PackedHeader:
    """The header that this rank's packed file of the table must have. Reads some of its rows."""
    lo, hi = layout.rank_range(source.layer_id, rank, tp).rows
    return PackedHeader(
        source.layer_id,
        rank,
        tp,
        source.dim,
        lo,
        hi,
        source.rows,
        index_digest(source),
        sample_digest(source, lo, hi),
    )


def attach(
    folder: Path, source: TableSource, layout: EngramLayout, rank: int, tp: int
) -> PackedFile | None:
    """This rank's packed file in ``folder``; None if there is none.

    Raises EngramError if it is damaged or holds other rows than the shards: it is never used then,
    and never passed over in silence.
    """
    path = folder / file_name(source.layer_id, rank, tp)
    try:
        found = read_packed(path)
    except FileNotFoundError:
        return None
    check_header(path, found.header, expected_header(source, layout, rank, tp), source)
    return found


def check_header(
    path: Path, found: PackedHeader, expected: PackedHeader, source: TableSource
) -> None:
    """Raises EngramError unless the file holds the expected rows of this source."""
    names = [f.name for f in fields(PackedHeader)]
    wrong = [name for name in names if getattr(found, name) != getattr(expected, name)]
    if not wrong:
        return
    if wrong == ["sample"]:
        what = "its rows are not those of the shard: it was packed from other tables"
    elif "index" in wrong:
        what = "it was packed from another source (index hash)"
    else:
        pairs = [f"{n} {getattr(found, n)}, expected {getattr(expected, n)}" for n in wrong]
        what = "it is of another rank or layer: " + "; ".join(pairs)
    raise EngramError(f"{path}: does not belong to {source.file}: {what}. {_AGAIN}")


def interleave(weights: Bytes, scales: Bytes) -> Bytes:
    """Rows as the file holds them ``[n, dim + dim/32]``."""
    return np.concatenate([weights, scales], axis=1)
