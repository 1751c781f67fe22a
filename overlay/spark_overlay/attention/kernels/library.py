"""The CUDA library by ctypes: csrc/attention/api.h. No torch here; addresses go in.

``_cuda.so`` is built when the overlay is installed where nvcc is; it depends on no Python and no
torch.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1] / "_cuda.so"
#: Another build of it, for a GPU the installed one is not for.
OVERRIDE = "SPARK_ATTENTION_LIBRARY"
ABI = 2
MAX_SPLITS = 64

_BUILD = (
    "Build it on the machine with the GPU: python3 overlay/csrc/build_cuda.py --attention {path} "
    "(CUDA 13's nvcc on PATH or under CUDA_HOME; SPARK_CUDA_ARCH=121a where no GPU is seen)"
)


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


class Library:
    """The calls, each raising with what the library said: ``ValueError`` for arguments that it
    refuses, ``AttentionCudaError`` where CUDA failed."""

    def __init__(self, path: Path) -> None:
        build = _BUILD.format(path=path)
        if not path.exists():
            raise AttentionCudaError(
                f"{path}: missing, the overlay was installed without nvcc. {build}"
            )
        try:
            library = ctypes.CDLL(str(path))
            found = int(library.attention_abi())
        except (OSError, AttributeError) as error:
            raise AttentionCudaError(f"{path}: cannot be loaded ({error}). {build}") from error
        if found != ABI:
            raise AttentionCudaError(f"{path}: has interface {found}, expected {ABI}. {build}")
        self.path = path
        library.attention_error.restype = c_char_p
        library.attention_sparse.argtypes = (POINTER(Args), c_void_p)
        library.attention_shared.argtypes = (c_int, c_int, c_int)
        self._library = library

    def shared_bytes(self, keys: int, heads: int, many: bool) -> int:
        """Shared memory of a CTA with tiles of ``keys``, or of the form for many tokens."""
        return int(self._library.attention_shared(keys, heads, many))

    def sparse(self, args: Args, stream: int) -> None:
        status = self._library.attention_sparse(ctypes.byref(args), stream)
        if status == 0:
            return
        said = (self._library.attention_error() or b"").decode(errors="replace")
        if status == 1:
            raise ValueError(f"attention kernels: {said}")
        raise AttentionCudaError(
            f"attention kernels ({self.path}): {said}. If it says that no kernel image fits, it "
            f"was built for another GPU: {_BUILD.format(path=self.path)}"
        )


@cache
def load(path: Path | None = None) -> Library:
    """The library of SPARK_ATTENTION_LIBRARY, else the installed one. Raises
    AttentionCudaError."""
    return Library(path or Path(os.environ.get(OVERRIDE) or LIBRARY))


@cache
def present() -> bool:
    """Whether there is one to load; without it the Triton kernels compute."""
    return Path(os.environ.get(OVERRIDE) or LIBRARY).exists()
