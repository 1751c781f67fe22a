"""Builds the native libraries beside what pyproject.toml says: Engram's row store by a C++
compiler, the CUDA kernels (EXL3, attention, the indexer) by nvcc for this machine's GPU or
for those that SPARK_CUDA_ARCH names.

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
#: Folder of overlay/csrc -> the library built of it.
CUDA = {
    folder: extension(
        f"spark_overlay.{folder.name}._cuda",
        build_cuda.sources(folder),
        build_cuda.headers(folder),
    )
    for folder in (build_cuda.EXL3, build_cuda.ATTENTION, build_cuda.INDEXER)
}


class BuildNative(build_ext):
    """Libraries for ctypes, so not modules: their names have no Python version in them."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name))
        try:
            for folder, library in CUDA.items():
                if ext is library:
                    build_cuda.build(out, files=build_cuda.sources(folder))
            if ext is ENGRAM:
                build.build(out)
        except (build.BuildError, build_cuda.BuildError) as error:
            print(f"warning: {ext.name} is not built: {error}", file=sys.stderr)


setup(ext_modules=[ENGRAM, *CUDA.values()], cmdclass={"build_ext": BuildNative})
