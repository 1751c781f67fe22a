"""The CUDA library by ctypes: csrc/attention/api.h."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import ClassVar

from spark_overlay.native_library import CudaLibrary, chosen, is_there

LIBRARY = Path(__file__).resolve().parents[1] / "_cuda.so"
#: Another build of it, for a GPU the installed one is not for.
OVERRIDE = "SPARK_ATTENTION_LIBRARY"
ABI = 2
MAX_SPLITS = 64


class AttentionCudaError(RuntimeError):
    """The library is missing or of another version, or CUDA refused a launch."""


class SourceArgs(ctypes.Structure):
    """``attention_source``."""

    _fields_ = (
        ("cache", c_void_p),
        ("stride", c_int64),
        ("slots", c_void_p),
        ("slots_row", c_int64),
        ("lengths", c_void_p),
        ("page", c_int32),
        ("width", c_int32),
    )


class Args(ctypes.Structure):
    """``attention_args``."""

    _fields_ = (
        ("q", c_void_p),
        ("q_token", c_int64),
        ("q_head", c_int64),
        ("out", c_void_p),
        ("out_token", c_int64),
        ("out_head", c_int64),
        ("sink", c_void_p),
        ("partial", c_void_p),
        ("peaks", c_void_p),
        ("cos_sin", c_void_p),
        ("cos_sin_row", c_int64),
        ("positions", c_void_p),
        ("source", SourceArgs * 2),
        ("tokens", c_int32),
        ("heads", c_int32),
        ("cos_sin_float", c_int32),
        ("positions_wide", c_int32),
        ("keys", c_int32),
        ("splits", c_int32),
        ("scale", c_float),
        ("many", c_int32),
    )


class Library(CudaLibrary):
    prefix, abi, error = "attention", ABI, AttentionCudaError
    title, option = "attention kernels", "--attention "
    calls: ClassVar = {"sparse": (POINTER(Args), c_void_p)}

    def shared_bytes(self, keys: int, heads: int, many: bool) -> int:
        """Shared memory of a CTA with tiles of ``keys``, or of the form for many tokens."""
        return int(self._function("shared")(keys, heads, many))

    def sparse(self, args: Args, stream: int) -> None:
        self.call("sparse", ctypes.byref(args), stream)


@cache
def load(path: Path | None = None) -> Library:
    """The library of SPARK_ATTENTION_LIBRARY, else the installed one. Raises
    AttentionCudaError."""
    return Library(path or chosen(OVERRIDE, LIBRARY))


@cache
def present() -> bool:
    """Whether there is one to load; without it the Triton kernels compute. Raises
    AttentionCudaError where SPARK_ATTENTION_LIBRARY names none that is there, nor "none"."""
    return is_there(OVERRIDE, LIBRARY, AttentionCudaError)
