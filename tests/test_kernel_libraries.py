"""What ctypes passes to the indexer's and to mHC's CUDA library is what their headers say. No GPU,
no torch."""

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
#: Name -> its structures, ours by the header's.
STRUCTURES = {
    "indexer": {
        "indexer_step": "StepArgs",
        "indexer_scores_args": "ScoresArgs",
        "indexer_choose_args": "ChooseArgs",
    },
    "mhc": {"mhc_args": "Args"},
}
#: Constants of the header, ours by its.
NUMBERS = {
    "indexer": {
        "ABI": "ABI",
        "HEADS": "HEADS",
        "MOST_ROWS": "MOST_ROWS",
        "MOST_CHOSEN": "MOST_CHOSEN",
        "DIRECT": "DIRECT",
        "MOST_ENTRIES": "MOST_ENTRIES",
    },
    "mhc": {"ABI": "ABI", "ROWS": "ROWS", "SHARE": "SHARE", "MOST_HIDDEN": "MOST_HIDDEN"},
}
ERRORS = {"indexer": "IndexerCudaError", "mhc": "MhcCudaError"}


def header(name: str) -> Path:
    return OVERLAY / "csrc" / name / "api.h"


@pytest.fixture(scope="module", params=sorted(STRUCTURES))
def library(request: pytest.FixtureRequest) -> ModuleType:
    """By its path: its package's other modules are Triton's."""
    name = f"{request.param}_library"
    path = OVERLAY / "spark_overlay" / request.param / "kernels" / "library.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def named(library: ModuleType) -> str:
    return library.__name__.removesuffix("_library")


def compiled(name: str, code: str, out: Path, *flags: str) -> Path:
    tool = shutil.which("g++")
    if tool is None:
        pytest.skip("no g++")
    file = out.with_suffix(".cpp")
    file.write_text(f'#include "{header(name)}"\n#include <cstdio>\n#include <cstddef>\n{code}')
    subprocess.run([tool, str(file), "-o", str(out), *flags], check=True)
    return out


def fields(name: str, structure: str) -> list[str]:
    """A structure's fields, read off the header in their order."""
    text = re.sub(r"/\*.*?\*/", "", header(name).read_text(), flags=re.DOTALL)
    (body,) = re.findall(r"typedef struct \{([^}]*)\} " + structure + ";", text)
    found = []
    for line in body.split(";"):
        names = re.sub(r"^\s*(const\s+)?\w+\s+", "", line.strip())
        found += [re.sub(r"\W", "", one) for one in names.split(",") if one.strip()]
    return found


def test_every_field_lies_where_the_compiler_puts_it(library: ModuleType, tmp_path: Path) -> None:
    name = named(library)
    for structure, ours in STRUCTURES[name].items():
        names = fields(name, structure)
        kinds = getattr(library, ours)
        assert names == [field[0] for field in kinds._fields_]
        prints = "".join(
            f'printf("%zu %zu\\n", offsetof({structure}, {f}), sizeof((({structure}*)0)->{f}));'
            for f in names
        )
        code = f'int main() {{ {prints} printf("%zu\\n", sizeof({structure})); }}'
        program = compiled(name, code, tmp_path / structure)
        said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
        *lines, size = said.splitlines()
        assert int(size) == ctypes.sizeof(kinds)
        for line, (field, kind) in zip(lines, kinds._fields_, strict=True):
            place = getattr(kinds, field).offset, ctypes.sizeof(kind)
            assert place == tuple(map(int, line.split())), (structure, field)


def test_the_headers_numbers_are_ours(library: ModuleType) -> None:
    name = named(library)
    text = header(name).read_text()
    for number, ours in NUMBERS[name].items():
        (found,) = re.findall(rf"define {name.upper()}_{number} (\d+)", text)
        assert int(found) == getattr(library, ours), number


def test_what_cannot_be_loaded_says_how_to_build_it(library: ModuleType, tmp_path: Path) -> None:
    name = named(library)
    error = getattr(library, ERRORS[name])
    file = tmp_path / "_cuda.so"
    with pytest.raises(error, match=rf"missing.*build_cuda\.py --{name}"):
        library.Library(file)
    file.write_bytes(b"no library")
    with pytest.raises(error, match="cannot be loaded"):
        library.Library(file)
    file.unlink()
    code = f'extern "C" int {name}_abi(void) {{ return 99; }}'
    other = compiled(name, code, file, "-shared", "-fPIC")
    with pytest.raises(error, match="has interface 99, expected 1"):
        library.Library(other)


@pytest.mark.parametrize("status", [1, 2])
def test_what_the_library_refuses_is_raised_in_its_words(
    status: int, library: ModuleType, tmp_path: Path
) -> None:
    name = named(library)
    calls = {
        "indexer": "int indexer_scores(const indexer_step *, const indexer_scores_args *, void *)"
        " { return STATUS; } int indexer_choose(const indexer_step *, const indexer_choose_args *,"
        " void *) { return STATUS; }",
        "mhc": "int mhc_one_launch(const mhc_args *, void *) { return STATUS; }",
    }
    code = f"""
        int {name}_abi(void) {{ return {name.upper()}_ABI; }}
        const char *{name}_error(void) {{ return "7 heads of what"; }}
        {calls[name].replace("STATUS", str(status))}
    """
    made = library.Library(compiled(name, code, tmp_path / "_cuda.so", "-shared", "-fPIC"))
    kind = ValueError if status == 1 else getattr(library, ERRORS[name])
    if name == "mhc":
        with pytest.raises(kind, match="7 heads of what"):
            made.one_launch(library.Args(), 0)
        return
    with pytest.raises(kind, match="7 heads of what"):
        made.scores(library.StepArgs(), library.ScoresArgs(), 0)
    with pytest.raises(kind, match="7 heads of what"):
        made.choose(library.StepArgs(), library.ChooseArgs(), 0)
