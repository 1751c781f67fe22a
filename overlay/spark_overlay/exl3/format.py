"""The EXL3 weight format in numpy: rates, codebooks, exact decode, Hadamard, TP slices.

A linear with ``in`` x ``out`` weights (both multiples of 128) is stored as

- ``trellis`` int16 ``[in/16, out/16, T]``: T words per tile of 16 x 16 weights,
- ``suh`` fp16 ``[in]`` and ``svh`` fp16 ``[out]``: signed scales of inputs and outputs,
- a marker tensor ``mul1`` or ``mcg`` whose presence picks the codebook (neither: "3inst").

``W = diag(suh) . H . W_hat . H . diag(svh)``, where ``W_hat`` is the decoded trellis and H the
block-diagonal, orthonormal Hadamard matrix of order 128. The source of the format is exllamav3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Codebook = Literal["mul1", "mcg", "3inst"]
CODEBOOKS: tuple[Codebook, ...] = get_args(Codebook)

#: Value of the int32 marker tensors. The multiplier is the same number read as unsigned.
MARKERS: dict[Codebook, int] = {"mul1": -2082680531, "mcg": -877912083}

TILE = 16
TILE_WEIGHTS = TILE * TILE
HADAMARD = 128

#: Rates in half bits: whole bits 1..8, and 1.5, 2.5 and 3.5 (mul1 only).
LEGAL_K2: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)

#: Tiles decoded at once; bounds the scratch memory of a large matrix.
_CHUNK_TILES = 4096


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


@cache
def codebook_table(codebook: Codebook) -> npt.NDArray[np.float16]:
    """fp16 value of each of the 65536 states, exactly as the runtime computes it. Read-only."""
    state = np.arange(1 << 16, dtype=np.uint32)
    table: npt.NDArray[np.float16]
    if codebook == "mul1":
        mixed = state * np.uint32(MARKERS["mul1"] & 0xFFFFFFFF)
        total = mixed.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.int64)
        scale, shift = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        # One fp16 fused multiply-add: exact in float64, then rounded once.
        table = ((1024 + total) * scale + shift).astype(np.float16)
    elif codebook in ("mcg", "3inst"):
        if codebook == "mcg":
            mixed = state * np.uint32(MARKERS["mcg"] & 0xFFFFFFFF)
        else:
            mixed = state * np.uint32(89226354) + np.uint32(64248484)
        halves = ((mixed & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16)
        table = halves[0::2] + halves[1::2]
    else:
        raise Exl3FormatError(f"codebook {codebook!r} is none of {', '.join(CODEBOOKS)}")
    table.flags.writeable = False
    return table


@cache
def ring_positions() -> npt.NDArray[np.intp]:
    """``[256]``: ring position of the weight at row-major place ``16 * row + column`` of a tile.

    The ring follows the operand order of two m16n8k16 tensor-core multiplies side by side.
    """
    i = np.arange(TILE_WEIGHTS)
    lane, j = i >> 3, i & 7
    row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
    column = (lane >> 2) + 8 * ((j >> 2) & 1)
    places = np.empty(TILE_WEIGHTS, np.intp)
    places[TILE * row + column] = i
    return places


@cache
def window_starts(k2: int) -> npt.NDArray[np.intp]:
    """``[256]``: first ring bit of the 16-bit state at each row-major place of a tile.

    Position i of the ring appends K bits (for a half rate, floor(K) where i is even and one more
    where it is odd); its state is the 16 bits that end there. The ring has 128 * k2 bits and
    closes on itself, so the first states begin at its end.
    """
    steps = np.full(TILE_WEIGHTS, k2 // 2)
    steps[1::2] += k2 % 2
    return ((np.cumsum(steps) - 16) % (HADAMARD * k2))[ring_positions()]


def tile_states(trellis: npt.NDArray[np.int16]) -> npt.NDArray[np.uint16]:
    """States ``[..., 256]`` (row-major in the tile) of tiles ``[..., T]``."""
    words = trellis.shape[-1]
    start = window_starts(bits_from_words(words))
    # The ring is read from 32-bit little-endian words, highest bit first.
    pairs = np.ascontiguousarray(trellis).view(np.uint16).reshape(*trellis.shape[:-1], -1, 2)
    ring = pairs[..., ::-1].reshape(trellis.shape).astype(np.uint32)
    double = (ring << np.uint32(16)) | np.roll(ring, -1, axis=-1)
    shift = (16 - start % 16).astype(np.uint32)
    return (double[..., start // 16] >> shift).astype(np.uint16)


def decode(trellis: npt.NDArray[np.int16], codebook: Codebook) -> npt.NDArray[np.float16]:
    """``W_hat`` fp16 ``[in, out]`` of a trellis int16 ``[in/16, out/16, T]``, bit for bit.

    Raises Exl3FormatError if shape, dtype, rate and codebook do not belong together.
    """
    rows, columns, words = _trellis_shape(trellis)
    check_rate(bits_from_words(words), codebook)
    table = codebook_table(codebook)
    weights = np.empty((rows, TILE, columns, TILE), np.float16)
    step = max(1, _CHUNK_TILES // max(1, columns))
    for lo in range(0, rows, step):
        states = tile_states(trellis[lo : lo + step])
        tiles = table[states].reshape(-1, columns, TILE, TILE)
        weights[lo : lo + step] = tiles.transpose(0, 2, 1, 3)
    return weights.reshape(rows * TILE, columns * TILE)


def _trellis_shape(trellis: npt.NDArray[np.int16]) -> tuple[int, int, int]:
    if trellis.ndim != 3 or trellis.dtype != np.int16:
        raise Exl3FormatError(
            f"trellis: {trellis.dtype} {list(trellis.shape)}, expected int16 [in/16, out/16, T]"
        )
    rows, columns, words = trellis.shape
    return rows, columns, words


@cache
def hadamard_128() -> npt.NDArray[np.float64]:
    """The orthonormal, symmetric Sylvester-Hadamard matrix of order 128. Read-only."""
    matrix = np.ones((1, 1))
    while len(matrix) < HADAMARD:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.sqrt(HADAMARD)
    matrix.flags.writeable = False
    return matrix


def dequantize(
    trellis: npt.NDArray[np.int16],
    suh: npt.NDArray[np.float16],
    svh: npt.NDArray[np.float16],
    codebook: Codebook = "mul1",
) -> npt.NDArray[np.float32]:
    """The weight float32 ``[in, out]``; computed in float64 and rounded once.

    ``suh`` ``[in]`` and ``svh`` ``[out]``. A linear computes ``x @ weight (+ bias)``.
    """
    rows, columns, _ = _trellis_shape(trellis)
    rows, columns = TILE * rows, TILE * columns
    if suh.shape != (rows,) or svh.shape != (columns,) or rows % HADAMARD or columns % HADAMARD:
        raise Exl3FormatError(
            f"trellis of [{rows}, {columns}] weights with suh {list(suh.shape)} and svh "
            f"{list(svh.shape)}; expected [in], [out], both multiples of {HADAMARD}"
        )
    had = hadamard_128()
    weight = np.empty((rows, columns), np.float32)
    per_block = HADAMARD // TILE
    for block in range(rows // HADAMARD):
        part = decode(trellis[block * per_block : (block + 1) * per_block], codebook)
        left = (had @ part.astype(np.float64)).reshape(HADAMARD, -1, HADAMARD)
        at = slice(block * HADAMARD, (block + 1) * HADAMARD)
        both = (left @ had).reshape(HADAMARD, columns)
        weight[at] = suh[at, None].astype(np.float64) * both * svh.astype(np.float64)
    return weight


def signs_from_bits(words: npt.NDArray[np.int16]) -> npt.NDArray[np.float16]:
    """±1 fp16 ``[16 n]`` from a legacy sign bitfield int16 ``[n]`` (bit set: negative).

    Bit b of word w is channel ``16 w + b``. The result serves as ``suh`` or ``svh``.
    """
    if words.ndim != 1 or words.dtype != np.int16:
        raise Exl3FormatError(f"sign bits: {words.dtype} {list(words.shape)}, expected int16 [n]")
    bits = (words.view(np.uint16)[:, None] >> np.arange(16, dtype=np.uint16)) & 1
    return (1 - 2 * bits.reshape(-1).astype(np.int8)).astype(np.float16)


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
