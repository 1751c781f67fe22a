"""The CUDA library by ctypes: csrc/indexer/api.h. No torch here; addresses go in.

``_cuda.so`` is built when the overlay is installed where nvcc is; it depends on no Python and no
torch.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1] / "_cuda.so"
#: Another build of it, for a GPU the installed one is not for.
OVERRIDE = "SPARK_INDEXER_LIBRARY"
ABI = 1
HEADS, MOST_CHOSEN, DIRECT, MOST_ENTRIES = 32, 2048, 16384, 131072

_BUILD = (
    "Build it on the machine with the GPU: python3 overlay/csrc/build_cuda.py --indexer {path} "
    "(CUDA 13's nvcc on PATH or under CUDA_HOME; SPARK_CUDA_ARCH=121a where no GPU is seen)"
)


class IndexerCudaError(RuntimeError):
    """The library is missing or of another version, or CUDA refused a launch."""


class StepArgs(ctypes.Structure):
    """``indexer_step``."""

    _fields_ = (
        ("request", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("requests", c_int32),
        ("first_row", c_int32),
        ("rows", c_int32),
        ("width", c_int32),
        ("ratio", c_int32),
    )


class ScoresArgs(ctypes.Structure):
    """``indexer_scores_args``."""

    _fields_ = (
        ("q", c_void_p),
        ("weights", c_void_p),
        ("cache", c_void_p),
        ("stride", c_int64),
        ("table", c_void_p),
        ("table_row", c_int64),
        ("out", c_void_p),
        ("out_row", c_int64),
        ("tops", c_void_p),
        ("tops_row", c_int64),
        ("chosen", c_void_p),
        ("chosen_row", c_int64),
        ("chosen_count", c_int32),
        ("blocks", c_int32),
        ("states", c_int32),
        ("fan", c_int32),
        ("parts", c_int32),
        ("splits", c_int32),
    )


class ChooseArgs(ctypes.Structure):
    """``indexer_choose_args``."""

    _fields_ = (
        ("values", c_void_p),
        ("values_row", c_int64),
        ("tops", c_void_p),
        ("tops_row", c_int64),
        ("chosen", c_void_p),
        ("chosen_row", c_int64),
        ("final", c_void_p),
        ("final_row", c_int64),
        ("kind", c_int32),
        ("count", c_int32),
        ("fan", c_int32),
        ("size", c_int32),
        ("chosen_count", c_int32),
        ("entries", c_int32),
        ("early", c_int32),
    )


class Library:
    """The calls, each raising with what the library said: ``ValueError`` for arguments that it
    refuses, ``IndexerCudaError`` where CUDA failed."""

    def __init__(self, path: Path) -> None:
        build = _BUILD.format(path=path)
        if not path.exists():
            raise IndexerCudaError(
                f"{path}: missing, the overlay was installed without nvcc. {build}"
            )
        try:
            library = ctypes.CDLL(str(path))
            found = int(library.indexer_abi())
        except (OSError, AttributeError) as error:
            raise IndexerCudaError(f"{path}: cannot be loaded ({error}). {build}") from error
        if found != ABI:
            raise IndexerCudaError(f"{path}: has interface {found}, expected {ABI}. {build}")
        self.path = path
        library.indexer_error.restype = c_char_p
        library.indexer_scores.argtypes = (POINTER(StepArgs), POINTER(ScoresArgs), c_void_p)
        library.indexer_choose.argtypes = (POINTER(StepArgs), POINTER(ChooseArgs), c_void_p)
        self._library = library

    def scores(self, step: StepArgs, args: ScoresArgs, stream: int) -> None:
        self._raise_for(
            self._library.indexer_scores(ctypes.byref(step), ctypes.byref(args), stream)
        )

    def choose(self, step: StepArgs, args: ChooseArgs, stream: int) -> None:
        self._raise_for(
            self._library.indexer_choose(ctypes.byref(step), ctypes.byref(args), stream)
        )

    def _raise_for(self, status: int) -> None:
        if status == 0:
            return
        said = (self._library.indexer_error() or b"").decode(errors="replace")
        if status == 1:
            raise ValueError(f"indexer kernels: {said}")
        raise IndexerCudaError(
            f"indexer kernels ({self.path}): {said}. If it says that no kernel image fits, it "
            f"was built for another GPU: {_BUILD.format(path=self.path)}"
        )


@cache
def load(path: Path | None = None) -> Library:
    """The library of SPARK_INDEXER_LIBRARY, else the installed one. Raises IndexerCudaError."""
    return Library(path or Path(os.environ.get(OVERRIDE) or LIBRARY))


@cache
def present() -> bool:
    """Whether there is one to load; without it the Triton kernels compute."""
    return Path(os.environ.get(OVERRIDE) or LIBRARY).exists()
