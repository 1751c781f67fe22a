"""Builds spark_overlay/engram/_native.so beside what pyproject.toml says.

Without a compiler the overlay installs all the same; serving from files then says what is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "csrc"))

import build  # noqa: E402

NATIVE = Extension(
    "spark_overlay.engram._native",
    [str(path.relative_to(HERE)) for path in build.sources()],
    depends=[str(path.relative_to(HERE)) for path in sorted(build.ENGRAM.glob("*.h*"))],
    optional=True,
)


class BuildNative(build_ext):
    """A library for ctypes, so not a module: its name has no Python version in it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            build.build(Path(self.get_ext_fullpath(ext.name)))
        except build.BuildError as error:
            print(f"warning: Engram's native reads are not built: {error}", file=sys.stderr)


setup(ext_modules=[NATIVE], cmdclass={"build_ext": BuildNative})
