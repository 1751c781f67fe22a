"""EXL3 in torch: the same decode and weight as ``format``, on any device, and the linear.

Everything but the decode is differentiable, so scales can be trained: the decoded trellis is a
constant, ``suh`` and ``svh`` are leaves. ``format`` in numpy is what these are tested against.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from spark_overlay.exl3.format import (
    HADAMARD,
    TILE,
    Codebook,
    Exl3FormatError,
    bits_from_words,
    check_rate,
    codebook_table,
    hadamard_128,
    window_starts,
)

#: Tiles decoded at once; bounds the scratch memory of a large matrix.
_CHUNK_TILES = 4096


def decode_torch(trellis: Tensor, codebook: Codebook) -> Tensor:
    """``W_hat`` fp16 ``[in, out]`` of a trellis int16 ``[in/16, out/16, T]``, bit for bit."""
    if trellis.dim() != 3 or trellis.dtype != torch.int16:
        raise Exl3FormatError(
            f"trellis: {trellis.dtype} {list(trellis.shape)}, expected int16 [in/16, out/16, T]"
        )
    rows, columns, words = trellis.shape
    k2 = bits_from_words(words)
    check_rate(k2, codebook)
    table = _table(codebook, trellis.device)
    first, second, shift = _windows(k2, trellis.device)
    weights = torch.empty((rows, TILE, columns, TILE), dtype=torch.float16, device=trellis.device)
    step = max(1, _CHUNK_TILES // max(1, columns))
    for lo in range(0, rows, step):
        ring = trellis[lo : lo + step].int() & 0xFFFF
        # int32 suffices: only the low 16 bits of each shifted half are kept.
        states = (ring[..., first] << (16 - shift)) | (ring[..., second] >> shift)
        tiles = table[states & 0xFFFF].view(-1, columns, TILE, TILE)
        weights[lo : lo + step] = tiles.transpose(1, 2)
    return weights.view(rows * TILE, columns * TILE)


def hadamard_rotate(x: Tensor, dim: int = -1) -> Tensor:
    """H applied along the last or (``dim=-2``) the one before; a multiple of 128 channels.

    H is symmetric and its own inverse. Computed in x's dtype; float32 and float64 are meant.
    """
    if dim not in (-1, -2) or x.shape[dim] % HADAMARD:
        raise Exl3FormatError(
            f"cannot rotate {list(x.shape)} along {dim}: -1 or -2, a multiple of {HADAMARD}"
        )
    had = _hadamard(x.dtype, x.device)
    blocks = x.unflatten(dim, (-1, HADAMARD))
    return (blocks @ had if dim == -1 else had @ blocks).reshape(x.shape)


def dequantize_torch(
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    codebook: Codebook = "mul1",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight ``[in, out]`` in ``dtype``, from ``suh [in]`` and ``svh [out]``.

    Rotations and scales run in float32 (in float64 if that is asked for) and are rounded once.
    Gradients reach ``suh`` and ``svh``.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    inner = decode_torch(trellis, codebook).to(compute)
    _check_scales(inner, suh, svh)
    rotated = hadamard_rotate(hadamard_rotate(inner), dim=-2)
    return (suh.to(compute)[:, None] * rotated * svh.to(compute)).to(dtype)


def linear(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    codebook: Codebook = "mul1",
    bias: Tensor | None = None,
) -> Tensor:
    """``x @ W (+ bias)`` in the rotated basis, as kernels compute it: ``[..., in] -> [..., out]``.

    ``H(H(x * suh) @ W_hat) * svh``. Every step is float32 (float64 for float64 ``x``), with the
    decoded fp16 weights widened exactly; the result is rounded once to x's dtype.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    inner = decode_torch(trellis, codebook).to(compute)
    _check_scales(inner, suh, svh)
    rotated = hadamard_rotate(x.to(compute) * suh.to(compute))
    out = hadamard_rotate(rotated @ inner) * svh.to(compute)
    if bias is not None:
        out = out + bias.to(compute)
    return out.to(x.dtype)


def _check_scales(inner: Tensor, suh: Tensor, svh: Tensor) -> None:
    if suh.shape != inner.shape[:1] or svh.shape != inner.shape[1:]:
        raise Exl3FormatError(
            f"trellis of {list(inner.shape)} weights with suh {list(suh.shape)} and svh "
            f"{list(svh.shape)}; expected [in] and [out]"
        )


@cache
def _table(codebook: Codebook, device: torch.device) -> Tensor:
    return torch.from_numpy(codebook_table(codebook).copy()).to(device)


@cache
def _windows(k2: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each place of a tile: the two int16 words its state lies in, and the shift."""
    start = torch.from_numpy(window_starts(k2))
    words = 8 * k2
    # The ring runs through 32-bit little-endian words from the top: pairs of int16 are swapped.
    first, second = start // 16, (start // 16 + 1) % words
    shift = 16 - start % 16
    return (first ^ 1).to(device), (second ^ 1).to(device), shift.int().to(device)


@cache
def _hadamard(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(hadamard_128().copy()).to(device=device, dtype=dtype)
