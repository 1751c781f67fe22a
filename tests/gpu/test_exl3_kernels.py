"""EXL3's kernels against float64: ``bash tests/gpu/exl3.sh`` on the GPU host; torch and nvcc only.

Every rate and codebook, tensors of the real runtime and quantizer, slices, ids and rows at their
limits, CUDA graphs and streams. SPARK_EXL3_SECONDS: how long two streams run beside each other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from gpu import exl3_cases as cases  # noqa: E402  (after torch is known to be there)
from gpu.exl3_cases import DENSE, EXPERTS, RATES, Layer, Matrix, matrix, off, rows  # noqa: E402
from spark_overlay.exl3 import format as fmt  # noqa: E402
from spark_overlay.exl3 import reference  # noqa: E402
from spark_overlay.exl3.cuda import library, ops, plan  # noqa: E402
from spark_overlay.exl3.format import Codebook  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = "cuda"
DATA = Path(__file__).resolve().parents[1] / "data" / "exl3"
ROWS = (1, 3, 8, 9, 16, 17, 64)
#: V4.1 in two ranks: inputs, outputs, K2 of each linear of a layer.
REAL = {
    "wq_a + wkv": [(5120, 1280, 10), (5120, 512, 10)],
    "wq_b": [(1280, 16384, 10)],
    "wo_b": [(4096, 5120, 10)],
    "shared gate + up": [(5120, 1152, 10), (5120, 1152, 8)],
    "shared down": [(1152, 5120, 10)],
    "indexer.wk": [(512, 128, 16)],
    "compressor": [(5120, 512, 10), (5120, 512, 10)],
}


def named(rate: tuple[Codebook, int]) -> str:
    return f"{rate[0]}-{rate[1] / 2:g}"


# -- decode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", RATES, ids=named)
def test_decode_is_bit_exact(rate: tuple[Codebook, int]) -> None:
    book, k2 = rate
    data = np.load(DATA / "exl3_decode.npz")
    name = f"{book}_k{k2 / 2:g}"
    # The runtime's own tiles, repeated to whole Hadamard blocks.
    tiles = torch.from_numpy(data[f"{name}_trellis"]).repeat(4, 8, 1).to(GPU)
    right = torch.from_numpy(data[f"{name}_inner"]).repeat(4, 8)
    assert torch.equal(ops.decode(tiles, book).cpu().view(torch.int16), right.view(torch.int16))
    wide = matrix(384, 640, k2, 5, GPU, book).trellis
    right = reference.decode_torch(wide, book)
    assert torch.equal(ops.decode(wide, book).view(torch.int16), right.view(torch.int16))


# -- dense ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", RATES, ids=named)
def test_a_linear_of_every_rate(rate: tuple[Codebook, int]) -> None:
    book, k2 = rate
    one = matrix(512, 384, k2, 7, GPU, book)
    for count in ROWS:
        x = rows(count, 512, GPU, count)
        found = cases.group([x], [one])
        assert found.isfinite().all() and off(found, one.right(x)) < DENSE, count
        assert torch.equal(cases.group([x], [one], torch.bfloat16), found.bfloat16())


@pytest.mark.parametrize("k2", [4, 5, 6, 8])
def test_tensors_of_the_real_quantizer(k2: int) -> None:
    data = np.load(DATA / "exl3_vectors.npz")
    trellis, suh, svh = (
        torch.from_numpy(data[f"{name}_{k2}"]).to(GPU) for name in ("trellis", "su", "sv")
    )
    one = Matrix(trellis, suh.half(), svh.half())
    x = rows(6, 256, GPU)
    assert off(cases.group([x], [one]), one.right(x)) < DENSE


@pytest.mark.parametrize("name", REAL)
def test_the_models_own_shapes(name: str) -> None:
    parts = [matrix(*size, seed, GPU) for seed, size in enumerate(REAL[name])]
    for count in (1, 4, 16, 40):
        x = rows(count, parts[0].suh.numel(), GPU, count)
        assert off(cases.group([x], parts), cases.group_right([x], parts)) < DENSE, count


def test_the_head() -> None:
    one = matrix(5120, 64640, 12, 1, GPU)
    x = rows(4, 5120, GPU)
    right = torch.cat(
        [one.cut(fmt.column_slice(lo, lo + 6464 * 10 // 5, 64640)).right(x)
         for lo in range(0, 64640, 12928)], -1
    )  # fmt: skip
    assert off(cases.group([x], [one]), right) < DENSE


def test_slices_of_output_groups_with_an_input_each() -> None:
    parts = [matrix(4096, 1024, 10, seed, GPU) for seed in range(4)]
    whole = rows(4, 4 * 4096, GPU).view(4, 4, 4096)
    xs = [whole[:, g] for g in range(4)]  # views: rows lie 16384 apart
    assert off(cases.group(xs, parts), cases.group_right(xs, parts)) < DENSE


def test_mixed_rates_and_codebooks_in_one_launch() -> None:
    parts = [
        matrix(640, 128 * (1 + n % 3), k2, n, GPU, book) for n, (book, k2) in enumerate(RATES[:16])
    ]
    parts[3] = replace(parts[3], bias=rows(1, parts[3].svh.numel(), GPU)[0].half())
    for count in (1, 12, 33):
        x = rows(count, 640, GPU, count)
        found, right = cases.group([x], parts), cases.group_right([x], parts)
        at = 0
        for n, part in enumerate(parts):
            size = part.svh.numel()
            assert off(found[:, at : at + size], right[:, at : at + size]) < DENSE, (count, n)
            at += size


def test_slices_of_ranks_add_up() -> None:
    one = matrix(1024, 768, 6, 3, GPU)
    x = rows(5, 1024, GPU)
    right = one.right(x)
    columns = [one.cut(fmt.column_slice(*part, 768)) for part in fmt.shard_ranges(768, 2)]
    assert off(torch.cat([cases.group([x], [part]) for part in columns], -1), right) < DENSE
    total = sum(
        cases.group([x[:, lo:hi]], [one.cut(fmt.row_slice(lo, hi, 1024))])
        for lo, hi in fmt.shard_ranges(1024, 2)
    )
    assert off(total, right) < DENSE


def test_nothing_to_do() -> None:
    one = matrix(256, 128, 6, 3, GPU)
    assert cases.group([rows(0, 256, GPU)], [one]).shape == (0, 128)


@pytest.mark.parametrize("count", [4, 13, 40])
def test_what_is_not_finite_stays_in_its_row(count: int) -> None:
    parts = [matrix(768, 256, 6, 3, GPU), matrix(768, 128, 8, 4, GPU, "mcg")]
    x = rows(count, 768, GPU)
    clean = cases.group([x], parts)
    for place, value in ((1, float("nan")), (count - 1, float("inf")), (2, -3e38)):
        x[place, 5 * place] = value
    found = cases.group([x], parts)
    assert not found[1].isfinite().all() and not found[count - 1].isfinite().all()
    for n in set(range(count)) - {1, 2, count - 1}:
        assert torch.equal(found[n], clean[n]), n


def test_rows_do_not_depend_on_their_number_within_a_plan() -> None:
    one = matrix(1024, 512, 6, 3, GPU)
    x = rows(8, 1024, GPU)
    whole = cases.group([x], [one])
    for count in range(1, 8):
        assert torch.equal(cases.group([x[:count]], [one]), whole[:count])


def test_any_legal_plan_gives_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = matrix(2560, 640, 6, 3, GPU)
    x = rows(11, 2560, GPU)
    right = one.right(x)
    shapes = (plan.Shape(2560, 640, 6),)
    for warps in range(1, plan.MAX_WARPS + 1):
        for chunks in (n for n in range(1, warps + 1) if warps % n == 0):
            for kblocks in (1, 3, 8, 16):
                chosen = plan.GroupPlan(warps, (plan.Part(chunks, kblocks),))
                need = plan.group_need(shapes, 11, chosen)
                monkeypatch.setattr(ops, "_planned_group", lambda *_, c=chosen, n=need: (c, n))
                try:
                    found = cases.group([x], [one])
                except ValueError as error:  # more shared memory than an SM has
                    assert "shared" in str(error), (warps, chunks, kblocks)
                    continue
                assert off(found, right) < DENSE, (warps, chunks, kblocks)


# -- experts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", RATES, ids=named)
def test_experts_of_every_rate(rate: tuple[Codebook, int]) -> None:
    book, k2 = rate
    layer = Layer(384, 256, 9, [k2], GPU, codebook=book)
    for tokens, topk in ((1, 1), (1, 6), (5, 3), (21, 6)):
        x = rows(tokens, 384, GPU, tokens)
        ids, weights = cases.routing(tokens, topk, 9, GPU, tokens)
        found = layer.run(x, ids, weights)
        assert off(found, layer.right(x, ids, weights)) < EXPERTS, tokens
        rounded = layer.run(x, ids, weights, dtype=torch.bfloat16)
        assert torch.equal(rounded, found.bfloat16())


@pytest.mark.parametrize("shared", [False, True])
def test_mixed_rates_in_a_layer(shared: bool) -> None:
    layer = Layer(512, 384, 17, [6, 4, 10, 7, 8], GPU, shared=shared)
    for tokens in (1, 4, 8, 16):
        x = rows(tokens, 512, GPU, tokens)
        ids, weights = cases.routing(tokens, 6, layer.experts, GPU, tokens)
        right = layer.right(x, ids, weights)
        assert off(layer.run(x, ids, weights), right) < EXPERTS, tokens
        assert torch.equal(layer.run(x, ids.int(), weights), layer.run(x, ids, weights))


@pytest.mark.parametrize(("k2", "topk", "experts"), [(6, 6, 64), (4, 6, 64), (8, 3, 32)])
def test_the_models_own_experts(k2: int, topk: int, experts: int) -> None:
    layer = Layer(5120, 1152, experts + 1, [k2], GPU, shared=True)
    for tokens in (1, 2, 4, 8, 21):
        x = rows(tokens, 5120, GPU, tokens)
        ids, weights = cases.routing(tokens, topk, experts, GPU, tokens)
        assert off(layer.run(x, ids, weights), layer.right(x, ids, weights)) < EXPERTS, tokens


def test_any_legal_plan_of_the_experts_gives_the_answer() -> None:
    layer = Layer(768, 640, 9, [6, 4], GPU, shared=True)
    first = ((1, 1, 1), (4, 1, 3), (4, 2, 2), (3, 3, 4), (8, 4, 6))
    second = ((1, 1, 1), (4, 1, 2), (4, 2, 5), (8, 1, 3), (6, 3, 4))
    for tokens in (1, 3, 12):
        x = rows(tokens, 768, GPU, tokens)
        ids, weights = cases.routing(tokens, 4, layer.experts, GPU, tokens)
        right = layer.right(x, ids, weights)
        for a in first:
            for b in second:
                routed = ops.Routed(
                    x, ids, weights, layer.table, layer.experts, 0, True, layer.inter, layer.max_k2,
                    10.0, torch.float32,
                )  # fmt: skip
                found = ops.launch_experts(routed, plan.ExpertsPlan(*a, *b))
                assert off(found, right) < EXPERTS, (tokens, a, b)


def test_one_expert_takes_every_row_and_the_others_none() -> None:
    layer = Layer(384, 256, 12, [6], GPU)
    for tokens in (1, 8, 17, 64, 128):
        x = rows(tokens, 384, GPU, tokens)
        ids = torch.full((tokens, 1), 7, device=GPU)
        weights = torch.rand(tokens, 1, device=GPU)
        assert off(layer.run(x, ids, weights), layer.right(x, ids, weights)) < EXPERTS, tokens


def test_ids_of_other_ranks_and_of_nobody_add_nothing() -> None:
    layer = Layer(384, 256, 6, [6], GPU)
    x = rows(5, 384, GPU)
    ids = torch.tensor([[10, 15], [9, 16], [11, -1], [1 << 40, 12], [13, 13]], device=GPU)
    weights = torch.rand(5, 2, device=GPU) + 0.5
    found = layer.run(x, ids, weights, first=10)
    right = layer.right(x, ids, weights, first=10)
    assert off(found, right) < EXPERTS
    assert not found[1].any() and found[0].any() and found[2].any() and found[3].any()
    none = layer.run(x, ids, weights, first=100)
    assert not none.any()


@pytest.mark.parametrize("shared", [False, True])
def test_a_token_that_is_not_finite_spoils_no_other(shared: bool) -> None:
    layer = Layer(384, 256, 9, [6, 8], GPU, shared=shared)
    x = rows(16, 384, GPU)
    ids, weights = cases.routing(16, 4, layer.experts, GPU)
    clean = layer.run(x, ids, weights)
    x[3, 100], x[9, 7] = float("nan"), float("inf")
    found = layer.run(x, ids, weights)
    for n in range(16):
        assert torch.equal(found[n], clean[n]) or n in (3, 9), n
    assert not found[3].isfinite().all() and not found[9].isfinite().all()


def test_the_clamp_comes_before_silu() -> None:
    layer = Layer(384, 256, 4, [6], GPU)
    x, (ids, weights) = rows(4, 384, GPU), cases.routing(4, 2, 4, GPU)
    # Far beyond a limit an error of gate and up weighs more than the clamped output.
    for limit, size in ((None, 1), (10.0, 8), (0.7, 1)):
        right = layer.right(x * size, ids, weights, limit=limit)
        assert off(layer.run(x * size, ids, weights, limit=limit), right) < EXPERTS, limit
    tight, free = (layer.run(x, ids, weights, limit=limit) for limit in (0.7, None))
    assert off(tight, free.double()) > 0.1


def test_no_tokens() -> None:
    layer = Layer(384, 256, 4, [6], GPU, shared=True)
    ids, weights = cases.routing(0, 2, 3, GPU)
    assert layer.run(rows(0, 384, GPU), ids, weights).shape == (0, 384)


def test_too_much_for_one_call_is_refused() -> None:
    layer = Layer(384, 256, 8, [6], GPU)
    ids, weights = cases.routing(22, 6, 8, GPU)
    with pytest.raises(ValueError, match="at most 128"):
        layer.run(rows(22, 384, GPU), ids, weights)
    with pytest.raises(ValueError, match="at most 64"):
        cases.group([rows(65, 384, GPU)], [layer.parts[0][0]])


# -- the library's own account -----------------------------------------------------------------


def test_the_library_needs_what_the_plan_says() -> None:
    table = ops.table_of(torch.device(GPU, 0))
    loaded = library.load()
    for sizes in REAL.values():
        shapes = [plan.Shape(*size) for size in sizes]
        for count in (1, 8, 9, 40, 64):
            chosen = table.group_plan(shapes, count)
            shards = (library.Shard * len(shapes))()
            for shard, shape, part in zip(shards, shapes, chosen.parts, strict=True):
                shard.inputs, shard.outputs, shard.k2 = shape.inputs, shape.outputs, shape.k2
                shard.chunks, shard.kblocks = part.chunks, part.kblocks
                shard.x_stride = shard.y_stride = 1 << 20
            said = loaded.group_need(shards, count, chosen.warps)
            assert said == plan.group_need(shapes, count, chosen)


# -- graphs and streams -------------------------------------------------------------------------


KEPT: list[object] = []  # what graphs read and compare with must outlive them


def captured(work: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of ``work`` that counts, on the device, values that differ from the first run's."""
    right = [each.clone() for each in work()]
    KEPT.append((right, work))
    wrong = torch.zeros((), dtype=torch.int64, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for found, expected in zip(work(), right, strict=True):
            wrong.add_((found != expected).sum())
    return graph, wrong


def a_layer(seed: int) -> Callable[[], list[Tensor]]:
    """A group that splits its inputs, slices with inputs of their own, and experts."""
    group = [matrix(5120, 1280, 10, seed, GPU), matrix(5120, 512, 10, seed + 1, GPU)]
    slices = [matrix(1024, 256, 6, seed + 2 + n, GPU) for n in range(3)]
    layer = Layer(1024, 384, 17, [6, 4, 8], GPU, shared=True, seed=seed)
    x, own = rows(4, 5120, GPU, seed), rows(12, 1024, GPU, seed).view(4, 3, 1024)
    ids, weights = cases.routing(4, 6, 16, GPU, seed)

    def work() -> list[Tensor]:
        xs = [own[:, n] for n in range(3)]
        return [
            cases.group([x], group, torch.bfloat16),
            cases.group(xs, slices),
            layer.run(own[:, 0], ids, weights),
        ]

    return work


def test_ten_thousand_replays_are_equal() -> None:
    graph, wrong = captured(a_layer(1))
    for _ in range(10_000):
        graph.replay()
    torch.cuda.synchronize()
    assert wrong.item() == 0


def test_eager_runs_between_replays_of_the_same_layer() -> None:
    work = a_layer(2)
    right = [each.clone() for each in work()]
    graph, wrong = captured(work)
    for _ in range(200):
        graph.replay()
        for found, expected in zip(work(), right, strict=True):
            assert torch.equal(found, expected)
    assert wrong.item() == 0


def test_two_streams_beside_each_other() -> None:
    seconds = float(os.environ.get("SPARK_EXL3_SECONDS", "60"))
    made = [captured(a_layer(seed)) for seed in (3, 4)]
    eager = a_layer(5)
    right = [each.clone() for each in eager()]
    torch.cuda.synchronize()
    end, counts, failed = time.monotonic() + seconds, [0, 0, 0], []

    def replay(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while time.monotonic() < end:
                for _ in range(50):
                    made[n][0].replay()
                torch.cuda.current_stream().synchronize()
                counts[n] += 50

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while time.monotonic() < end:
                same = [torch.equal(a, b) for a, b in zip(eager(), right, strict=True)]
                counts[2] += 1
                if not all(same):
                    failed.append(counts[2])

    threads = [threading.Thread(target=replay, args=(n,)) for n in (0, 1)]
    threads.append(threading.Thread(target=run))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [wrong.item() for _, wrong in made] == [0, 0] and not failed
    assert min(counts) > 0, counts
    print(f"\nreplays {counts[:2]}, eager runs {counts[2]} in {seconds:.0f} s")
