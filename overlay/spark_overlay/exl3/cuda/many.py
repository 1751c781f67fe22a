"""The library's calls for many rows by ctypes: csrc/exl3/many.h. No torch here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from functools import cache

from spark_overlay.exl3.cuda import library
from spark_overlay.exl3.cuda.plan_prefill import PrefillNeed


class Prefill(ctypes.Structure):
    """``exl3_prefill_args``."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("table", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("pool_bytes", c_int64),
        ("id_bytes", c_int32),
        ("tokens", c_int32),
        ("topk", c_int32),
        ("experts", c_int32),
        ("first_id", c_int32),
        ("shared", c_int32),
        ("hidden", c_int32),
        ("inter", c_int32),
        ("y_dtype", c_int32),
        ("max_k2", c_int32),
        ("limit", c_float),
        ("variant", c_int32),
    )


class Weights(ctypes.Structure):
    """``exl3_weights``."""

    _fields_ = (
        ("trellis", c_void_p),
        ("weights", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("k2", c_int32),
        ("codebook", c_int32),
        ("first", c_int32),
        ("columns", c_int32),
    )


_POINTER, _ARGS = c_void_p, POINTER(Prefill)
_CALLS = {
    "rotate": (_POINTER, c_int64, _POINTER, c_int32, c_int32, _POINTER, _POINTER),
    "reconstruct": (POINTER(Weights), c_int32, _POINTER),
    "finish": (
        _POINTER, _POINTER, c_int32, c_int32, _POINTER, c_int64, c_int32, _POINTER
    ),
    "prefill_need": (_ARGS, POINTER(c_int64), POINTER(c_int32), POINTER(c_int32)),
    "prefill": (_ARGS, _POINTER, c_int64, _POINTER),
}  # fmt: skip


class Many:
    """Addresses are the device's; errors are those of ``library.Library``."""

    def __init__(self, loaded: library.Library) -> None:
        self._loaded = loaded
        loaded.declare(_CALLS)

    def rotate(
        self, x: int, stride: int, suh: int, rows: int, inputs: int, rotated: int, stream: int
    ) -> None:
        self._loaded.call("rotate", x, stride, suh, rows, inputs, rotated, stream)

    def reconstruct(self, parts: Sequence[Weights], stream: int) -> None:
        array = (Weights * len(parts))(*parts)
        self._loaded.call("reconstruct", array, len(parts), stream)

    def finish(
        self,
        sums: int,
        svh: int,
        rows: int,
        columns: int,
        y: tuple[int, int, int],
        stream: int,
    ) -> None:
        """``y``: address, elements from row to row, dtype."""
        self._loaded.call("finish", sums, svh, rows, columns, *y, stream)

    def prefill_need(self, args: Prefill) -> PrefillNeed:
        scratch, waves, strips = c_int64(), c_int32(), c_int32()
        self._loaded.call(
            "prefill_need",
            *(ctypes.byref(each) for each in (args, scratch, waves, strips)),
        )
        return PrefillNeed(scratch.value, waves.value, strips.value)

    def prefill(self, args: Prefill, scratch: int, size: int, stream: int) -> None:
        self._loaded.call("prefill", ctypes.byref(args), scratch, size, stream)


@cache
def load() -> Many:
    """Raises Exl3CudaError."""
    return Many(library.load())
