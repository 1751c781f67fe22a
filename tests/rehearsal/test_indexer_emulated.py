"""The indexer's CUDA kernels on this CPU (tests/emulated). Shows where every value goes; a GPU
shows the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import emulation
import pytest
import torch
from gpu import indexer_cases

from spark_overlay.indexer.kernels import launch_cuda, library
from spark_overlay.indexer.kernels.launch import Candidates, Selection

pytestmark = pytest.mark.rehearsal
COUNT, BLOCKS, SIZE = 512, 2048, 8


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    loaded = library.Library(emulation.built("indexer", tmp_path_factory.mktemp("emulated")))
    with emulation.no_gpu() as patch:
        patch.setattr(library, "load", lambda: loaded)
        patch.setattr(launch_cuda, "serves", lambda *_: True)
        yield None


def choice(case: indexer_cases.Case, candidates: Candidates | None = None) -> torch.Tensor:
    workspace = torch.full((1 << 20,), 0x7FC00000, dtype=torch.int32)
    final = torch.full((len(case.visible), COUNT), 99, dtype=torch.int32)
    layer = Selection(case.ratio, COUNT, workspace)
    layer(case.q, case.weights, case.cache, case.step, final, candidates)
    return final


@pytest.mark.parametrize(
    ("requests", "how"),
    [
        ([(1, 900), (1, 700)], {"padding": 1}),
        ([(1, 1500)], {"exact": True}),
        ([(1, 900), (1, 50), (1, 800)], {"padding": 2, "gap": 144}),
        ([(1, 2900)], {"ratio": 2, "states": 32, "exact": True}),
        ([(1, 16600)], {}),
        ([(1, 16501)], {"exact": True, "below": True}),
    ],
)
def test_what_the_indexer_chooses(
    emulate: Any, requests: list[tuple[int, int]], how: dict[str, Any]
) -> None:
    """Requests of a row each, pages of 64 and 32, ties by the hundred, scores below zero, and
    contexts of which blocks are chosen first."""
    how = dict(how)
    below = how.pop("below", False)
    case = indexer_cases.make(requests, seed=len(requests), **how)
    if below:
        case.weights.abs_().neg_()
    exact = how.get("exact", False)
    assert not indexer_cases.wrong(case, choice(case), COUNT, exact=exact)


@pytest.mark.parametrize("exact", [True, False])
def test_candidate_blocks_and_what_is_chosen_of_them(emulate: Any, exact: bool) -> None:
    case = indexer_cases.make([(1, 16600)], exact=exact, seed=5)
    chosen = torch.full((len(case.visible), BLOCKS), 99, dtype=torch.int32)
    candidates = Candidates(chosen, SIZE, True)
    assert not indexer_cases.wrong(case, choice(case, candidates), COUNT, exact=exact)
    blocks = (BLOCKS, SIZE)
    assert not indexer_cases.wrong(case, chosen, BLOCKS, exact=exact, blocks=blocks)
    case.q = case.q.flip(1).contiguous()
    final = choice(case, replace(candidates, write=False))
    assert not indexer_cases.wrong(case, final, COUNT, exact=exact, limit=(chosen, SIZE))


def test_equal_scores(emulate: Any) -> None:
    """Every score is a zero: the first positions are chosen."""
    case = indexer_cases.make([(1, 16400)], exact=True)
    case.weights.zero_()
    assert torch.equal(choice(case), torch.arange(COUNT, dtype=torch.int32)[None])


def test_several_rows_of_a_request_are_scored_by_triton() -> None:
    """Where the library's scores are the slower ones, as an H200 has them; it still chooses."""
    step = indexer_cases.make([(3, 900)]).step
    assert not launch_cuda.scores_too(step, limited=False)
    assert launch_cuda.scores_too(step, limited=True)
    assert launch_cuda.scores_too(replace(step, longest=1), limited=False)
    assert not launch_cuda.scores_too(replace(step, longest=2048), limited=True)
