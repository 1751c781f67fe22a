#!/usr/bin/env python3
"""Builds the native code: ``python3 overlay/csrc/build.py OUT.so``. setup.py and the tests use it.

A plain shared library with a C interface, loaded by ctypes: it depends on no Python and no torch,
so one build serves every interpreter of the machine.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENGRAM = HERE / "engram"
LIBRARY = ("rows", "cache", "reader_uring", "reader_pool", "store", "api")
FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-fvisibility=hidden",
)
NEEDED = "a C++20 compiler (Debian and Ubuntu: apt-get install g++ liburing-dev pkg-config)"


class BuildError(RuntimeError):
    """What is missing or what the compiler said."""


def sources(folder: Path = ENGRAM) -> list[Path]:
    return [folder / f"{name}.cpp" for name in LIBRARY]


def compiler() -> str:
    """The compiler's command: CXX, else g++, else clang++. Raises BuildError."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "clang++"]:
        if shutil.which(shlex.split(name)[0]):
            return name
    raise BuildError(f"no {asked or 'g++'} found; needed: {NEEDED}")


def uring() -> tuple[list[str], list[list[str]]]:
    """Flags to compile with liburing, and the ways to link it, best first; nothing without it.

    Linked into the library where that goes, so that it need not be there when rows are served.
    """
    tool = shutil.which("pkg-config")
    if tool is None or subprocess.run([tool, "--exists", "liburing"]).returncode != 0:
        return [], [[]]
    asked = [tool, "--cflags", "--libs", "liburing"]
    words = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    flags = [word for word in words if not word.startswith("-l")]
    static = ["-Wl,-Bstatic", "-luring", "-Wl,-Bdynamic"]
    return ["-DHAVE_LIBURING=1", *flags], [static, ["-luring"]]


def build(out: Path, extra: Sequence[str] = (), driver: Path | None = None) -> Path:
    """Compile to ``out``: the library, or with ``driver`` a program around the same sources.

    The file appears whole, under its name: a process that has the old one loaded keeps it.
    Raises BuildError.
    """
    command = shlex.split(compiler())
    defines, links = uring()
    out.parent.mkdir(parents=True, exist_ok=True)
    files = [*sources(), *([driver] if driver else [])]
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        base = [*command, *FLAGS, *("-O2", "-g1"), *extra, *defines]
        running = []
        objects = [str(Path(folder) / f"{file.stem}.o") for file in files]
        for file, made in zip(files, objects, strict=True):
            argv = [*base, "-c", str(file), "-o", made]
            running.append((argv, subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)))
        failed = [(argv, process.communicate()[1], process) for argv, process in running]
        for argv, said, process in failed:
            if process.returncode != 0:
                raise BuildError(f"{shlex.join(argv)} failed:\n{said}")
        made_file = Path(folder) / out.name
        kind = [] if driver else ["-shared", "-Wl,--exclude-libs,ALL"]
        said = ""
        for link in links:
            argv = [*base, *kind, *objects, "-o", str(made_file), *link]
            linked = subprocess.run(argv, stderr=subprocess.PIPE, text=True)
            if linked.returncode == 0:
                os.replace(made_file, out)
                return out
            said = linked.stderr
        raise BuildError(f"linking {out.name} failed:\n{said}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: build.py OUT.so")
    try:
        print(build(Path(sys.argv[1])))
    except BuildError as error:
        sys.exit(str(error))
