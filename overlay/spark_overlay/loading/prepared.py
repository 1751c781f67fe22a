"""A rank's own file: all that it keeps of a checkpoint, cut already, in the order in which it is
read. No torch.

A safetensors file like any other; its metadata says which checkpoint it was made of and for which
rank, and one that says otherwise is refused. It lies in a directory of the node's own drive and
spares the reader what belongs to other ranks, and a worker the way over the network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_overlay.collector import paused
from spark_overlay.engram.names import is_table_tensor
from spark_overlay.exl3.modules import OWN_LEAVES, scan_modules
from spark_overlay.exl3.shares import share
from spark_overlay.headers import INDEX_NAME, TensorHeader, read_header, read_metadata
from spark_overlay.loading import cuts
from spark_overlay.loading.cuts import Cut
from spark_overlay.loading.plan import Wanted

FORMAT = "1"
EMBEDDING = "embed.weight"
#: vLLM makes the vocabulary a multiple of this before it cuts it.
VOCAB_STEP = 64
KEPT = ("trellis", "suh", "svh")


class PreparedError(ValueError):
    """A prepared file of another checkpoint, rank or version, or none that can be made."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a prepared file is of. ``index``: SHA-256 of the checkpoint's index."""

    index: str
    rank: int
    ranks: int

    @property
    def file_name(self) -> str:
        return f"weights-r{self.rank}of{self.ranks}.safetensors"

    def metadata(self) -> dict[str, str]:
        return {
            "spark_format": FORMAT,
            "spark_index": self.index,
            "spark_rank": str(self.rank),
            "spark_ranks": str(self.ranks),
        }


def origin(model: Path, rank: int, ranks: int) -> Origin:
    """Of a checkpoint directory. Raises PreparedError if it has no index."""
    if not 0 <= rank < ranks:
        raise PreparedError(f"found rank {rank} of {ranks}, needed one from 0 to {ranks - 1}")
    try:
        text = (model / INDEX_NAME).read_bytes()
    except OSError as error:
        raise PreparedError(
            f"{model / INDEX_NAME}: cannot be read ({error.strerror}); a prepared file is known by "
            "its checkpoint's index. Download the checkpoint again"
        ) from None
    return Origin(hashlib.sha256(text).hexdigest(), rank, ranks)


def find(folder: Path, wanted: Origin) -> dict[str, TensorHeader] | None:
    """Headers of the prepared file in ``folder``, None if there is none. Raises PreparedError for
    one of another origin, HeaderError for a damaged one."""
    path = folder / wanted.file_name
    if not path.exists():
        return None
    found = read_metadata(path)
    for name, value in wanted.metadata().items():
        if found.get(name) != value:
            what = {
                "spark_format": "was made by another version of the overlay",
                "spark_index": "was made of another checkpoint (or of another download of it)",
            }.get(name, "is of another rank")
            raise PreparedError(
                f"{path} {what}: found {name} = {found.get(name, 'nothing')}, needed {value}. "
                "Remove it and make it again: ./start.sh prepare"
            )
    return read_header(path)


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor of the prepared file: what of the checkpoint's it is, and its shape there."""

    name: str
    header: TensorHeader
    cut: Cut
    shape: tuple[int, ...]


@paused()
def kept(tensors: Mapping[str, TensorHeader], rank: int, ranks: int, groups: int) -> list[Kept]:
    """What a rank reads of a checkpoint, in the order of its files. Engram tables are not part of
    it. ``groups``: o_groups of config.json. Raises Exl3FormatError where ranks cannot share."""
    modules = scan_modules(tensors)
    parts = {key: share(facts, rank, ranks, groups) for key, facts in modules.items()}
    found = []
    for name, header in tensors.items():
        key, _, leaf = name.rpartition(".")
        cut, shape = cuts.whole(header), header.shape
        if leaf in OWN_LEAVES:
            part = parts[key]
            if part is None:
                continue
            if leaf in KEPT:
                cut = cuts.packed(header, leaf, part)
                shape = cuts.packed_shape(header, leaf, part)
        elif name == EMBEDDING:
            step = -(-header.shape[0] // VOCAB_STEP) * VOCAB_STEP // ranks
            low, high = (min(header.shape[0], step * r) for r in (rank, rank + 1))
            cut, shape = cuts.rows(header, low, high), (high - low, *header.shape[1:])
        elif is_table_tensor(name):
            continue
        found.append(Kept(name, header, cut, shape))
    return sorted(found, key=lambda one: (one.header.file, one.header.begin))


def layout(parts: list[Kept], of: Origin) -> tuple[bytes, list[int]]:
    """The prepared file's first bytes (length and header), and where in it each tensor begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **of.metadata()}}
    at, starts = 0, []
    for one in parts:
        end = at + one.cut.nbytes
        header[one.name] = {
            "dtype": one.header.dtype,
            "shape": list(one.shape),
            "data_offsets": [at, end],
        }
        starts.append(at)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)  # data begins on a page
    front = len(text).to_bytes(8, "little") + text
    return front, [len(front) + start for start in starts]


def size(parts: list[Kept], front: bytes) -> int:
    return len(front) + sum(one.cut.nbytes for one in parts)


def gathered(one: Wanted, lo: int, block: memoryview) -> Iterator[tuple[int, bytearray]]:
    """What a block that begins at byte ``lo`` of its file holds of a tensor: where in what is kept
    it belongs, and the bytes."""
    pieces = list(one.cut.pieces(lo, lo + len(block)))
    if not pieces:
        return
    out = bytearray(sum(piece.width * piece.rows for piece in pieces))
    begin = pieces[0].target
    for piece in pieces:
        for row in range(piece.rows):
            source = piece.source + row * piece.stride
            target = piece.target - begin + row * piece.width
            out[target : target + piece.width] = block[source : source + piece.width]
    yield begin, out
