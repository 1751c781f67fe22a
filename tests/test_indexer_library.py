"""What ctypes passes to the indexer's CUDA library is what its header says. No GPU, no torch."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

from pathlib import Path

import pytest
from ctypes_layouts import Header, by_path, refuses_to_load

API = Header("indexer/api.h")
library = by_path("indexer/kernels/library.py")
STRUCTURES = {
    "indexer_step": library.StepArgs,
    "indexer_scores_args": library.ScoresArgs,
    "indexer_choose_args": library.ChooseArgs,
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_field_lies_where_the_compiler_puts_it(name: str, tmp_path: Path) -> None:
    API.holds(name, STRUCTURES[name], API.fields(name), tmp_path)


@pytest.mark.parametrize(
    "name", ["ABI", "HEADS", "MOST_ROWS", "MOST_CHOSEN", "DIRECT", "MOST_ENTRIES"]
)
def test_the_headers_numbers_are_ours(name: str) -> None:
    assert API.number(f"INDEXER_{name}") == getattr(library, name)


def test_what_cannot_be_loaded_says_how_to_build_it(tmp_path: Path) -> None:
    refuses_to_load(library, "indexer", "--indexer", API, tmp_path)


@pytest.mark.parametrize(("status", "kind"), [(1, ValueError), (2, library.IndexerCudaError)])
def test_what_the_library_refuses_is_raised_in_its_words(
    status: int, kind: type[Exception], tmp_path: Path
) -> None:
    step = "const indexer_step *"
    code = f"""
        int indexer_abi(void) {{ return INDEXER_ABI; }}
        const char *indexer_error(void) {{ return "7 heads of what"; }}
        int indexer_scores({step}, const indexer_scores_args *, void *) {{ return {status}; }}
        int indexer_choose({step}, const indexer_choose_args *, void *) {{ return {status}; }}
    """
    made = library.Library(API.library(code, tmp_path))
    with pytest.raises(kind, match=r"indexer kernels.*7 heads of what"):
        made.scores(library.StepArgs(), library.ScoresArgs(), 0)
    with pytest.raises(kind, match="7 heads of what"):
        made.choose(library.StepArgs(), library.ChooseArgs(), 0)
