"""Two ways of attention on one input: what is wrong is found, what is faster is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]


@pytest.fixture(scope="module")
def case() -> Any:
    from spark_overlay.attention import contest

    return contest.case(torch.device("cpu"), 2, heads=8, width=64)


def test_our_kernel_is_right_on_it(case: Any) -> None:
    from spark_overlay.attention import contest

    assert contest.fault("portable", case) == ""


def test_lengths_of_the_case_differ_and_nothing_lies_beyond_them(case: Any) -> None:
    for source in (case.window, case.chosen):
        for row, length in zip(source.slots, source.lengths.tolist(), strict=True):
            assert length > 0 and (row[:length] >= 0).all() and (row[length:] == -1).all()


@pytest.mark.parametrize("what", ["nan", "halved", "one head", "raises"])
def test_what_computes_wrongly_is_told(case: Any, what: str) -> None:
    from spark_overlay.attention import contest

    def wrong(given: Any, out: Tensor) -> None:
        if what == "raises":
            raise RuntimeError("no kernel image")
        out.copy_(contest.right(given))
        if what == "nan":
            out[1, 3, 7] = torch.nan
        elif what == "halved":
            out.mul_(0.5)
        else:
            out[:, 5] = out[:, 4]

    found = contest.fault("stock", case, wrong)
    assert ("no kernel image" if what == "raises" else "differs from the reference") in found


def test_rounding_to_e4m3_is_no_fault_of_vllms(case: Any) -> None:
    from spark_overlay.attention import contest

    def rounded(given: Any, out: Tensor) -> None:
        out.copy_(contest.right(given).to(torch.float8_e4m3fn).float())

    assert contest.fault("stock", case, rounded) == ""
    assert "at most 0.01" in contest.fault("portable", case, rounded)


def test_ours_is_taken_where_it_is_plainly_faster_overall() -> None:
    from spark_overlay.attention.contest import pick

    theirs = {1: 20e-6, 512: 300e-6}
    assert pick({"portable": {1: 10e-6, 512: 390e-6}, "stock": theirs}) == "portable"
    assert pick({"portable": {1: 19.9e-6, 512: 299e-6}, "stock": theirs}) == "stock"
    assert pick({"portable": {1: 15e-6, 512: 600e-6}, "stock": theirs}) == "stock"
