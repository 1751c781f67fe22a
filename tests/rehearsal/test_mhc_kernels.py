"""mHC's Triton kernels under the interpreter, against float64: small shapes, every kind of call."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from spark_overlay.mhc import glue, plan
from spark_overlay.mhc.kernels import launch, ops
from spark_overlay.mhc.kernels.work import counters_of
from spark_overlay.mhc.plan import OneLaunch, PlanError, TwoLaunches

pytestmark = pytest.mark.rehearsal
#: Relative RMS error: a value rounded to bf16 is 1.7e-3 off by that alone.
BF16, FP32 = 1.9e-3, 4e-5
ONE, TWO = OneLaunch(4, 24, 2, 32, 4), TwoLaunches(16, 2, 32, 4, 2)
KINDS = {
    "between, mean": {"mean": True},
    "read": {"write_back": False},
    "first": {"write_back": False, "own": True, "pre": False},
    "no norm": {"weight": False},
}


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    """The GPU tests' inputs and oracle; under the interpreter, mended."""
    from spark_overlay.cpu.interpreter import mend, require_interpreter

    require_interpreter()
    mend()
    path = Path(__file__).resolve().parents[1] / "gpu" / "mhc_cases.py"
    spec = importlib.util.spec_from_file_location("mhc_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mhc_cases"] = module
    spec.loader.exec_module(module)
    return module


def judge(cases: ModuleType, found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, value in cases.off(found, right).items():
        assert value < (BF16 if found[name].dtype == torch.bfloat16 else FP32), (name, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("geometry", [ONE, TWO], ids=["one", "two"])
def test_every_output(cases: ModuleType, geometry: OneLaunch | TwoLaunches, kind: str) -> None:
    """Five rows: a group that is not full."""
    case = cases.draw(5, 128, 3, **KINDS[kind])
    judge(cases, cases.computed(case, geometry), cases.oracle(case))


@pytest.mark.parametrize("rows", [0, 9])
def test_the_plans_own_choice(cases: ModuleType, rows: int) -> None:
    case = cases.draw(rows, 96, rows)
    judge(cases, cases.computed(case), cases.oracle(case))


def test_tiles_of_the_weight_and_three_limbs(cases: ModuleType) -> None:
    """vLLM's own split (here of fewer slices), and a weight as exact as float32 holds it."""
    case = cases.draw(3, 64, 4)
    right = cases.oracle(case)
    tiled = OneLaunch(rows=16, tile_n=6, splits=2, block=32, warps=4)
    judge(cases, cases.computed(case, tiled), right)
    exact = cases.computed(case, OneLaunch(4, 24, 1, 64, 4, limbs=3))
    assert all(value < 4e-7 for name, value in cases.off(exact, right).items() if name != "input")


def test_a_bf16_weight_is_taken_as_it_is(cases: ModuleType) -> None:
    case = cases.draw(4, 128, 6)
    case.fn = case.fn.bfloat16()
    found = [cases.computed(case, geometry) for geometry in (ONE, TWO)]
    case.fn = case.fn.float()
    for one in found:
        judge(cases, one, cases.oracle(case))


def test_counters_are_zero_again(cases: ModuleType) -> None:
    work = cases.poisoned(cases.draw(5, 64, 1))
    counters = counters_of(work, 2)
    for _ in range(2):
        launch.run(work, cases.NUMBERS, OneLaunch(4, 24, 1, 64, 4))
        assert counters.tolist() == [0] * len(counters)


def test_names_and_shapes_are_vllms(cases: ModuleType) -> None:
    """The CPU's glue, which the engine's rehearsal holds against vLLM, gives the same."""
    case = cases.draw(3, 128, 2)
    n = cases.NUMBERS
    numbers = (n.rms_eps, n.pre_eps, n.sinkhorn_eps, n.post_gain, n.iterations)
    mixes = (case.post, case.comb, case.fn, case.scale, case.base, *numbers)
    given = (case.x, case.residual, *mixes, case.pre, case.weight, n.norm_eps)
    for aux in (False, True):
        ours = ops.fused_post_pre_delayed(*given, aux)
        right = glue.fused_post_pre_delayed(*given, aux)
        for mine, theirs in zip(ours, right, strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert torch.allclose(mine.float(), theirs.float(), rtol=1e-2, atol=1e-5)
    written = ops.post(case.x, case.residual, case.post, case.comb)
    assert torch.equal(written, glue.post(case.x, case.residual, case.post, case.comb))
    first = cases.draw(3, 128, 2, write_back=False, own=True, pre=False)
    read = (first.residual, first.fn, first.scale, first.base, *numbers, None, first.x)
    for mine, theirs in zip(ops.pre_delayed(*read), glue.pre_delayed(*read), strict=True):
        assert mine.shape == theirs.shape and torch.allclose(mine.float(), theirs.float(), 1e-2)


def test_what_the_kernels_do_not_compute_is_refused(cases: ModuleType) -> None:
    case = cases.draw(2, 128)
    wrong = {
        "fn": (case.fn[:, :64].contiguous(), "fn is"),
        "residual": (case.residual.float(), "residual is"),
        "comb": (case.comb.transpose(1, 2), "comb is"),
        "weight": (case.weight.float(), "norm_weight is"),
    }
    for name, (value, said) in wrong.items():
        other = cases.Case(**{**vars(case), name: value})
        with pytest.raises(PlanError, match=said):
            cases.computed(other, ONE)
    for geometry in (
        OneLaunch(4, 24, 3, 32, 4),
        OneLaunch(4, 7, 2, 32, 4),
        TwoLaunches(8, 2, 32, 4, 1),
    ):
        with pytest.raises(PlanError, match="mHC geometry"):
            cases.computed(case, geometry)
    with pytest.raises(PlanError, match="no multiple of 16"):
        plan.one_launch(1, 5 * 8)
