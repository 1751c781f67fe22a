"""Engram's rows: e4m3 by its definition against what serves, and the native row store's reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spark_overlay.engram.layout import SCALE_GROUP
from spark_overlay.engram.native import NativeOptions, NativeRowStore
from spark_overlay.engram.reference import dequantize_rows
from spark_overlay.engram.source import TableSource
from spark_overlay.verify.report import Check, Outcome

ROWS, DIM, BEGIN = 4099, 256, 777


def checks(device: torch.device, on: str) -> Iterator[Check]:
    yield Check("engram rows to bf16, reference", on, lambda: reference(device))
    # Triton compiles for a GPU; on a CPU it can only be interpreted, where that was asked for.
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        yield Check("engram rows to bf16, kernel", on, lambda: kernel(device))
    yield Check("engram row store", "cpu", store)


def reference(device: torch.device) -> Outcome:
    codes, scales = everything(device)
    return compared(dequantize_rows(codes.view(torch.float8_e4m3fn), scales))


def kernel(device: torch.device) -> Outcome:
    from spark_overlay.engram.dequant import dequantize_into  # needs triton

    codes, scales = everything(device)
    out = torch.full(codes.shape, 7.0, dtype=torch.bfloat16, device=device)
    dequantize_into(codes.view(torch.float8_e4m3fn), scales, out)
    return compared(out)


def everything(device: torch.device) -> tuple[Tensor, Tensor]:
    """Each of 256 codes under each of 256 scales: uint8 ``[256, 256]`` and ``[256, 8]``."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 256 // SCALE_GROUP)
    return codes.to(device), scales.to(device)


def compared(found: Tensor) -> Outcome:
    """How many of the 65536 differ from the definition in a bit; a NaN is a NaN."""
    right = by_definition()
    bits = found.cpu().view(torch.int16).numpy().view(np.uint16)
    nan = is_nan(right)
    differ = np.where(nan, ~is_nan(bits), bits != right)
    return Outcome(not differ.any(), f"{int(differ.sum())} of {differ.size} differ", "0 differ")


def is_nan(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
    return (bits & 0x7FFF) > 0x7F80


def by_definition() -> npt.NDArray[np.uint16]:
    """bf16 bits ``[scale, code]`` of e4m3 * 2^(scale - 127), scale 0 meaning zero and 255 infinity:
    float64 is exact here, and is rounded to bf16's grid half to even."""
    code = np.arange(256)
    sign, field, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = np.where(field == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (field - 7.0))
    size = np.where(code & 0x7F == 0x7F, np.nan, size)
    value = np.where(sign == 1, -size, size)
    exponent = np.arange(256)
    scale = np.where(exponent == 0, 0.0, 2.0 ** (exponent - 127.0))
    scale[255] = np.inf
    with np.errstate(invalid="ignore"):
        exact = value[None, :] * scale[:, None]
    return to_bf16(exact)


def to_bf16(exact: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """The nearest bf16 of each, half to even, as bits."""
    size = np.abs(exact)
    sign = np.signbit(exact).astype(np.uint16) << 15
    finite = np.isfinite(size)
    # Steps of bf16 at each size: 2^(e - 7), and 2^-133 below the least normal.
    _, power = np.frexp(np.where(finite & (size > 0), size, 1.0))
    step = np.maximum(power - 1, -126) - 7
    # A whole number of steps; np.rint rounds half to even.
    steps = np.rint(np.where(finite, size, 0.0) * 2.0 ** (-step.astype(np.float64)))
    with np.errstate(over="ignore"):  # beyond the largest is infinity
        rounded = (steps * 2.0 ** step.astype(np.float64)).astype(np.float32)
    bits = (rounded.view(np.uint32) >> 16).astype(np.uint16)
    bits = np.where(np.isinf(size), np.uint16(0x7F80), bits)
    bits = np.where(np.isnan(size), np.uint16(0x7FC0), bits)
    return (bits | sign).astype(np.uint16)


def store() -> Outcome:
    """First, last, repeated, dead and foreign ids, in rows that begin at no block's boundary."""
    made = np.random.default_rng(5)
    weights = made.integers(0, 256, (ROWS, DIM), np.uint8)
    scales = made.integers(0, 256, (ROWS, DIM // SCALE_GROUP), np.uint8)
    with tempfile.TemporaryDirectory(prefix="spark-verify-") as folder:
        path = Path(folder) / "table"
        path.write_bytes(b"\xee" * BEGIN + weights.tobytes() + scales.tobytes())
        source = TableSource(1, path, ROWS, DIM, BEGIN, BEGIN + weights.size)
        ids = np.array([-1, 0, ROWS - 1, 15, 15, 100, 3000, *range(200, 260)], np.int64)
        with NativeRowStore(source, 0, 4000, options=NativeOptions(depth=16)) as opened:
            rows = opened.lookup(ids)
            how = opened.backend
    mine = (ids >= 0) & (ids < 4000)
    wanted = np.where(mine[:, None], weights[ids], 0), np.where(mine[:, None], scales[ids], 0)
    wrong = (rows.weights != wanted[0]).any(1) | (rows.scales != wanted[1]).any(1)
    return Outcome(not wrong.any(), f"{int(wrong.sum())} of {len(ids)} rows wrong, {how}", "0")
