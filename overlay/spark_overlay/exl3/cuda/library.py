"""The CUDA library by ctypes: csrc/exl3/api.h, call by call."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from spark_overlay.exl3.cuda.plan import Need
from spark_overlay.exl3.format import Codebook
from spark_overlay.native_library import CudaLibrary, chosen

LIBRARY = Path(__file__).resolve().parents[1] / "_cuda.so"
#: Another build of it, for a GPU the installed one is not for.
OVERRIDE = "SPARK_EXL3_LIBRARY"
ABI = 3
CODEBOOKS: dict[Codebook, int] = {"mul1": 0, "mcg": 1, "3inst": 2}
BF16, FP32 = 0, 1


class Exl3CudaError(RuntimeError):
    """The library is missing or of another version, or CUDA refused a launch."""


class Shard(ctypes.Structure):
    """``exl3_shard``."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("trellis", c_void_p),
        ("suh", c_void_p),
        ("svh", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("k2", c_int32),
        ("codebook", c_int32),
        ("y_dtype", c_int32),
        ("chunks", c_int32),
        ("kblocks", c_int32),
        ("reserved", c_int32),
    )


class Experts(ctypes.Structure):
    """``exl3_experts_args``."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("table", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
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
        ("a_warps", c_int32),
        ("a_chunks", c_int32),
        ("a_kblocks", c_int32),
        ("b_warps", c_int32),
        ("b_chunks", c_int32),
        ("b_kblocks", c_int32),
    )


_POINTER, _SIZE, _SHARDS = c_void_p, POINTER(c_int64), (POINTER(Shard), c_int32, c_int32, c_int32)
_SCRATCH = (_POINTER, c_int64, _POINTER, c_int64)


class Library(CudaLibrary):
    """Addresses are the device's."""

    prefix, abi, error = "exl3", ABI, Exl3CudaError
    title = "EXL3 kernels"
    calls: ClassVar = {
        "decode": (_POINTER, c_int32, c_int32, c_int32, c_int32, _POINTER, _POINTER),
        "group_need": (*_SHARDS, _SIZE, _SIZE),
        "group": (*_SHARDS, *_SCRATCH, _POINTER),
        "experts_need": (POINTER(Experts), _SIZE, _SIZE),
        "experts": (POINTER(Experts), *_SCRATCH, _POINTER),
    }

    def decode(
        self,
        trellis: int,
        inputs: int,
        outputs: int,
        k2: int,
        codebook: int,
        weights: int,
        stream: int,
    ) -> None:
        self.call("decode", trellis, inputs, outputs, k2, codebook, weights, stream)

    def group_need(self, shards: ctypes.Array[Shard], rows: int, warps: int) -> Need:
        return self._need("group_need", shards, len(shards), rows, warps)

    def group(
        self,
        shards: ctypes.Array[Shard],
        rows: int,
        warps: int,
        scratch: int,
        counters: int,
        need: Need,
        stream: int,
    ) -> None:
        sizes = (scratch, need.scratch_bytes, counters, need.counters)
        self.call("group", shards, len(shards), rows, warps, *sizes, stream)

    def experts_need(self, args: Experts) -> Need:
        return self._need("experts_need", ctypes.byref(args))

    def experts(self, args: Experts, scratch: int, counters: int, need: Need, stream: int) -> None:
        sizes = (scratch, need.scratch_bytes, counters, need.counters)
        self.call("experts", ctypes.byref(args), *sizes, stream)

    def _need(self, name: str, *values: Any) -> Need:
        scratch, counters = c_int64(), c_int64()
        self.call(name, *values, ctypes.byref(scratch), ctypes.byref(counters))
        return Need(scratch.value, counters.value)


@cache
def load(path: Path | None = None) -> Library:
    """The library of SPARK_EXL3_LIBRARY, else the installed one. Raises Exl3CudaError."""
    return Library(path or chosen(OVERRIDE, LIBRARY))
