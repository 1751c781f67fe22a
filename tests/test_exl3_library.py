"""What ctypes passes to the CUDA library is what its header says; a library that cannot serve is an
error that says how to build one. No GPU is needed."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

from pathlib import Path

import pytest
from ctypes_layouts import Header, refuses_to_load

from spark_overlay.exl3.cuda import library, many, plan

API = Header("exl3/api.h", "exl3/many.h")
#: Where ctypes may not use the header's name: ``in`` is a word of Python's.
RENAMED = {"in": "inputs", "out": "outputs"}
STRUCTURES = {
    "exl3_shard": library.Shard,
    "exl3_experts_args": library.Experts,
    "exl3_prefill_args": many.Prefill,
    "exl3_weights": many.Weights,
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_field_lies_where_the_compiler_puts_it(name: str, tmp_path: Path) -> None:
    names = [RENAMED.get(field, field) for field in API.fields(name)]
    API.holds(name, STRUCTURES[name], names, tmp_path)


def test_the_headers_numbers_are_ours() -> None:
    number = API.number
    assert number("EXL3_ABI") == library.ABI
    assert [number(f"EXL3_{n.upper()}") for n in library.CODEBOOKS] == [*library.CODEBOOKS.values()]
    assert (number("EXL3_BF16"), number("EXL3_FP32")) == (library.BF16, library.FP32)
    limits = (plan.MAX_SHARDS, plan.MAX_ROWS, plan.MAX_SLOTS, plan.MAX_WARPS)
    assert tuple(number(f"EXL3_MAX_{n}") for n in ("SHARDS", "ROWS", "SLOTS", "WARPS")) == limits


def test_what_cannot_be_loaded_says_how_to_build_it(tmp_path: Path) -> None:
    refuses_to_load(library, "exl3", "", API, tmp_path)


def test_a_library_without_a_call_says_how_to_build_it(tmp_path: Path) -> None:
    code = "int exl3_abi(void) { return EXL3_ABI; }"
    with pytest.raises(library.Exl3CudaError, match=r"has no exl3_error.*build_cuda\.py"):
        library.Library(API.library(code, tmp_path))


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
    made = library.Library(API.library(code, tmp_path))
    for call in (
        lambda: made.decode(0, 128, 128, 6, 0, 0, 0),
        lambda: made.group_need((library.Shard * 1)(), 1, 8),
        lambda: made.experts_need(library.Experts()),
    ):
        with pytest.raises(error, match=said):
            call()
