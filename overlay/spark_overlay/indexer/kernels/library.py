"""The CUDA library by ctypes: csrc/indexer/api.h."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import ClassVar

from spark_overlay.native_library import CudaLibrary, chosen, is_there

LIBRARY = Path(__file__).resolve().parents[1] / "_cuda.so"
#: Another build of it, for a GPU the installed one is not for.
OVERRIDE = "SPARK_INDEXER_LIBRARY"
ABI = 2
HEADS, MOST_ROWS, MOST_CHOSEN, DIRECT, MOST_ENTRIES = 32, 8, 2048, 16384, 131072


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
        ("group", c_int32),
        ("held", c_int32),
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


class Library(CudaLibrary):
    prefix, abi, error = "indexer", ABI, IndexerCudaError
    title, option = "indexer kernels", "--indexer "
    calls: ClassVar = {
        "scores": (POINTER(StepArgs), POINTER(ScoresArgs), c_void_p),
        "choose": (POINTER(StepArgs), POINTER(ChooseArgs), c_void_p),
    }

    def scores(self, step: StepArgs, args: ScoresArgs, stream: int) -> None:
        self.call("scores", ctypes.byref(step), ctypes.byref(args), stream)

    def choose(self, step: StepArgs, args: ChooseArgs, stream: int) -> None:
        self.call("choose", ctypes.byref(step), ctypes.byref(args), stream)


@cache
def load(path: Path | None = None) -> Library:
    """The library of SPARK_INDEXER_LIBRARY, else the installed one. Raises IndexerCudaError."""
    return Library(path or chosen(OVERRIDE, LIBRARY))


@cache
def present() -> bool:
    """Whether there is one to load; without it the Triton kernels compute. Raises IndexerCudaError
    where SPARK_INDEXER_LIBRARY names none that is there, nor "none"."""
    return is_there(OVERRIDE, LIBRARY, IndexerCudaError)
