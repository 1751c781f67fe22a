"""Sizes and cuts of the EXL3 weight format: rates, tiles, tensor-parallel slices. Without numpy.

What the launcher and the loader both must know of a packed matrix; ``format`` decodes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Codebook = Literal["mul1", "mcg", "3inst"]
CODEBOOKS: tuple[Codebook, ...] = get_args(Codebook)

#: Value of the int32 marker tensors. The multiplier is the same number read as unsigned.
MARKERS: dict[Codebook, int] = {"mul1": -2082680531, "mcg": -877912083}

TILE = 16
TILE_WEIGHTS = TILE * TILE
HADAMARD = 128

#: Rates in half bits: whole bits 1..8, and 1.5, 2.5 and 3.5 (mul1 only).
LEGAL_K2: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


class Exl3FormatError(ValueError):
    """A tensor that is not what the EXL3 format allows, or a slice that it does not allow."""


def bits_from_words(words: int, name: str = "trellis") -> int:
    """Rate K in half bits (K2 = 2K) from the last dimension of a trellis.

    The rate of a tensor is a property of its shape alone: a config's ``bits`` is an average.
    """
    k2, rest = divmod(words, 8)
    if rest or k2 not in LEGAL_K2:
        legal = ", ".join(f"{8 * k} (K={k / 2:g})" for k in LEGAL_K2)
        raise Exl3FormatError(
            f"{name}: {words} words a tile is no EXL3 rate; legal are {legal}. "
            "The file is damaged or not EXL3: download it again"
        )
    return k2


def check_rate(k2: int, codebook: str, name: str = "trellis") -> None:
    """Raise Exl3FormatError unless the rate exists for the codebook."""
    if codebook not in CODEBOOKS:
        raise Exl3FormatError(f"{name}: codebook {codebook!r} is none of {', '.join(CODEBOOKS)}")
    if k2 % 2 and codebook != "mul1":
        raise Exl3FormatError(
            f"{name}: K={k2 / 2:g} exists for codebook mul1 only, not for {codebook}"
        )


def check_marker(codebook: Codebook, value: int, name: str = "marker") -> None:
    """Raise Exl3FormatError unless ``value`` (int32) is the codebook's marker."""
    if value != MARKERS.get(codebook):
        raise Exl3FormatError(
            f"{name}: marker {value}, expected {MARKERS.get(codebook)} for codebook {codebook}. "
            "Either the file is damaged (download it again), or the pack uses another multiplier"
        )


@dataclass(frozen=True, slots=True)
class Exl3Slice:
    """What one rank keeps of a linear. The slices index numpy arrays and torch tensors alike.

    A row slice yields a partial sum: add the ranks' outputs. Only the rank at the first row then
    adds the bias (``bias`` is None on the others).
    """

    trellis: tuple[slice, slice]
    suh: slice
    svh: slice
    bias: slice | None

    def trellis_of(self, trellis: Any) -> Any:
        """The part of a trellis; a view, which for a column slice is not contiguous."""
        return trellis[self.trellis]


def column_slice(lo: int, hi: int, size: int, name: str = "weight") -> Exl3Slice:
    """Outputs ``lo..hi`` of a linear with ``size`` outputs."""
    _check_range(lo, hi, size, name, "outputs")
    part, everything = slice(lo, hi), slice(None)
    return Exl3Slice((everything, slice(lo // TILE, hi // TILE)), everything, part, part)


def row_slice(lo: int, hi: int, size: int, name: str = "weight") -> Exl3Slice:
    """Inputs ``lo..hi`` of a linear with ``size`` inputs."""
    _check_range(lo, hi, size, name, "inputs")
    part, everything = slice(lo, hi), slice(None)
    bias = everything if lo == 0 else None
    return Exl3Slice((slice(lo // TILE, hi // TILE), everything), part, everything, bias)


def shard_ranges(size: int, tp: int, name: str = "weight") -> list[tuple[int, int]]:
    """Equal ranges of ``tp`` ranks over ``size`` channels.

    Raises Exl3FormatError unless each is a multiple of 128: a narrower cut goes through a
    Hadamard block, loads without complaint and computes nonsense.
    """
    if tp < 1 or size % (HADAMARD * tp):
        blocks = size // HADAMARD
        legal = [n for n in range(1, blocks + 1) if size % (HADAMARD * n) == 0]
        raise Exl3FormatError(
            f"{name}: {size} channels over {tp} ranks is {size / tp if tp else size:g} a rank, "
            f"not a multiple of {HADAMARD}. Legal tensor-parallel sizes here: "
            f"{', '.join(map(str, legal)) or 'none'}"
        )
    part = size // tp
    return [(rank * part, (rank + 1) * part) for rank in range(tp)]


def _check_range(lo: int, hi: int, size: int, name: str, what: str) -> None:
    if size % HADAMARD or not 0 <= lo < hi <= size or lo % HADAMARD or hi % HADAMARD:
        raise Exl3FormatError(
            f"{name}: cannot keep {what} {lo}..{hi} of {size}: both ends must be multiples of "
            f"{HADAMARD} inside the tensor. Choose a tensor-parallel size that divides "
            f"{size // HADAMARD} blocks of {HADAMARD}"
        )
