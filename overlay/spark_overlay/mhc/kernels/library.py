"""The CUDA library by ctypes: csrc/mhc/api.h. No torch here; addresses go in.

``_cuda.so`` is built when the overlay is installed where nvcc is; it depends on no Python and no
torch.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_float, c_int32, c_void_p
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1] / "_cuda.so"
#: Another build of it, for a GPU the installed one is not for.
OVERRIDE = "SPARK_MHC_LIBRARY"
ABI = 1
ROWS, SHARE, MOST_HIDDEN = 8, 256, 8192

_BUILD = (
    "Build it on the machine with the GPU: python3 overlay/csrc/build_cuda.py --mhc {path} "
    "(CUDA 13's nvcc on PATH or under CUDA_HOME; SPARK_CUDA_ARCH=121a where no GPU is seen)"
)


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
        ("streams_out", c_void_p),
        ("post_out", c_void_p),
        ("comb_out", c_void_p),
        ("input_out", c_void_p),
        ("pre_out", c_void_p),
        ("mean_out", c_void_p),
        ("partials", c_void_p),
        ("counters", c_void_p),
        ("tokens", c_int32),
        ("hidden", c_int32),
        ("warps", c_int32),
        ("iterations", c_int32),
        ("rms_eps", c_float),
        ("pre_eps", c_float),
        ("sinkhorn_eps", c_float),
        ("post_gain", c_float),
        ("norm_eps", c_float),
    )


class Library:
    """The call, raising with what the library said: ``ValueError`` for arguments that it refuses,
    ``MhcCudaError`` where CUDA failed."""

    def __init__(self, path: Path) -> None:
        build = _BUILD.format(path=path)
        if not path.exists():
            raise MhcCudaError(f"{path}: missing, the overlay was installed without nvcc. {build}")
        try:
            library = ctypes.CDLL(str(path))
            found = int(library.mhc_abi())
        except (OSError, AttributeError) as error:
            raise MhcCudaError(f"{path}: cannot be loaded ({error}). {build}") from error
        if found != ABI:
            raise MhcCudaError(f"{path}: has interface {found}, expected {ABI}. {build}")
        self.path = path
        library.mhc_error.restype = c_char_p
        library.mhc_one_launch.argtypes = (POINTER(Args), c_void_p)
        self._library = library

    def one_launch(self, args: Args, stream: int) -> None:
        status = self._library.mhc_one_launch(ctypes.byref(args), stream)
        if status == 0:
            return
        said = (self._library.mhc_error() or b"").decode(errors="replace")
        if status == 1:
            raise ValueError(f"mHC kernels: {said}")
        raise MhcCudaError(
            f"mHC kernels ({self.path}): {said}. If it says that no kernel image fits, it was "
            f"built for another GPU: {_BUILD.format(path=self.path)}"
        )


@cache
def load(path: Path | None = None) -> Library:
    """The library of SPARK_MHC_LIBRARY, else the installed one. Raises MhcCudaError."""
    return Library(path or Path(os.environ.get(OVERRIDE) or LIBRARY))


@cache
def present() -> bool:
    """Whether there is one to load; without it the Triton kernels compute."""
    return Path(os.environ.get(OVERRIDE) or LIBRARY).exists()
