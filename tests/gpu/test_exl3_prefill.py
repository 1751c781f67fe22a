"""EXL3's kernels for many rows against float64, on the GPU host; torch and nvcc only.

17 to 8192 rows, all to one expert and none to others, several waves and strips, ids and rows at
their limits, every rate and codebook, CUDA graphs. ``bash tests/gpu/exl3.sh`` builds the library.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from gpu import exl3_cases as cases  # noqa: E402  (after torch is known to be there)
from gpu.exl3_cases import DENSE, EXPERTS, RATES, Layer, matrix, off, rows  # noqa: E402
from spark_overlay.exl3 import reference  # noqa: E402
from spark_overlay.exl3.cuda import library, many, ops, prefill, workspace  # noqa: E402
from spark_overlay.exl3.cuda.layers import Experts, Group  # noqa: E402
from spark_overlay.exl3.cuda.plan_prefill import PrefillPlan, prefill_need  # noqa: E402
from spark_overlay.exl3.format import Codebook  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = "cuda"
#: Those of the build; SPARK_EXL3_VARIANTS: "0 1 2" for a build that has more.
VARIANTS = [int(v) for v in os.environ.get("SPARK_EXL3_VARIANTS", "0 1").split()]
MIB = 64
#: Of an experts call of 128 to 8192 tokens, as the README says; what torch rounds up; bytes beside
#: the scratch that must stay as they are.
BOUND, SLACK, GUARD = 474 << 20, 4 << 20, 1 << 20


def run(
    layer: Layer,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    variant: int,
    *,
    first: int = 0,
    limit: float | None = 10.0,
    dtype: torch.dtype = torch.float32,
    pool: int = MIB,
) -> Tensor:
    routed = ops.Routed(
        x, ids, weights, layer.table, layer.experts, first, layer.shared, layer.inter,
        layer.max_k2, limit or 0.0, dtype,
    )  # fmt: skip
    return prefill.launch_prefill(routed, PrefillPlan(variant, pool))


def skewed(tokens: int, topk: int, experts: int, seed: int) -> tuple[Tensor, Tensor]:
    """Nearly all to the first few experts; some have none."""
    made = torch.Generator(GPU).manual_seed(seed)
    odds = torch.arange(1, experts + 1, device=GPU, dtype=torch.float32) ** -2.0
    odds[3::4] = 0
    ids = torch.multinomial(odds.expand(tokens, -1), topk, generator=made)
    return ids, torch.rand((tokens, topk), generator=made, device=GPU) + 0.1


def skewed_as_routing(
    tokens: int, topk: int, experts: int, device: str, seed: int
) -> tuple[Tensor, Tensor]:
    assert device == GPU
    return skewed(tokens, topk, experts, seed)


def growth(call: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes that torch had given out at most during the call, beyond those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, found


# -- dense ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: f"{rate[0]}-{rate[1] / 2:g}")
def test_reconstructed_weights_are_bit_exact(rate: tuple[Codebook, int]) -> None:
    book, k2 = rate
    one = matrix(384, 640, k2, 5, GPU, book)
    right = reference.decode_torch(one.trellis, book)[prefill.order(384)].t()
    number = library.CODEBOOKS[book]
    for first, columns in ((0, 640), (128, 384), (512, 128)):
        (found,) = prefill.reconstruct([prefill.Piece(one.trellis, number, first, columns)])
        expected = right[first : first + columns].contiguous()
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), first


@pytest.mark.parametrize("count", [1, 17, 100, 2048])
def test_rotations_are_the_references(count: int) -> None:
    one, x = matrix(640, 384, 6, 3, GPU), rows(count, 1280, GPU, count)[:, 640:]
    rotated = prefill.rotate(x, one.suh)
    scaled = (x.float() * one.suh.float()).half().double()
    right = reference.hadamard_rotate(scaled)[:, prefill.order(640)]
    assert off(rotated * (8 / 128**0.5), right) < 3e-4
    sums = torch.randn(count, 384, device=GPU)
    right = reference.hadamard_rotate(sums.double()) * (128**0.5 / 16) * one.svh.double()
    for dtype, bar in ((torch.float32, 1e-6), (torch.bfloat16, 3e-3)):
        y = torch.zeros(count, 512, dtype=dtype, device=GPU)
        prefill.finish(sums, one.svh, y[:, 128:])
        assert off(y[:, 128:], right) < bar and not y[:, :128].any()


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: f"{rate[0]}-{rate[1] / 2:g}")
def test_many_rows_of_every_rate(rate: tuple[Codebook, int]) -> None:
    book, k2 = rate
    parts = [matrix(512, size, k2, size, GPU, book) for size in (384, 128)]
    for count in (65, 130, 1000):
        x = rows(count, 512, GPU, count)
        found = Group([part.entry for part in parts])([x], torch.float32)
        assert off(found, cases.group_right([x], parts)) < DENSE, count


def test_many_rows_at_the_models_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ((5120, 1280, 10), (1280, 16384, 10), (1152, 5120, 8)):
        one, x = matrix(*size, 3, GPU), rows(257, size[0], GPU)
        number = [library.CODEBOOKS[one.codebook]]
        args = ([x], [one.trellis], [one.suh], [one.svh], number)
        found = prefill.dense(*args, torch.float32)
        assert off(found, one.right(x)) < DENSE, size
        assert torch.equal(prefill.dense(*args, torch.bfloat16), found.bfloat16())
    monkeypatch.setattr(prefill, "DECODED", 1152 * 1024)  # in five parts
    assert off(prefill.dense(*args, torch.float32), one.right(x)) < DENSE


def test_matrices_of_several_rates_in_one_call() -> None:
    """Nine of a rate (a launch takes eight), then others, over inputs of their own and over one."""
    sizes = [(256, 128 * (1 + n % 3), 10) for n in range(9)] + [(256, 384, k) for k in (6, 7, 7)]
    parts = [matrix(*size, n, GPU) for n, size in enumerate(sizes)]
    whole = rows(200, 256 * len(parts), GPU)
    for xs in ([whole[:, :256]], list(whole.view(200, len(parts), 256).unbind(1))):
        found = Group([part.entry for part in parts])(xs, torch.float32)
        assert off(found, cases.group_right(xs, parts)) < DENSE


@pytest.mark.parametrize("count", [2048, 8192])
def test_many_rows_hold_no_more_than_they_may(count: int) -> None:
    one, x = matrix(1280, 16384, 10, 3, GPU), rows(count, 1280, GPU)
    group = Group([one.entry])
    found = group([x], torch.bfloat16)  # cuBLAS has its workspace now
    held, _ = growth(lambda: group([x], torch.bfloat16))
    assert held <= 2 * prefill.DECODED + 4 * prefill.SUMS + 2 * x.numel() + found.nbytes + SLACK
    assert off(found[:300], one.right(x[:300])) < 4e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = group([x], torch.bfloat16)
    graph.replay()
    assert torch.equal(again, found)


# -- experts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shared", [False, True])
def test_experts_of_any_number_of_rows(variant: int, shared: bool) -> None:
    layer = Layer(640, 384, 40 + shared, [6, 4, 10, 8], GPU, shared=shared)
    for tokens in (17, 128, 777, 2048):
        x = rows(tokens, 640, GPU, tokens)
        for ids, weights in (
            cases.routing(tokens, 6, layer.experts, GPU, tokens),
            skewed(tokens, 6, layer.experts, tokens),
        ):
            found = run(layer, x, ids, weights, variant)
            assert off(found, layer.right(x, ids, weights)) < EXPERTS, tokens
            assert torch.equal(run(layer, x, ids.int(), weights, variant), found)
            rounded = run(layer, x, ids, weights, variant, dtype=torch.bfloat16)
            assert torch.equal(rounded, found.bfloat16())


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: f"{rate[0]}-{rate[1] / 2:g}")
def test_experts_of_every_rate(rate: tuple[Codebook, int]) -> None:
    book, k2 = rate
    layer = Layer(384, 256, 9, [k2], GPU, codebook=book)
    x = rows(300, 384, GPU)
    ids, weights = cases.routing(300, 3, 9, GPU)
    right = layer.right(x, ids, weights)
    for variant in VARIANTS:
        assert off(run(layer, x, ids, weights, variant), right) < EXPERTS, variant


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_models_own_experts(variant: int) -> None:
    layer = Layer(5120, 1152, 33, [6, 6, 4], GPU, shared=True)
    for tokens in (64, 500):
        x = rows(tokens, 5120, GPU, tokens)
        ids, weights = cases.routing(tokens, 6, 32, GPU, tokens)
        right = layer.right(x, ids, weights)
        assert off(run(layer, x, ids, weights, variant, pool=320), right) < EXPERTS, tokens


@pytest.fixture(scope="module")
def full() -> Layer:
    """384 experts of the model's sizes and the shared one; a matrix serves a dozen of them."""
    layer = Layer(5120, 1152, 33, [6, 6, 4], GPU, shared=True)
    layer.parts = [(part * 12)[:384] + part[-1:] for part in layer.parts]
    layer.table = ops.experts_table(*([one.entry for one in part] for part in layer.parts))
    layer.experts = 384
    return layer


@pytest.mark.parametrize("way", ["even", "skewed"])
@pytest.mark.parametrize("tokens", [17, 1024, 8192])
def test_a_whole_layer_eager_and_in_a_graph(full: Layer, tokens: int, way: str) -> None:
    x = rows(tokens, 5120, GPU, tokens)
    made = cases.routing if way == "even" else skewed_as_routing
    ids, weights = made(tokens, 6, 384, GPU, tokens)
    right = full.right(x, ids, weights)
    chosen = ops.table_of(torch.device(GPU, 0)).prefill_plan(6 * tokens, 384)
    found = run(full, x, ids, weights, chosen.variant, pool=chosen.pool_mib)
    assert off(found, right) < EXPERTS
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run(full, x, ids, weights, chosen.variant, pool=chosen.pool_mib)
    graph.replay()
    assert torch.equal(again, found)


@pytest.mark.parametrize("tokens", [128, 2048, 8192])
def test_scratch_is_what_was_said(
    full: Layer, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = rows(tokens, 5120, GPU, tokens)
    ids, weights = cases.routing(tokens, 6, 384, GPU, tokens)
    chosen = ops.table_of(torch.device(GPU, 0)).prefill_plan(6 * tokens, 384)
    need = prefill_need(5120, 1152, 384, tokens, 6, True, chosen)

    def once() -> Tensor:
        return run(full, x, ids, weights, chosen.variant, pool=chosen.pool_mib)

    held, found = growth(once)
    assert held <= need.scratch_bytes + found.nbytes + SLACK
    assert need.scratch_bytes <= BOUND
    # Whatever it held before, and nothing beside it is touched.
    around: list[Tensor] = []

    def guarded(size: int, device: torch.device) -> Tensor:
        around.append(torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=device))
        return around[-1][GUARD : GUARD + size]

    monkeypatch.setattr(workspace, "scratch", guarded)
    assert torch.equal(once(), found)
    (block,) = around
    assert (block[:GUARD] == 0xFF).all() and (block[-GUARD:] == 0xFF).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_waves_and_strips_change_nothing(variant: int) -> None:
    layer = Layer(640, 256, 31, [6], GPU, shared=True)
    x = rows(8192, 640, GPU)
    ids, weights = cases.routing(8192, 6, 30, GPU)
    whole = run(layer, x, ids, weights, variant, pool=1024)
    assert off(whole, layer.right(x, ids, weights)) < EXPERTS
    seen = set()
    for pool in (32, 40, 100, 300):
        args = many.Prefill(
            pool_bytes=pool << 20, id_bytes=8, tokens=8192, topk=6, experts=30, shared=1,
            hidden=640, inter=256, max_k2=6, variant=variant,
        )  # fmt: skip
        need = many.load().prefill_need(args)
        seen.add((need.waves > 1, need.strips > 1))
        if variant < 2:  # those that are no part of a sweep
            mine = prefill_need(640, 256, 30, 8192, 6, True, PrefillPlan(variant, pool))
            assert mine == need, pool
        assert torch.equal(run(layer, x, ids, weights, variant, pool=pool), whole), pool
    assert (True, True) in seen


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rows_result_does_not_depend_on_the_others(variant: int) -> None:
    layer = Layer(384, 256, 12, [6], GPU)
    x = rows(1000, 384, GPU)
    ids, weights = skewed(1000, 3, 12, 1)
    whole = run(layer, x, ids, weights, variant)
    for count in (1, 30, 500):
        some = run(layer, x[:count], ids[:count], weights[:count], variant)
        assert torch.equal(some, whole[:count]), count


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_rows_to_one_expert_and_ids_of_nobody(variant: int) -> None:
    layer = Layer(384, 256, 12, [6], GPU)
    x = rows(1111, 384, GPU)
    ids = torch.full((1111, 2), 7, device=GPU)
    weights = torch.rand(1111, 2, device=GPU)
    assert off(run(layer, x, ids, weights, variant), layer.right(x, ids, weights)) < EXPERTS
    ids = torch.randint(-3, 30, (1111, 2), device=GPU)
    ids[5], ids[6], ids[7] = -1, 1 << 40, 9
    found = run(layer, x, ids, weights, variant, first=10)
    assert off(found, layer.right(x, ids, weights, first=10)) < EXPERTS
    assert not found[5:8].any()
    assert not run(layer, x, ids, weights, variant, first=1000).any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_not_finite_stays_in_its_row(variant: int) -> None:
    layer = Layer(384, 256, 10, [6, 8], GPU, shared=True)
    x = rows(400, 384, GPU)
    ids, weights = cases.routing(400, 4, 9, GPU)
    clean = run(layer, x, ids, weights, variant)
    x[3, 100], x[9, 7] = float("nan"), float("inf")
    found = run(layer, x, ids, weights, variant)
    same = (found == clean).all(-1)
    assert not found[3].isfinite().all() and not found[9].isfinite().all()
    assert same.sum() == 398 and not same[3] and not same[9]


@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_and_the_clamp(variant: int) -> None:
    layer = Layer(384, 256, 17, [6], GPU, shared=True)
    x = rows(600, 384, GPU)
    ids, weights = cases.routing(600, 6, 16, GPU)
    right = layer.right(x, ids, weights, limit=0.7)
    found = run(layer, x, ids, weights, variant, limit=0.7)
    assert off(found, right) < EXPERTS
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run(layer, x, ids, weights, variant, limit=0.7)
    for seed in range(3):
        other, factors = skewed(600, 6, 16, seed)
        ids.copy_(other)
        weights.copy_(factors)
        graph.replay()
        assert torch.equal(again, run(layer, x, ids, weights, variant, limit=0.7))


def test_the_layer_takes_any_number_of_tokens_in_a_graph() -> None:
    layer = Layer(384, 256, 17, [6], GPU, shared=True)
    parts = [[one.entry for one in part] for part in layer.parts]
    experts = Experts(*parts, limit=10.0, shared=True)
    for tokens in (0, 1, 21, 22, 300):
        x = rows(tokens, 384, GPU, tokens)
        ids, weights = cases.routing(tokens, 6, 16, GPU, tokens)
        found = experts(x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = experts(x, ids, weights)
        graph.replay()
        assert torch.equal(found, again)
        if tokens:
            assert off(found, layer.right(x, ids, weights)) < 4e-3, tokens


def test_what_cannot_be_is_refused() -> None:
    layer = Layer(384, 256, 8, [6], GPU)
    x = rows(64, 384, GPU)
    ids, weights = cases.routing(64, 2, 8, GPU)
    with pytest.raises(ValueError, match="variant"):
        run(layer, x, ids, weights, 99)
    with pytest.raises(ValueError, match="pool"):
        run(layer, x, ids, weights, 0, pool=0)
    assert ops.table_of(torch.device(GPU, 0)).pool_mib >= 32
