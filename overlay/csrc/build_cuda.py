#!/usr/bin/env python3
"""Builds the CUDA code: ``python3 overlay/csrc/build_cuda.py OUT.so [--arch 121a]``.

A plain shared library with a C interface (exl3/api.h; that of the folder with --attention,
--indexer or --mhc), CUDA's runtime inside: it depends on no Python and no torch. setup.py,
compile_check.py and the GPU host's scripts use this file.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXL3, ATTENTION, INDEXER, MHC = (HERE / n for n in ("exl3", "attention", "indexer", "mhc"))
COMMON = HERE / "common"
#: What the sources are written for, as nvcc names it: A100, the 30 series, H100/H200, GB10.
ARCHITECTURES = ("80", "86", "90a", "121a")
#: Others that they compile for: the 40 series, the 50 series and RTX PRO 6000.
MORE_ARCHITECTURES = ("89", "120a")
FLAGS = ("-std=c++20", "-O3", "-lineinfo")
HOST_FLAGS = ("-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
SLOWEST = ("experts_a", "experts_b", "dense")
#: The first toolkit that knows sm_121.
OLDEST = (12, 9)
NEEDED = (
    "CUDA's compiler, 13.0 (nvcc under CUDA_HOME or on PATH, or its wheels, which "
    "launcher/locks/nvcc.lock pins)"
)


class BuildError(RuntimeError):
    """What is missing or what the compiler said."""


def sources(folder: Path = EXL3) -> list[Path]:
    """The translation units, those that take longest first."""
    return sorted(folder.glob("*.cu"), key=lambda p: (*SLOWEST, p.stem).index(p.stem))


def headers(folder: Path = EXL3) -> list[Path]:
    """What the folder's sources include: its own and those that all folders share."""
    found = [p for place in (folder, COMMON) for p in place.iterdir()]
    return sorted(p for p in found if p.suffix in (".h", ".cuh", ".hpp"))


def candidates() -> Iterator[Path]:
    """Places nvcc may lie, in the order they are tried."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        yield Path(found)
    for entry in sys.path:
        yield from sorted(Path(entry or ".").glob("nvidia/cu*/bin/nvcc"), reverse=True)
    yield Path("/usr/local/cuda/bin/nvcc")


def compiler() -> Path:
    """nvcc. Raises BuildError where there is none, or only one that is too old."""
    old = []
    for path in candidates():
        if not path.is_file() or not os.access(path, os.X_OK):
            continue
        found = version(path)
        if found >= OLDEST:
            return path
        old.append(f"{path} is {found[0]}.{found[1]}")
    raise BuildError(f"{'; '.join(old) or 'no nvcc found'}; needed: {NEEDED}")


def version(nvcc: Path) -> tuple[int, int]:
    """(0, 0) of something that is no nvcc."""
    asked = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True)
    found = re.search(r"release (\d+)\.(\d+)", asked.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def present_architecture() -> str | None:
    """Of the first GPU of this machine, None without one: "121a" where code for that GPU alone
    is more than code for its family."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    argv = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(argv, capture_output=True, text=True).stdout.split()
    return architecture(said[0]) if said and re.fullmatch(r"\d+\.\d", said[0]) else None


def architecture(capability: str) -> str:
    """nvcc's name of a compute capability: "9.0" is "90a", "8.6" is "86"."""
    number = capability.replace(".", "")
    return f"{number}a" if int(number) >= 90 else number


def wanted_architectures() -> list[str]:
    """SPARK_CUDA_ARCH ("121a", "90a 121a"), else the present GPU's. Raises BuildError."""
    asked = os.environ.get("SPARK_CUDA_ARCH", "").replace(",", " ").split()
    wrong = [name for name in asked if not re.fullmatch(r"\d{2,3}[af]?", name)]
    if wrong:
        raise BuildError(f"SPARK_CUDA_ARCH has {wrong[0]!r}; an architecture is such as 90a, 121a")
    if asked:
        return asked
    found = present_architecture()
    if found is None:
        raise BuildError(
            "this machine shows no GPU: set SPARK_CUDA_ARCH to what the code is for (121a: GB10)"
        )
    return [found]


def code_for(arch: str) -> list[str]:
    return ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]


def build(
    out: Path,
    archs: Sequence[str] = (),
    extra: Sequence[str] = (),
    jobs: int | None = None,
    files: Sequence[Path] = (),
    said: list[str] | None = None,
) -> Path:
    """Compile to ``out`` for ``archs`` (none: what ``wanted_architectures`` says); ``said`` takes
    the compiler's words.

    The file appears whole, under its name: a process that has the old one loaded keeps it.
    Raises BuildError.
    """
    archs = list(archs) or wanted_architectures()
    nvcc = compiler()
    files = list(files) or sources()
    if not files:
        raise BuildError(f"{EXL3} has no .cu file: the checkout is not whole")
    out.parent.mkdir(parents=True, exist_ok=True)
    base = [str(nvcc), *FLAGS, *extra]
    base += [f"-Xcompiler={','.join(HOST_FLAGS)}"]
    base += [word for arch in archs for word in code_for(arch)]
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        objects = [Path(folder) / f"{file.stem}.o" for file in files]
        calls = [
            [*base, "-c", str(file), "-o", str(made)]
            for file, made in zip(files, objects, strict=True)
        ]
        workers = jobs or min(len(calls), os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            words = list(pool.map(run, calls))
        if said is not None:
            said += words
        made_file = Path(folder) / out.name
        # Wheels keep libcudart_static.a in lib, where nvcc does not look by itself.
        library = nvcc.resolve().parent.parent / "lib"
        link = [*base, "-shared", "-cudart=static", *map(str, objects), "-o", str(made_file)]
        run([*link, f"-L{library}", "-Xlinker=--exclude-libs,ALL"])
        os.replace(made_file, out)
    return out


def run(argv: Sequence[str]) -> str:
    """What a call printed. Raises BuildError with it if the call failed."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(argv)} failed:\n{done.stdout}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.so")
    parser.add_argument("--arch", default="", help="90a, or several: 80,86,90a,121a")
    parser.add_argument("--attention", action="store_true", help="attention's library, not EXL3's")
    parser.add_argument("--indexer", action="store_true", help="the indexer's library")
    parser.add_argument("--mhc", action="store_true", help="mHC's library")
    parser.add_argument("--jobs", type=int, help="compilers at once; default: cores")
    parser.add_argument("--verbose", action="store_true", help="print what ptxas says")
    given = parser.parse_args()
    said: list[str] = []
    extra = ["-Xptxas=-v"] if given.verbose else []
    archs = given.arch.replace(",", " ").split()
    asked = [p for p in (ATTENTION, INDEXER, MHC) if getattr(given, p.name)]
    if len(asked) > 1:
        parser.error("one library at a time")
    files = sources(asked[0] if asked else EXL3)
    print(build(given.out, archs, extra, given.jobs, files, said))
    if given.verbose:
        print("".join(said))


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(str(error))
