"""What a library's ctypes module is held against: structures and numbers of its C header, and
stand-ins of the library made by g++. No GPU, no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import gxx
import pytest

OVERLAY = Path(__file__).resolve().parents[1] / "overlay"
CSRC = OVERLAY / "csrc"


def by_path(file: str) -> ModuleType:
    """A module of the overlay whose package's other modules are Triton's."""
    spec = importlib.util.spec_from_file_location(
        file.replace("/", "_").removesuffix(".py"), OVERLAY / "spark_overlay" / file
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Header:
    """A C interface: ``files`` of overlay/csrc, of which the last includes the others."""

    def __init__(self, *files: str) -> None:
        self.path = CSRC / files[-1]
        self.text = "".join((CSRC / file).read_text() for file in files)

    def compiled(self, code: str, out: Path, *flags: str) -> Path:
        """``code`` behind the header, as a program or, with ``flags``, a library."""
        file = out.with_suffix(".cpp")
        includes = f'#include "{self.path}"\n#include <cstdio>\n#include <cstddef>\n'
        file.write_text(includes + code)
        return gxx.compiled(file, out, flags)

    def library(self, code: str, folder: Path) -> Path:
        return self.compiled(code, folder / "_cuda.so", "-shared", "-fPIC")

    def number(self, name: str) -> int:
        """Of a ``#define`` or an enumeration."""
        (found,) = re.findall(rf"\b{name}\s*=?\s*(\d+)", self.text)
        return int(found)

    def fields(self, structure: str) -> list[str]:
        """A structure's fields in their order."""
        text = re.sub(r"/\*.*?\*/", "", self.text, flags=re.DOTALL)
        (body,) = re.findall(r"typedef struct \{([^}]*)\} " + structure + ";", text)
        found: list[str] = []
        for line in body.split(";"):
            names = re.sub(r"^\s*(const\s+)?\w+\s+", "", line.strip())
            names = re.sub(r"\[[^\]]*\]", "", names)
            found += [re.sub(r"\W", "", one) for one in names.split(",") if one.strip()]
        return found

    def holds(self, name: str, structure: Any, names: Sequence[str], folder: Path) -> None:
        """Every field of ctypes' ``structure`` lies where the compiler puts it; ``names``: what
        ctypes calls them."""
        fields = self.fields(name)
        assert list(names) == [field[0] for field in structure._fields_]
        prints = "".join(
            f'printf("%zu %zu\\n", offsetof({name}, {f}), sizeof((({name}*)0)->{f}));'
            for f in fields
        )
        code = f'int main() {{ {prints} printf("%zu\\n", sizeof({name})); }}'
        program = self.compiled(code, folder / name)
        said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
        *lines, size = said.splitlines()
        assert int(size) == ctypes.sizeof(structure)
        for line, (field, kind, *_) in zip(lines, structure._fields_, strict=True):
            place = getattr(structure, field).offset, ctypes.sizeof(kind)
            assert place == tuple(map(int, line.split())), field


def refuses_to_load(module: Any, prefix: str, build: str, header: Header, folder: Path) -> None:
    """What is missing, no library or of another version is the package's error, which says how to
    build one."""
    file, error = folder / "_cuda.so", module.Library.error
    with pytest.raises(error, match=rf"_cuda\.so: missing.*build_cuda\.py {build}.*_cuda"):
        module.Library(file)
    file.write_bytes(b"no library")
    with pytest.raises(error, match=r"cannot be loaded .*build_cuda\.py"):
        module.Library(file)
    file.unlink()
    header.library(f'extern "C" int {prefix}_abi(void) {{ return 99; }}', folder)
    with pytest.raises(error, match=f"has interface 99, expected {module.ABI}"):
        module.Library(file)
