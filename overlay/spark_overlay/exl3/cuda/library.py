"""The CUDA library by ctypes: csrc/exl3/api.h, call by call. No torch here; addresses go in.

``_cuda.so`` is built when the overlay is installed where nvcc is; it depends on no Python and no
torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from spark_overlay.exl3.cuda.plan import Need
from spark_overlay.exl3.format import Codebook

LIBRARY = Path(__file__).resolve().parents[1] / "_cuda.so"
#: Another build of it, for a GPU the installed one is not for.
OVERRIDE = "SPARK_EXL3_LIBRARY"
ABI = 3
CODEBOOKS: dict[Codebook, int] = {"mul1": 0, "mcg": 1, "3inst": 2}
BF16, FP32 = 0, 1

_BUILD = (
    "Build it on the machine with the GPU: python3 overlay/csrc/build_cuda.py {path} (CUDA 13's "
    "nvcc on PATH or under CUDA_HOME; SPARK_CUDA_ARCH=121a where no GPU is seen)"
)


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


class Library:
    """The calls, each raising with what the library said. Addresses are the device's.

    ``ValueError`` for arguments it refuses, ``Exl3CudaError`` where CUDA failed."""

    def __init__(self, path: Path) -> None:
        build = _BUILD.format(path=path)
        if not path.exists():
            raise Exl3CudaError(f"{path}: missing, the overlay was installed without nvcc. {build}")
        try:
            library = ctypes.CDLL(str(path))
            found = int(library.exl3_abi())
        except (OSError, AttributeError) as error:
            raise Exl3CudaError(f"{path}: cannot be loaded ({error}). {build}") from error
        if found != ABI:
            raise Exl3CudaError(f"{path}: has interface {found}, expected {ABI}. {build}")
        self.path = path
        pointer, size = c_void_p, POINTER(c_int64)
        library.exl3_error.restype = c_char_p
        library.exl3_decode.argtypes = (
            pointer, c_int32, c_int32, c_int32, c_int32, pointer, pointer
        )  # fmt: skip
        library.exl3_group_need.argtypes = (POINTER(Shard), c_int32, c_int32, c_int32, size, size)
        library.exl3_group.argtypes = (
            POINTER(Shard), c_int32, c_int32, c_int32, pointer, c_int64, pointer, c_int64, pointer
        )  # fmt: skip
        library.exl3_experts_need.argtypes = (POINTER(Experts), size, size)
        library.exl3_experts.argtypes = (
            POINTER(Experts), pointer, c_int64, pointer, c_int64, pointer
        )  # fmt: skip
        for name in ("decode", "group_need", "group", "experts_need", "experts"):
            getattr(library, f"exl3_{name}").restype = c_int
        self._library = library

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
        self._check(
            self._library.exl3_decode(trellis, inputs, outputs, k2, codebook, weights, stream)
        )

    def group_need(self, shards: ctypes.Array[Shard], rows: int, warps: int) -> Need:
        scratch, counters = c_int64(), c_int64()
        sizes = (ctypes.byref(scratch), ctypes.byref(counters))
        self._check(self._library.exl3_group_need(shards, len(shards), rows, warps, *sizes))
        return Need(scratch.value, counters.value)

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
        self._check(
            self._library.exl3_group(
                shards,
                len(shards),
                rows,
                warps,
                scratch,
                need.scratch_bytes,
                counters,
                need.counters,
                stream,
            )
        )

    def experts_need(self, args: Experts) -> Need:
        scratch, counters = c_int64(), c_int64()
        sizes = (ctypes.byref(scratch), ctypes.byref(counters))
        self._check(self._library.exl3_experts_need(ctypes.byref(args), *sizes))
        return Need(scratch.value, counters.value)

    def experts(self, args: Experts, scratch: int, counters: int, need: Need, stream: int) -> None:
        self._check(
            self._library.exl3_experts(
                ctypes.byref(args), scratch, need.scratch_bytes, counters, need.counters, stream
            )
        )

    def declare(self, name: str, types: Sequence[Any]) -> None:
        """Another of its functions, which returns a status. Raises Exl3CudaError."""
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            build = _BUILD.format(path=self.path)
            raise Exl3CudaError(f"{self.path}: has no {name}. {build}") from error
        function.argtypes, function.restype = tuple(types), c_int

    def call(self, name: str, *values: Any) -> None:
        self._check(getattr(self._library, name)(*values))

    def _check(self, status: int) -> None:
        if status == 0:
            return
        said = (self._library.exl3_error() or b"").decode(errors="replace")
        if status == 1:
            raise ValueError(f"EXL3 kernels: {said}")
        raise Exl3CudaError(
            f"EXL3 kernels ({self.path}): {said}. If it says that no kernel image fits, it was "
            f"built for another GPU: {_BUILD.format(path=self.path)}"
        )


@cache
def load(path: Path | None = None) -> Library:
    """The library of SPARK_EXL3_LIBRARY, else the installed one. Raises Exl3CudaError."""
    return Library(path or Path(os.environ.get(OVERRIDE) or LIBRARY))
