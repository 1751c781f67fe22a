"""mHC's kernels on a GPU against float64: torch and Triton only, and the CUDA library where
SPARK_MHC_LIBRARY names one (=none: Triton's alone).

python3 -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_mhc_kernels.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from gpu import mhc_cases as cases  # noqa: E402  (after torch is known to be there)
from spark_overlay.mhc import plan  # noqa: E402
from spark_overlay.mhc.kernels import launch, library, ops  # noqa: E402
from spark_overlay.mhc.plan import Geometry, OneLaunch, PlanError, Slices, TwoLaunches  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HIDDEN = 5120
#: Relative, against float64: a value rounded to bf16 is 1.7e-3 from it by that alone.
BF16, FP32 = 1.9e-3, 4e-5
ROWS = (0, 1, 4, 6, 12, 16, 17, 32, 33, 64, 256, 2048)
KINDS = {
    "between": {},
    "between, mean": {"mean": True},
    "read": {"write_back": False},
    "first": {"write_back": False, "own": True, "pre": False},
    "no norm": {"weight": False},
}


def judge(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, value in cases.off(found, right).items():
        assert value < (BF16 if found[name].dtype == torch.bfloat16 else FP32), (name, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_output_against_float64(rows: int, kind: str) -> None:
    case = cases.draw(rows, HIDDEN, rows, **KINDS[kind])
    judge(cases.computed(case.to("cuda")), cases.oracle(case))


@pytest.mark.parametrize("hidden", [64, 1024, 1536, 4096, 7168])
@pytest.mark.parametrize("rows", [3, 70])
def test_other_widths(rows: int, hidden: int) -> None:
    case = cases.draw(rows, hidden, hidden)
    judge(cases.computed(case.to("cuda")), cases.oracle(case))


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("tokens", [1, 5, 16, 41, 64])
def test_every_shape_of_the_librarys(tokens: int, rows: int, columns: int) -> None:
    if not library.present():
        pytest.skip("the library's kernel, and there is no library")
    at = Slices(rows, columns)
    for hidden, kind in ((HIDDEN, {"mean": True}), (640, {"write_back": False}), (128, {})):
        case = cases.draw(tokens, hidden, tokens, **kind)
        on, right = case.to("cuda"), cases.oracle(case)
        first = cases.computed(on, at)
        judge(first, right)
        for _ in range(20):
            again = cases.computed(on, at)
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_the_geometry_of_vllm_gives_the_same() -> None:
    """Tiles of 6 coefficients, 8 slices of 640, 128 threads: bit for bit at each call, and within
    rounding of our own geometry."""
    case = cases.draw(16, HIDDEN, 5)
    assert plan.TILES_6_8_128.splits * 640 == HIDDEN and plan.TILES_6_8_128.warps * 32 == 128
    once = cases.computed(case.to("cuda"), plan.TILES_6_8_128)
    again = cases.computed(case.to("cuda"), plan.TILES_6_8_128)
    judge(once, cases.oracle(case))
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_a_bf16_weight() -> None:
    for rows in (5, 100):
        case = cases.draw(rows, HIDDEN, 6)
        case.fn = case.fn.bfloat16()
        judge(cases.computed(case.to("cuda")), cases.oracle(replace(case, fn=case.fn.float())))


@pytest.mark.parametrize("rows", [1, 12, 64, 300])
def test_many_calls_give_the_same_bits(rows: int) -> None:
    """Whichever program is the last to arrive."""
    case = cases.draw(rows, HIDDEN, 7).to("cuda")
    first = cases.computed(case)
    for _ in range(200):
        found = cases.computed(case)
        assert all(torch.equal(found[name], first[name]) for name in first)


def test_a_row_of_nan_spoils_no_other() -> None:
    case = cases.draw(12, HIDDEN, 8)
    clean = cases.computed(case.to("cuda"))
    case.x[5] = torch.nan
    case.residual[7, 2, 100] = torch.inf
    found = cases.computed(case.to("cuda"))
    others = [row for row in range(12) if row not in (5, 7)]
    for name in clean:
        assert torch.equal(found[name][others], clean[name][others]), name
        assert not found[name][5].isfinite().all()


def test_a_graph_replays_and_leaves_its_counters() -> None:
    """Two captured calls with inputs that change, one after the other and on another stream."""
    kept = [cases.draw(rows, HIDDEN, rows).to("cuda") for rows in (4, 48)]
    works = [cases.poisoned(case) for case in kept]
    for work in works:
        launch.run(work, cases.NUMBERS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            launch.run(work, cases.NUMBERS)
    for seed in range(3):
        for case in kept:
            fresh = cases.draw(len(case.x), HIDDEN, 50 + seed)
            case.x.copy_(fresh.x)
            case.residual.copy_(fresh.residual)
        for work in works:
            work.comb_out.fill_(torch.nan)
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            graph.replay()
        torch.cuda.synchronize()
        for case, work in zip(kept, works, strict=True):
            judge(cases.results(work), cases.oracle(case.to("cpu")))


def test_as_vllm_calls_it() -> None:
    case = cases.draw(9, HIDDEN, 3, mean=True)
    right, on = cases.oracle(case), case.to("cuda")
    n = cases.NUMBERS
    numbers = (n.rms_eps, n.pre_eps, n.sinkhorn_eps, n.post_gain, n.iterations)
    found = ops.fused_post_pre_delayed(
        on.x, on.residual, on.post, on.comb, on.fn, on.scale, on.base, *numbers, on.pre, on.weight,
        n.norm_eps, True,
    )  # fmt: skip
    names = ("streams", "post", "comb", "input", "next_pre", "mean")
    assert found[1].shape == (9, 4, 1) and found[2].shape == (9, 4, 4)
    flat = {**right, "post": right["post"].view(9, 4, 1)}
    judge(dict(zip(names, found, strict=True)), flat)
    alone = ops.post(on.x, on.residual, on.post, on.comb)
    assert torch.equal(alone, found[0])
    nothing = ops.post(on.x[:0], on.residual[:0], on.post[:0], on.comb[:0])
    assert nothing.shape == (0, 4, HIDDEN)


@pytest.mark.parametrize(
    "geometry",
    [
        OneLaunch(4, 24, 80, 48, 4),
        OneLaunch(4, 24, 77, 64, 4),
        OneLaunch(4, 5, 80, 64, 4),
        Slices(4, 64),
        Slices(8, 96),
        TwoLaunches(8, 4, 32, 4, 2),
    ],
)
def test_a_geometry_that_leaves_anything_out_is_refused(
    geometry: Geometry,
) -> None:
    case = cases.draw(2, HIDDEN).to("cuda")
    with pytest.raises(PlanError, match="mHC geometry"):
        cases.computed(case, geometry)
