#!/usr/bin/env python3
"""Builds the CUDA code: ``python3 overlay/csrc/build_cuda.py OUT.so [--arch 90a,121a]``.

Like ``build.py``'s library it has a C interface for ctypes, and it links CUDA's runtime statically:
it depends on no Python and no torch, only on the driver, so one build serves every interpreter.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXL3 = HERE / "exl3"
#: Translation units, the longest first.
UNITS = ("experts_a", "experts_b", "dense", "api", "decode")
#: What the project is built for; 89 and 120a compile as well.
ARCHES = ("80", "86", "90a", "121a")
FLAGS = ("-std=c++20", "-O3", "-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra")
NEEDED = (
    "CUDA's compiler 13.0 or newer: a CUDA toolkit (nvcc on PATH, or CUDA_HOME), or "
    "pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl"
)


class BuildError(RuntimeError):
    """What is missing or what the compiler said."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """An nvcc, and the folders that a toolkit from pip wheels needs to be told of."""

    nvcc: Path
    include: tuple[Path, ...] = ()
    libraries: tuple[Path, ...] = ()

    def environment(self) -> dict[str, str]:
        """nvcc calls ptxas and others by name where it does not find them beside itself."""
        return {**os.environ, "PATH": f"{self.nvcc.parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def find_compiler(environ: dict[str, str] | None = None, paths: Sequence[str] | None = None) -> Compiler:
    """CUDA_HOME's nvcc, else the one on PATH, else /usr/local/cuda's, else the pip wheels'.

    Raises BuildError.
    """
    env = dict(os.environ) if environ is None else environ
    home = env.get("CUDA_HOME")
    if home:
        asked = Path(home) / "bin" / "nvcc"
        if not asked.is_file():
            raise BuildError(f"CUDA_HOME is {home}, but {asked} is not there; needed: {NEEDED}")
        return _described(asked)
    found = shutil.which("nvcc", path=env.get("PATH"))
    places = [Path(found)] if found else []
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    for entry in sys.path if paths is None else paths:
        places += sorted(Path(entry or ".").glob("nvidia/cu*/bin/nvcc"), reverse=True)
    for place in places:
        if place.is_file():
            return _described(place)
    raise BuildError(f"no nvcc found; needed: {NEEDED}")


def _described(nvcc: Path) -> Compiler:
    root = nvcc.resolve().parent.parent
    include = root / "include"
    # Wheels keep libcudart_static.a in lib, where nvcc does not look by itself.
    libraries = tuple(p for p in (root / "lib64", root / "lib") if (p / "libcudart_static.a").is_file())
    return Compiler(nvcc, (include,) if include.is_dir() else (), libraries)


def present_arch() -> str:
    """The architecture of this machine's first GPU, as nvcc writes it. Raises BuildError."""
    tool = shutil.which("nvidia-smi")
    asked = [tool or "nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if tool is not None:
        run = subprocess.run(asked, capture_output=True, text=True)
        lines = run.stdout.split()
        if run.returncode == 0 and lines:
            return arch_of(lines[0])
    raise BuildError("no GPU found here to build for; name one: --arch 121a (GB10), 90a, 86, 80")


def arch_of(capability: str) -> str:
    """``"12.1"`` -> ``"121a"``: from 9.0 on, code for exactly that chip."""
    major, minor = capability.split(".")
    return f"{major}{minor}{'a' if int(major) >= 9 else ''}"


def compile_command(compiler: Compiler, arches: Sequence[str], unit: str, out: Path) -> list[str]:
    """The nvcc call that compiles one translation unit for all ``arches``."""
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in arches]
    include = [f"-I{folder}" for folder in compiler.include]
    source = str(EXL3 / f"{unit}.cu")
    return [str(compiler.nvcc), *FLAGS, *codes, *include, "-Xptxas=-v", "-c", source, "-o", str(out)]


def build(out: Path, arches: Sequence[str], compiler: Compiler | None = None, jobs: int = 0) -> str:
    """Compile to ``out`` and return what ptxas said of every kernel.

    The file appears whole, under its name: a process that has the old one loaded keeps it.
    Raises BuildError.
    """
    tool = compiler or find_compiler()
    env = tool.environment()

    def run(argv: list[str]) -> str:
        done = subprocess.run(argv, capture_output=True, text=True, env=env)
        if done.returncode != 0:
            raise BuildError(f"{shlex.join(argv)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        objects = [Path(folder) / f"{unit}.o" for unit in UNITS]
        calls = [
            compile_command(tool, arches, unit, made)
            for unit, made in zip(UNITS, objects, strict=True)
        ]
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            said = list(pool.map(run, calls))
        made_file = Path(folder) / out.name
        libraries = [f"-L{folder}" for folder in tool.libraries]
        link = [str(tool.nvcc), "-shared", "-cudart=static", *map(str, objects), *libraries]
        run([*link, "-Xlinker=--exclude-libs,ALL", "-o", str(made_file)])
        os.replace(made_file, out)
    return "".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", help="90a, or several: 80,86,90a,121a; default: this GPU's")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once; default: cores")
    parser.add_argument("--verbose", action="store_true", help="print what ptxas says")
    args = parser.parse_args()
    try:
        arches = args.arch.split(",") if args.arch else [present_arch()]
        said = build(args.out, arches, jobs=args.jobs)
    except BuildError as error:
        sys.exit(str(error))
    print(said if args.verbose else args.out)


if __name__ == "__main__":
    main()
