"""What ctypes passes to the CUDA library is what its header says; a library that cannot serve is an
error that says how to build one. No GPU is needed."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spark_overlay.exl3.cuda import library, many, plan

API = Path(__file__).resolve().parents[1] / "overlay" / "csrc" / "exl3" / "api.h"
MANY = API.with_name("many.h")  # includes the first
#: Where ctypes may not use the header's name: ``in`` is a word of Python's.
RENAMED = {"in": "inputs", "out": "outputs"}
STRUCTURES = {
    "exl3_shard": library.Shard,
    "exl3_experts_args": library.Experts,
    "exl3_prefill_args": many.Prefill,
    "exl3_weights": many.Weights,
}


def compiled(code: str, out: Path, *flags: str) -> Path:
    """A program or library of C++ beside the header; skips without a compiler."""
    tool = shutil.which("g++")
    if tool is None:
        if os.environ.get("SPARK_TEST_DEMAND"):
            pytest.fail("no g++")
        pytest.skip("no g++")
    file = out.with_suffix(".cpp")
    file.write_text(f'#include "{MANY}"\n#include <cstdio>\n#include <cstddef>\n{code}')
    subprocess.run([tool, str(file), "-o", str(out), *flags], check=True)
    return out


def fields(name: str) -> list[str]:
    """A structure's fields, read off the header in their order."""
    text = re.sub(r"/\*.*?\*/", "", API.read_text() + MANY.read_text(), flags=re.DOTALL)
    (body,) = re.findall(r"typedef struct \{([^}]*)\} " + name + ";", text)
    return [re.sub(r".*[ *]", "", line.strip()) for line in body.split(";") if line.strip()]


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_field_lies_where_the_compiler_puts_it(name: str, tmp_path: Path) -> None:
    names, structure = fields(name), STRUCTURES[name]
    assert [RENAMED.get(field, field) for field in names] == [f[0] for f in structure._fields_]
    prints = "".join(
        f'printf("%zu %zu\\n", offsetof({name}, {f}), sizeof((({name}*)0)->{f}));' for f in names
    )
    code = f'int main() {{ {prints} printf("%zu\\n", sizeof({name})); }}'
    program = compiled(code, tmp_path / "layout")
    *lines, size = subprocess.run([program], capture_output=True, text=True).stdout.splitlines()
    assert int(size) == ctypes.sizeof(structure)
    for line, (field, kind, *_) in zip(lines, structure._fields_, strict=True):
        place = getattr(structure, field).offset, ctypes.sizeof(kind)
        assert place == tuple(map(int, line.split())), field


def test_the_headers_numbers_are_ours() -> None:
    text = API.read_text()

    def number(name: str) -> int:
        (found,) = re.findall(rf"\b{name}\s*=?\s*(\d+)", text)
        return int(found)

    assert number("define EXL3_ABI") == library.ABI
    assert [number(f"EXL3_{n.upper()}") for n in library.CODEBOOKS] == [*library.CODEBOOKS.values()]
    assert (number("EXL3_BF16"), number("EXL3_FP32")) == (library.BF16, library.FP32)
    limits = (plan.MAX_SHARDS, plan.MAX_ROWS, plan.MAX_SLOTS, plan.MAX_WARPS)
    assert tuple(number(f"EXL3_MAX_{n}") for n in ("SHARDS", "ROWS", "SLOTS", "WARPS")) == limits


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(library.Exl3CudaError, match=r"_cuda\.so: missing.*build_cuda\.py .*_cuda"):
        library.Library(tmp_path / "_cuda.so")


def test_something_else_is_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "_cuda.so"
    file.write_bytes(b"no library")
    with pytest.raises(library.Exl3CudaError, match=r"cannot be loaded .*build_cuda\.py"):
        library.Library(file)


def test_another_version_is_not_loaded(tmp_path: Path) -> None:
    code = "int exl3_abi(void) { return 99; }"
    file = compiled(code, tmp_path / "_cuda.so", "-shared", "-fPIC")
    with pytest.raises(library.Exl3CudaError, match=f"has interface 99, expected {library.ABI}"):
        library.Library(file)


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [(1, ValueError, "kernels: 7 rows of what"), (2, library.Exl3CudaError, "for another GPU")],
)
def test_what_the_library_refuses_is_raised_in_its_words(
    status: int, error: type[Exception], said: str, tmp_path: Path
) -> None:
    code = f"""
        int exl3_abi(void) {{ return {library.ABI}; }}
        const char *exl3_error(void) {{ return "7 rows of what"; }}
        int exl3_decode(const void *, int32_t, int32_t, int32_t, int32_t, void *, void *) {{
            return {status}; }}
        int exl3_group_need(const exl3_shard *, int32_t, int32_t, int32_t, int64_t *, int64_t *) {{
            return {status}; }}
        int exl3_group(const exl3_shard *, int32_t, int32_t, int32_t, void *, int64_t, int32_t *,
                       int64_t, void *) {{ return {status}; }}
        int exl3_experts_need(const exl3_experts_args *, int64_t *, int64_t *) {{
            return {status}; }}
        int exl3_experts(const exl3_experts_args *, void *, int64_t, int32_t *, int64_t, void *) {{
            return {status}; }}
    """
    made = library.Library(compiled(code, tmp_path / "_cuda.so", "-shared", "-fPIC"))
    for call in (
        lambda: made.decode(0, 128, 128, 6, 0, 0, 0),
        lambda: made.group_need((library.Shard * 1)(), 1, 8),
        lambda: made.experts_need(library.Experts()),
    ):
        with pytest.raises(error, match=said):
            call()
