"""The EXL3 weight format in numpy: rates, codebooks, exact decode, Hadamard, TP slices.

A linear with ``in`` x ``out`` weights (both multiples of 128) is stored as

- ``trellis`` int16 ``[in/16, out/16, T]``: T words per tile of 16 x 16 weights,
- ``suh`` fp16 ``[in]`` and ``svh`` fp16 ``[out]``: signed scales of inputs and outputs,
- a marker tensor ``mul1`` or ``mcg`` whose presence picks the codebook (neither: "3inst").

``W = diag(suh) . H . W_hat . H . diag(svh)``, where ``W_hat`` is the decoded trellis and H the
block-diagonal, orthonormal Hadamard matrix of order 128. The source of the format is exllamav3.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

# Sizes and cuts belong to the format too; they are kept where numpy is not needed.
from spark_overlay.exl3.layout import (  # noqa: F401
    CODEBOOKS,
    HADAMARD,
    LEGAL_K2,
    MARKERS,
    TILE,
    TILE_WEIGHTS,
    Codebook,
    Exl3FormatError,
    Exl3Slice,
    bits_from_words,
    check_marker,
    check_rate,
    column_slice,
    row_slice,
    shard_ranges,
)

#: Tiles decoded at once; bounds the scratch memory of a large matrix.
_CHUNK_TILES = 4096


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
