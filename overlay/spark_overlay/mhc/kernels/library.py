"""mHC's CUDA library by ctypes: csrc/mhc/api.h."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_void_p
from functools import cache
from pathlib import Path
from typing import ClassVar

from spark_overlay.native_library import CudaLibrary, chosen, is_there

LIBRARY = Path(__file__).resolve().parents[1] / "_cuda.so"
#: Another build of it, for a GPU the installed one is not for.
OVERRIDE = "SPARK_MHC_LIBRARY"
ABI = 1
MOST_TOKENS, MOST_HIDDEN = 64, 8192


class MhcCudaError(RuntimeError):
    """The library is missing or of another version, or CUDA refused a launch."""


class Args(ctypes.Structure):
    """``mhc_args``."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("post", c_void_p),
        ("comb", c_void_p),
        ("pre", c_void_p),
        ("fn", c_void_p),
        ("scale", c_void_p),
        ("base", c_void_p),
        ("weight", c_void_p),
        ("streams", c_void_p),
        ("input", c_void_p),
        ("mean", c_void_p),
        ("post_out", c_void_p),
        ("comb_out", c_void_p),
        ("pre_out", c_void_p),
        ("shares", c_void_p),
        ("counters", c_void_p),
        ("tokens", c_int32),
        ("hidden", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("iterations", c_int32),
        ("early", c_int32),
        ("rms_eps", c_float),
        ("pre_eps", c_float),
        ("sinkhorn_eps", c_float),
        ("post_gain", c_float),
        ("norm_eps", c_float),
    )


class Library(CudaLibrary):
    prefix, abi, error = "mhc", ABI, MhcCudaError
    title, option = "mHC kernels", "--mhc "
    calls: ClassVar = {"one_launch": (POINTER(Args), c_void_p)}

    def one_launch(self, args: Args, stream: int) -> None:
        self.call("one_launch", ctypes.byref(args), stream)


@cache
def load(path: Path | None = None) -> Library:
    """The library of SPARK_MHC_LIBRARY, else the installed one. Raises MhcCudaError."""
    return Library(path or chosen(OVERRIDE, LIBRARY))


@cache
def present() -> bool:
    """Whether there is one to load; without it the Triton kernels compute. Raises MhcCudaError
    where SPARK_MHC_LIBRARY names none that is there, nor "none"."""
    return is_there(OVERRIDE, LIBRARY, MhcCudaError)
