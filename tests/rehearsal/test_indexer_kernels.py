"""The indexer's Triton kernels under the interpreter, small shapes, against the torch reference.

The interpreter runs no PTX: the packed e4m3 decode is tried on a GPU only
(tests/gpu/test_indexer_kernels.py), the plain one here. It has one thread, so no race shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import indexer_cases as cases
from torch import Tensor

pytestmark = pytest.mark.rehearsal

COUNT, LAST, HEADS = 16, 32, 4
BLOCKS, SIZE = 8, 4
BATCHES = {
    "decode": [(1, 90), (1, 3), (1, 200)],
    "verify": [(3, 150), (1, 40), (4, 17), (2, 129)],
    "prefill": [(10, 10), (5, 80)],
    "unseen": [(1, 1)],
    "nothing": [],
}


@pytest.fixture(autouse=True)
def interpreted(vllm: object) -> None:
    """vLLM's plugin has mended the interpreter."""


def choose(case: Any, candidates: Any = None, numbers: int = 1 << 15, **changes: int) -> Tensor:
    """A poisoned workspace and a poisoned choice, filled."""
    from spark_overlay.indexer.kernels.launch import Selection
    from spark_overlay.indexer.kernels.sizes import Tuning

    given = {
        "keys": 32,
        "group": 2,
        "candidate_keys": 32,
        "fan": 2,
        "last": LAST,
        "choice_warps": 4,
    } | changes
    workspace = torch.full((numbers,), 0x7FC00000, dtype=torch.int32)
    layer = Selection(case.ratio, COUNT, workspace, Tuning(**given))
    final = torch.full((len(case.visible), COUNT), 77, dtype=torch.int32)
    layer(case.q, case.weights, case.cache, case.step, final, candidates)
    return final


@pytest.mark.parametrize("ratio,states", [(1, 64), (2, 32), (1, 128)])
@pytest.mark.parametrize("batch", BATCHES)
def test_choice(batch: str, ratio: int, states: int) -> None:
    """The reference's choice, place by place, where scores tie."""
    case = cases.make(
        BATCHES[batch], ratio=ratio, states=states, heads=HEADS, padding=2, gap=36, exact=True
    )
    assert not cases.wrong(case, choose(case), COUNT, exact=True)


@pytest.mark.parametrize("batch", ["decode", "verify"])
def test_random_keys_in_a_workspace_of_few_rows(batch: str) -> None:
    case = cases.make(BATCHES[batch], heads=HEADS, padding=2, seed=3)
    final = choose(case, numbers=40000, group=4)
    assert not cases.wrong(case, final, COUNT, exact=False)
    with pytest.raises(ValueError, match="workspace"):
        choose(case, numbers=100)


@pytest.mark.parametrize("batch", ["decode", "verify"])
def test_candidates(batch: str) -> None:
    """The source writes its blocks and is not bound by them; other layers are."""
    from spark_overlay.indexer.kernels.launch import Candidates

    case = cases.make(BATCHES[batch], heads=HEADS, padding=2, exact=True, seed=4)
    chosen = torch.full((len(case.visible), BLOCKS), 77, dtype=torch.int32)
    final = choose(case, Candidates(chosen, SIZE, write=True))
    assert not cases.wrong(case, final, COUNT, exact=True)
    assert not cases.wrong(case, chosen, BLOCKS, exact=True, blocks=(BLOCKS, SIZE))
    case.q = case.q.flip(0).contiguous()
    final = choose(case, Candidates(chosen, SIZE, write=False))
    assert not cases.wrong(case, final, COUNT, exact=True, limit=(chosen, SIZE))


def test_a_bound_that_no_row_reaches() -> None:
    """A graph's bound is the longest the model allows: rounds that no row needs change nothing."""
    case = cases.make(BATCHES["verify"], heads=HEADS, exact=True, bound=1500)
    case.step = replace(
        case.step, table=torch.nn.functional.pad(case.step.table, (0, 80), value=-1)
    )
    assert not cases.wrong(case, choose(case), COUNT, exact=True)


def test_everything_is_chosen_where_little_is_seen() -> None:
    case = cases.make([(3, COUNT), (1, 2)], heads=HEADS, padding=1)
    case.cache.fill_(0xFF)
    column = torch.arange(COUNT)
    seen = torch.where(column < case.visible[:, None], column, -1)
    assert torch.equal(choose(case).long(), seen)


def test_what_the_kernels_cannot_read_is_refused() -> None:
    case = cases.make([(1, 90)], heads=HEADS)
    for name, other in (
        ("q", case.q[..., :64]),
        ("weights", case.weights.double()),
        ("cache", case.cache[..., :131]),
    ):
        with pytest.raises(ValueError, match="must"):
            choose(replace(case, **{name: other}))


def test_the_workspace_holds_all_rows_or_what_is_allowed() -> None:
    from spark_overlay.indexer.kernels.sizes import Tuning, plan, workspace_numbers

    each = plan(1 << 20, 8)
    assert (each.width, each.tops, each.lists) == (1 << 20, 1 << 17, 4096)
    assert workspace_numbers(4, 1 << 20, 2048, 8, 1 << 26, Tuning()) == 4 * each.numbers
    assert workspace_numbers(400, 1 << 20, 2048, 8, 1 << 26, Tuning()) == 1 << 26
    assert workspace_numbers(4, 1 << 20, 2048, 8, 1000, Tuning()) == each.numbers


def test_the_steps_of_a_choice_hold_all_blocks() -> None:
    from spark_overlay.indexer.kernels.sizes import Steps, steps_of

    assert steps_of(1000, 512, 16, 8192) == Steps(2048, 0, 0, 512)
    assert steps_of(8192, 512, 16, 8192) == Steps(8192, 0, 0, 512)
    assert steps_of(8193, 512, 16, 8192) == Steps(8192, 1024, 0, 512)
    assert steps_of(1 << 17, 512, 16, 8192) == Steps(8192, 8192, 0, 512)
    assert steps_of(600_000, 512, 8, 8192) == Steps(8192, 8192, 16384, 1024)
    assert steps_of(1 << 20, 512, 16, 8192) == Steps(8192, 8192, 4096, 512)
    assert steps_of(1 << 17, 2048, 8, 16384) == Steps(16384, 16384, 0, 2048)
    with pytest.raises(ValueError, match="shorter"):
        steps_of(1 << 23, 512, 16, 8192)
