"""Our compiled libraries by ctypes: found, of the version expected, their functions declared, and
what they say raised. No torch here; addresses go in.

A package's ``_cuda.so`` is built when the overlay is installed where nvcc is; it depends on no
Python and no torch. Its interface: csrc/common/call.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_int
from pathlib import Path
from typing import Any, ClassVar

#: What a call returns (CALL_OK, CALL_BAD_ARGUMENT; any other is CUDA's).
OK, BAD_ARGUMENT = 0, 1


def opened(
    path: Path, prefix: str, abi: int, without: str, mend: str, error: type[Exception]
) -> ctypes.CDLL:
    """The library of ``path``, whose ``<prefix>_abi()`` is ``abi``. Raises ``error`` with ``mend``,
    what to do about it; ``without``: what a machine lacked that has no such file."""
    if not path.exists():
        raise error(f"{path}: missing, the overlay was installed without {without}. {mend}")
    try:
        library = ctypes.CDLL(str(path))
        found = int(getattr(library, f"{prefix}_abi")())
    except (OSError, AttributeError) as fault:
        raise error(f"{path}: cannot be loaded ({fault}). {mend}") from fault
    if found != abi:
        raise error(f"{path}: has interface {found}, expected {abi}. {mend}")
    return library


class CudaLibrary:
    """A library's calls, each raising with what the library said: ``ValueError`` for arguments
    that it refuses, ``error`` where CUDA failed."""

    #: Of its functions: ``<prefix>_abi``, ``<prefix>_error`` and those of ``calls``.
    prefix: ClassVar[str]
    abi: ClassVar[int]
    #: What messages call it; build_cuda.py's option for it.
    title: ClassVar[str]
    option: ClassVar[str] = ""
    error: ClassVar[type[Exception]]
    #: The types of each function's arguments, by its name behind ``prefix``; all return a status.
    calls: ClassVar[Mapping[str, Sequence[Any]]]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = opened(path, self.prefix, self.abi, "nvcc", self._build(), self.error)
        self._said = self._function("error")
        self._said.restype = c_char_p
        self._calls: dict[str, Any] = {}
        self.declare(self.calls)

    def declare(self, calls: Mapping[str, Sequence[Any]]) -> None:
        """Further functions, as ``calls``. Raises ``error`` where it lacks one."""
        for name, types in calls.items():
            function = self._function(name)
            function.argtypes, function.restype = tuple(types), c_int
            self._calls[name] = function

    def call(self, name: str, *values: Any) -> None:
        status = self._calls[name](*values)
        if status == OK:
            return
        said = (self._said() or b"").decode(errors="replace")
        if status == BAD_ARGUMENT:
            raise ValueError(f"{self.title}: {said}")
        raise self.error(
            f"{self.title} ({self.path}): {said}. If it says that no kernel image fits, it was "
            f"built for another GPU: {self._build()}"
        )

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, f"{self.prefix}_{name}")
        except AttributeError as fault:
            lacks = f"{self.path}: has no {self.prefix}_{name}. {self._build()}"
            raise self.error(lacks) from fault

    def _build(self) -> str:
        return (
            f"Build it on the machine with the GPU: python3 overlay/csrc/build_cuda.py "
            f"{self.option}{self.path} (CUDA 13's nvcc on PATH or under CUDA_HOME; "
            "SPARK_CUDA_ARCH=121a where no GPU is seen)"
        )


def chosen(override: str, installed: Path) -> Path:
    """Where the environment names another build (one for a GPU that the installed one is not for),
    that one."""
    return Path(os.environ.get(override) or installed)


def is_there(override: str, installed: Path, error: type[Exception]) -> bool:
    """Whether there is a library to load; the environment may say ``none``. Raises ``error`` where
    it names one that is not there: what it asks for is never left out quietly."""
    named = os.environ.get(override)
    if named == "none":
        return False
    found = chosen(override, installed).exists()
    if named and not found:
        raise error(f"{override}={named}: there is no such file; needed: a library's path, or none")
    return found
