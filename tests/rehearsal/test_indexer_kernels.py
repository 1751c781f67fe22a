"""The indexer's Triton kernels under the interpreter, small shapes, against the torch reference.

The interpreter runs no PTX: the packed e4m3 decode is tried on a GPU only
(tests/gpu/test_indexer_kernels.py), the plain one here. It has one thread, so no race shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.rehearsal

COUNT, BLOCK = 16, 64


@pytest.fixture(autouse=True)
def interpreted(vllm: object) -> None:
    """vLLM's plugin has mended the interpreter."""


def selection(ratio: int = 1, numbers: int = 1 << 16, **changes: int) -> Any:
    from spark_overlay.indexer.kernels.launch import Selection, Tuning

    given = {"keys": 32, "group": 2, "candidate_keys": 32, "block": BLOCK} | changes
    workspace = torch.full((numbers,), 0x7F800001, dtype=torch.int32)  # NaN
    return Selection(ratio, COUNT, workspace, Tuning(**given))


def poisoned(rows: int, count: int) -> torch.Tensor:
    return torch.full((rows, count), 77, dtype=torch.int32)


BATCHES = {
    "decode": [(1, 90), (1, 3), (1, 200)],
    "verify": [(3, 150), (1, 40), (4, 17), (2, 129)],
    "prefill": [(20, 20), (9, 130)],
    "unseen": [(1, 1)],
    "nothing": [],
}


@pytest.mark.parametrize("ratio,states", [(1, 64), (2, 32), (1, 128)])
@pytest.mark.parametrize("batch", BATCHES)
def test_choice(batch: str, ratio: int, states: int) -> None:
    from gpu import indexer_cases as cases

    case = cases.make(
        BATCHES[batch], ratio=ratio, states=states, heads=4, padding=2, gap=36, exact=True
    )
    final = poisoned(case.rows + 2, COUNT)
    selection(ratio)(case.q, case.weights, case.cache, case.step, final)
    assert not cases.wrong(case, final, COUNT, exact=True)
