"""What ctypes passes to the indexer's CUDA library is what its header says. No GPU, no torch."""

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
OVERLAY = ROOT / "overlay"
API = OVERLAY / "csrc" / "indexer" / "api.h"
#: By its path: its package's other modules are Triton's.
MODULE = OVERLAY / "spark_overlay" / "indexer" / "kernels" / "library.py"
STRUCTURES = {
    "indexer_step": "StepArgs",
    "indexer_scores_args": "ScoresArgs",
    "indexer_choose_args": "ChooseArgs",
}
NUMBERS = ("ABI", "HEADS", "MOST_CHOSEN", "DIRECT", "MOST_ENTRIES")


@pytest.fixture(scope="module")
def library() -> ModuleType:
    spec = importlib.util.spec_from_file_location("indexer_library", MODULE)
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


def fields(structure: str) -> list[str]:
    """A structure's fields, read off the header in their order."""
    text = re.sub(r"/\*.*?\*/", "", API.read_text(), flags=re.DOTALL)
    (body,) = re.findall(r"typedef struct \{([^}]*)\} " + structure + ";", text)
    found = []
    for line in body.split(";"):
        names = re.sub(r"^\s*(const\s+)?\w+\s+", "", line.strip())
        found += [re.sub(r"\W", "", one) for one in names.split(",") if one.strip()]
    return found


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_field_lies_where_the_compiler_puts_it(
    structure: str, library: ModuleType, tmp_path: Path
) -> None:
    names = fields(structure)
    kinds = getattr(library, STRUCTURES[structure])
    assert names == [field[0] for field in kinds._fields_]
    prints = "".join(
        f'printf("%zu %zu\\n", offsetof({structure}, {f}), sizeof((({structure}*)0)->{f}));'
        for f in names
    )
    code = f'int main() {{ {prints} printf("%zu\\n", sizeof({structure})); }}'
    program = compiled(code, tmp_path / structure)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    *lines, size = said.splitlines()
    assert int(size) == ctypes.sizeof(kinds)
    for line, (field, kind) in zip(lines, kinds._fields_, strict=True):
        place = getattr(kinds, field).offset, ctypes.sizeof(kind)
        assert place == tuple(map(int, line.split())), field


def test_the_headers_numbers_are_ours(library: ModuleType) -> None:
    for number in NUMBERS:
        (found,) = re.findall(rf"define INDEXER_{number} (\d+)", API.read_text())
        assert int(found) == getattr(library, number), number


def test_what_cannot_be_loaded_says_how_to_build_it(library: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "_cuda.so"
    with pytest.raises(library.IndexerCudaError, match=r"missing.*build_cuda\.py --indexer"):
        library.Library(file)
    file.write_bytes(b"no library")
    with pytest.raises(library.IndexerCudaError, match="cannot be loaded"):
        library.Library(file)
    file.unlink()
    other = compiled('extern "C" int indexer_abi(void) { return 99; }', file, "-shared", "-fPIC")
    with pytest.raises(library.IndexerCudaError, match="has interface 99, expected 1"):
        library.Library(other)


@pytest.mark.parametrize(("status", "kind"), [(1, "ValueError"), (2, "IndexerCudaError")])
def test_what_the_library_refuses_is_raised_in_its_words(
    status: int, kind: str, library: ModuleType, tmp_path: Path
) -> None:
    step = "const indexer_step *"
    code = f"""
        int indexer_abi(void) {{ return INDEXER_ABI; }}
        const char *indexer_error(void) {{ return "7 heads of what"; }}
        int indexer_scores({step}, const indexer_scores_args *, void *) {{ return {status}; }}
        int indexer_choose({step}, const indexer_choose_args *, void *) {{ return {status}; }}
    """
    made = library.Library(compiled(code, tmp_path / "_cuda.so", "-shared", "-fPIC"))
    error = getattr(library, kind, ValueError)
    with pytest.raises(error, match="7 heads of what"):
        made.scores(library.StepArgs(), library.ScoresArgs(), 0)
    with pytest.raises(error, match="7 heads of what"):
        made.choose(library.StepArgs(), library.ChooseArgs(), 0)
