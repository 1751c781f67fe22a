"""mHC's CUDA kernel on this CPU (tests/emulated) against float64. Shows where every value goes; a
GPU shows the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import emulation
import pytest
import torch
from gpu import mhc_cases as cases

from spark_overlay.mhc.kernels import launch_cuda, library
from spark_overlay.mhc.plan import PlanError, Slices

pytestmark = pytest.mark.rehearsal
#: As tests/gpu/test_mhc_kernels.py.
BF16, FP32 = 1.9e-3, 4e-5
SHAPES = [Slices(rows, columns) for rows in (8, 16) for columns in (64, 128)]
KINDS = {
    "between, mean": {"mean": True},
    "read": {"write_back": False},
    "first read": {"write_back": False, "pre": False},
    "no norm": {"weight": False},
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    loaded = library.Library(emulation.built("mhc", tmp_path_factory.mktemp("emulated")))
    with emulation.no_gpu() as patch:
        patch.setattr(library, "load", lambda: loaded)
        new_empty = torch.Tensor.new_empty

        def poisoned(self: torch.Tensor, *size: Any, **how: Any) -> torch.Tensor:
            return new_empty(self, *size, **how).fill_(torch.nan)

        patch.setattr(torch.Tensor, "new_empty", poisoned)  # scratch: what is read must be written
        yield ctypes.CDLL(str(loaded.path))


def judged(case: cases.Case, at: Slices) -> dict[str, torch.Tensor]:
    found, right = cases.computed(case, at), cases.oracle(case)
    assert found.keys() == right.keys()
    for name, value in cases.off(found, right).items():
        assert value < (BF16 if found[name].dtype == torch.bfloat16 else FP32), (name, value)
    return found


@pytest.mark.parametrize("at", SHAPES, ids=lambda at: f"{at.rows}x{at.columns}")
@pytest.mark.parametrize("tokens", [1, 3, 8, 19])
def test_every_output_against_float64(emulated: Any, tokens: int, at: Slices) -> None:
    """Groups that are full and such that are not, and one row that threads take in two rounds."""
    judged(cases.draw(tokens, 5248 if tokens == 1 else 256, tokens), at)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_call(emulated: Any, kind: str) -> None:
    for at in (SHAPES[0], SHAPES[3]):
        judged(cases.draw(5, 256, 7, **KINDS[kind]), at)


@pytest.mark.parametrize("at", SHAPES, ids=lambda at: f"{at.rows}x{at.columns}")
def test_the_order_of_threads_is_no_matter_and_counters_are_left_at_zero(
    emulated: Any, at: Slices
) -> None:
    for tokens in (1, 2, 11):
        case = cases.draw(tokens, 384, 3)
        one = judged(case, at)
        emulated.run_backwards(1)
        try:
            other = cases.computed(case, at)
        finally:
            emulated.run_backwards(0)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_rows_behind_the_last_are_not_read(emulated: Any) -> None:
    case = cases.draw(5, 256, 4)
    clean = judged(case, SHAPES[2])
    for name in ("x", "residual", "post", "comb", "pre"):
        value = getattr(case, name)
        larger = torch.full((16, *value.shape[1:]), torch.nan, dtype=value.dtype)
        larger[:5] = value
        setattr(case, name, larger[:5])
    found = cases.computed(case, SHAPES[2])
    assert all(torch.equal(found[name], clean[name]) for name in clean)


def test_a_row_of_nan_spoils_no_other(emulated: Any) -> None:
    case = cases.draw(12, 256, 8)
    clean = cases.computed(case, SHAPES[0])
    case.x[5] = torch.nan
    case.residual[7, 2, 100] = torch.inf
    found = cases.computed(case, SHAPES[0])
    others = [row for row in range(12) if row not in (5, 7)]
    for name in clean:
        assert torch.equal(found[name][others], clean[name][others]), name
        assert not found[name][5].isfinite().all()


def test_one_iteration_and_many(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of logits far apart, too."""
    for iterations in (1, 2, 60):
        monkeypatch.setattr(cases, "NUMBERS", replace(cases.NUMBERS, iterations=iterations))
        case = cases.draw(6, 256, 12)
        case.scale *= 12
        judged(case, SHAPES[1])


def test_what_the_library_does_not_serve_is_not_asked_of_it() -> None:
    at = Slices(8, 128)

    def serves(tokens: int, hidden: int, at: Slices = at, **how: bool) -> bool:
        case = cases.draw(tokens, hidden, **how)
        return launch_cuda.serves(cases.poisoned(case), at)

    assert serves(64, 256)
    assert not serves(65, 256)
    assert not serves(2, 192) and serves(2, 192, Slices(8, 64))
    assert not serves(2, 16384)
    assert not serves(2, 256, write_back=False, own=True)
    case = cases.draw(2, 256)
    case.fn = case.fn.bfloat16()
    assert not launch_cuda.serves(cases.poisoned(case), at)
    with pytest.raises(PlanError, match=r"mHC's CUDA library .*bfloat16 over 4 streams; needed"):
        cases.computed(case, at)
    case = cases.draw(2, 256)
    case.base = torch.empty(25)[1:]
    assert not launch_cuda.serves(cases.poisoned(case), at)


def test_a_geometry_that_leaves_anything_out_is_refused() -> None:
    for at in (Slices(4, 64), Slices(8, 96), Slices(8, 128)):
        with pytest.raises(PlanError, match="mHC geometry"):
            cases.computed(cases.draw(2, 192), at)
