"""What ctypes passes to attention's CUDA library is what its header says. No GPU, no torch."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "overlay" / "csrc" / "attention" / "api.h"
#: By its path: its package's other modules are Triton's.
MODULE = ROOT / "overlay" / "spark_overlay" / "attention" / "kernels" / "library.py"


@pytest.fixture(scope="module")
def library() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_library", MODULE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compiled(code: str, out: Path, *flags: str) -> Path:
    tool = shutil.which("g++")
    if tool is None:
        pytest.skip("no g++")
    file = out.with_suffix(".cpp")
    file.write_text(f'#include "{API}"\n#include <cstdio>\n#include <cstddef>\n{code}')
    subprocess.run([tool, str(file), "-o", str(out), *flags], check=True)
    return out


def fields(name: str) -> list[str]:
    """A structure's fields, read off the header in their order."""
    text = re.sub(r"/\*.*?\*/", "", API.read_text(), flags=re.DOTALL)
    (body,) = re.findall(r"typedef struct \{([^}]*)\} " + name + ";", text)
    found = []
    for line in body.split(";"):
        names = re.sub(r"^\s*(const\s+)?\w+\s+", "", line.strip())
        found += [re.sub(r"\W|\[.*", "", one) for one in names.split(",") if one.strip()]
    return [re.sub(r"^source2$", "source", one) for one in found]


@pytest.mark.parametrize("name", ["attention_source", "attention_args"])
def test_every_field_lies_where_the_compiler_puts_it(
    name: str, library: ModuleType, tmp_path: Path
) -> None:
    names = fields(name)
    structure = library.SourceArgs if name == "attention_source" else library.Args
    assert names == [field[0] for field in structure._fields_]
    prints = "".join(
        f'printf("%zu %zu\\n", offsetof({name}, {f}), sizeof((({name}*)0)->{f}));' for f in names
    )
    program = compiled(
        f'int main() {{ {prints} printf("%zu\\n", sizeof({name})); }}', tmp_path / "layout"
    )
    *lines, size = subprocess.run([program], capture_output=True, text=True).stdout.splitlines()
    assert int(size) == ctypes.sizeof(structure)
    for line, (field, kind) in zip(lines, structure._fields_, strict=True):
        place = getattr(structure, field).offset, ctypes.sizeof(kind)
        assert place == tuple(map(int, line.split())), field


def test_the_headers_numbers_are_ours(library: ModuleType) -> None:
    text = API.read_text()
    for name, ours in (("ABI", library.ABI), ("MAX_SPLITS", library.MAX_SPLITS)):
        assert re.findall(rf"define ATTENTION_{name} (\d+)", text) == [str(ours)]


def test_what_cannot_be_loaded_says_how_to_build_it(library: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "_cuda.so"
    with pytest.raises(library.AttentionCudaError, match=r"missing.*build_cuda\.py --attention"):
        library.Library(file)
    file.write_bytes(b"no library")
    with pytest.raises(library.AttentionCudaError, match="cannot be loaded"):
        library.Library(file)
    file.unlink()
    other = compiled('extern "C" int attention_abi(void) { return 99; }', file, "-shared", "-fPIC")
    said = f"has interface 99, expected {library.ABI}"
    with pytest.raises(library.AttentionCudaError, match=said):
        library.Library(other)


@pytest.mark.parametrize(("status", "kind"), [(1, "ValueError"), (2, "AttentionCudaError")])
def test_what_the_library_refuses_is_raised_in_its_words(
    status: int, kind: str, library: ModuleType, tmp_path: Path
) -> None:
    code = f"""
        int attention_abi(void) {{ return ATTENTION_ABI; }}
        const char *attention_error(void) {{ return "7 heads of what"; }}
        int attention_shared(int, int, int) {{ return 7; }}
        int attention_sparse(const attention_args *, void *) {{ return {status}; }}
    """
    made = library.Library(compiled(code, tmp_path / "_cuda.so", "-shared", "-fPIC"))
    assert made.shared_bytes(32, 32, False) == 7
    with pytest.raises(getattr(library, kind, ValueError), match="7 heads of what"):
        made.sparse(library.Args(), 0)
