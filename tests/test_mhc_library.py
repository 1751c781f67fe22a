"""What ctypes passes to mHC's CUDA library is what its header says. No GPU, no torch."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

from pathlib import Path

import pytest
from ctypes_layouts import Header, by_path, refuses_to_load

API = Header("mhc/api.h")
library = by_path("mhc/kernels/library.py")


def test_every_field_lies_where_the_compiler_puts_it(tmp_path: Path) -> None:
    API.holds("mhc_args", library.Args, API.fields("mhc_args"), tmp_path)


@pytest.mark.parametrize("name", ["ABI", "MOST_TOKENS", "MOST_HIDDEN"])
def test_the_headers_numbers_are_ours(name: str) -> None:
    assert API.number(f"MHC_{name}") == getattr(library, name)


def test_what_cannot_be_loaded_says_how_to_build_it(tmp_path: Path) -> None:
    refuses_to_load(library, "mhc", "--mhc", API, tmp_path)


def test_a_library_that_is_named_and_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None at all is said so; a slip is not taken for it."""
    here = tmp_path / "here.so"
    here.touch()
    for named, found in ((str(here), True), ("none", False)):
        monkeypatch.setenv(library.OVERRIDE, named)
        library.present.cache_clear()
        assert library.present() is found
    monkeypatch.setenv(library.OVERRIDE, str(tmp_path / "slip.so"))
    library.present.cache_clear()
    with pytest.raises(library.MhcCudaError, match=r"SPARK_MHC_LIBRARY=.*slip\.so.*or none"):
        library.present()
    library.present.cache_clear()


@pytest.mark.parametrize(("status", "kind"), [(1, ValueError), (2, library.MhcCudaError)])
def test_what_the_library_refuses_is_raised_in_its_words(
    status: int, kind: type[Exception], tmp_path: Path
) -> None:
    code = f"""
        int mhc_abi(void) {{ return MHC_ABI; }}
        const char *mhc_error(void) {{ return "7 rows of what"; }}
        int mhc_one_launch(const mhc_args *, void *) {{ return {status}; }}
    """
    made = library.Library(API.library(code, tmp_path))
    with pytest.raises(kind, match=r"mHC kernels.*7 rows of what"):
        made.one_launch(library.Args(), 0)
