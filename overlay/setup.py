"""Builds the native libraries beside what pyproject.toml says: Engram's row store by a C++
compiler, EXL3's and attention's kernels by nvcc for this machine's GPU or for those that SPARK_CUDA_ARCH names.

Without the compiler the overlay installs all the same; serving then says what is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "csrc"))

import build  # noqa: E402
import build_cuda  # noqa: E402


def extension(name: str, sources: list[Path], depends: list[Path]) -> Extension:
    return Extension(
        name,
        [str(path.relative_to(HERE)) for path in sources],
        depends=[str(path.relative_to(HERE)) for path in depends],
        optional=True,
    )


ENGRAM = extension(
    "spark_overlay.engram._native", build.sources(), sorted(build.ENGRAM.glob("*.h*"))
)
EXL3 = extension("spark_overlay.exl3._cuda", build_cuda.sources(), build_cuda.headers())
ATTENTION = extension(
    "spark_overlay.attention._cuda",
    build_cuda.sources(build_cuda.ATTENTION),
    build_cuda.headers(build_cuda.ATTENTION),
)


class BuildNative(build_ext):
    """Libraries for ctypes, so not modules: their names have no Python version in them."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name))
        try:
            if ext is EXL3:
                build_cuda.build(out)
            elif ext is ATTENTION:
                build_cuda.build(out, files=build_cuda.sources(build_cuda.ATTENTION))
            else:
                build.build(out)
        except (build.BuildError, build_cuda.BuildError) as error:
            print(f"warning: {ext.name} is not built: {error}", file=sys.stderr)


setup(ext_modules=[ENGRAM, EXL3, ATTENTION], cmdclass={"build_ext": BuildNative})
