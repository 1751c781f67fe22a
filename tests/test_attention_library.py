"""What ctypes passes to attention's CUDA library is what its header says. No GPU, no torch."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

from pathlib import Path

import pytest
from ctypes_layouts import Header, by_path, refuses_to_load

API = Header("attention/api.h")
library = by_path("attention/kernels/library.py")


@pytest.mark.parametrize("name", ["attention_source", "attention_args"])
def test_every_field_lies_where_the_compiler_puts_it(name: str, tmp_path: Path) -> None:
    structure = library.SourceArgs if name == "attention_source" else library.Args
    API.holds(name, structure, API.fields(name), tmp_path)


def test_the_headers_numbers_are_ours() -> None:
    assert API.number("ATTENTION_ABI") == library.ABI
    assert API.number("ATTENTION_MAX_SPLITS") == library.MAX_SPLITS


def test_what_cannot_be_loaded_says_how_to_build_it(tmp_path: Path) -> None:
    refuses_to_load(library, "attention", "--attention", API, tmp_path)


@pytest.mark.parametrize(("status", "kind"), [(1, ValueError), (2, library.AttentionCudaError)])
def test_what_the_library_refuses_is_raised_in_its_words(
    status: int, kind: type[Exception], tmp_path: Path
) -> None:
    code = f"""
        int attention_abi(void) {{ return ATTENTION_ABI; }}
        const char *attention_error(void) {{ return "7 heads of what"; }}
        int attention_shared(int, int, int) {{ return 7; }}
        int attention_sparse(const attention_args *, void *) {{ return {status}; }}
    """
    made = library.Library(API.library(code, tmp_path))
    assert made.shared_bytes(32, 32, False) == 7
    with pytest.raises(kind, match=r"attention kernels.*7 heads of what"):
        made.sparse(library.Args(), 0)
