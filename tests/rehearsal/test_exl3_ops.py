"""The EXL3 ops without a GPU: on a CPU they are the reference, their fakes say the same shapes, and
wrong arguments are refused; scratch that survives launches and graph captures."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from spark_overlay.exl3 import reference
from spark_overlay.exl3.cuda import library, ops, plan, prefill, tune, workspace
from spark_overlay.exl3.format import LEGAL_K2, Codebook, Exl3FormatError

pytestmark = pytest.mark.rehearsal


def matrix(n_in: int, n_out: int, k2: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    tiles = (n_in // 16, n_out // 16, 8 * k2)
    trellis = torch.randint(-(1 << 15), 1 << 15, tiles, dtype=torch.int16, generator=made)
    scales = [torch.randn(size, generator=made).half() for size in (n_in, n_out)]
    scales[1] /= n_in**0.5
    return trellis, *scales


def rows(count: int, width: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(100 + seed)
    return torch.randn((count, width), generator=made).bfloat16()


def off(found: Tensor, right: Tensor) -> float:
    return ((found.double() - right).norm() / right.norm()).item()


def expected(x: Tensor, parts: tuple[Tensor, Tensor, Tensor], codebook: Codebook) -> Tensor:
    return reference.linear(x.double(), *parts, codebook)


def grouped(xs: list[Tensor], matrices: list[Any], books: list[Codebook], **more: Any) -> Tensor:
    trellis, suh, svh = map(list, zip(*matrices, strict=True))
    given = {"bias": [None] * len(matrices), "dtype": torch.float32} | more
    numbers = [library.CODEBOOKS[book] for book in books]
    return ops.group(xs, trellis, suh, svh, given["bias"], numbers, given["dtype"])


def test_a_group_of_rates_and_codebooks_over_one_input() -> None:
    books: list[Codebook] = ["mul1", "mul1", "mcg", "3inst"]
    sizes = [(256, 128, 6), (256, 384, 7), (256, 128, 10), (256, 256, 4)]
    matrices = [matrix(*size, seed) for seed, size in enumerate(sizes)]
    x = rows(5, 256)
    bias = [None, torch.randn(384).half(), None, None]
    found = grouped([x], matrices, books, bias=bias)
    right = [expected(x, parts, book) for parts, book in zip(matrices, books, strict=True)]
    right[1] = right[1] + bias[1].double()
    assert found.shape == (5, 896) and found.dtype == torch.float32
    assert off(found, torch.cat(right, -1)) < 1e-6
    rounded = grouped([x], matrices, books, bias=bias, dtype=torch.bfloat16)
    assert torch.equal(rounded, found.bfloat16())


def test_a_group_with_an_input_each_and_one_without_rows() -> None:
    matrices = [matrix(256, 128, 6, 1), matrix(128, 256, 8, 2)]
    xs = [rows(3, 256), rows(3, 128, 1)]
    found = grouped(xs, matrices, ["mul1", "mul1"])
    right = [expected(x, parts, "mul1") for x, parts in zip(xs, matrices, strict=True)]
    assert off(found, torch.cat(right, -1)) < 1e-6
    assert grouped([x[:0] for x in xs], matrices, ["mul1", "mul1"]).shape == (0, 384)


@pytest.mark.parametrize("k2", LEGAL_K2)
def test_decode_is_the_references(k2: int) -> None:
    trellis = matrix(128, 256, k2, 3)[0]
    right = reference.decode_torch(trellis, "mul1")
    assert torch.equal(ops.decode(trellis, "mul1").view(torch.int16), right.view(torch.int16))


HIDDEN, INTER, EXPERTS = 256, 128, 5
RATES = {"gate": (6, 6, 4, 6, 8, 10), "up": (6, 6, 4, 6, 8, 8), "down": (6, 4, 4, 6, 8, 10)}


def layer() -> dict[str, list[ops.Entry]]:
    """Five experts and a shared one, of mixed rates."""
    made: dict[str, list[ops.Entry]] = {}
    for place, (name, rates) in enumerate(RATES.items()):
        size = (INTER, HIDDEN) if name == "down" else (HIDDEN, INTER)
        made[name] = [(*matrix(*size, k2, 10 * place + e), "mul1") for e, k2 in enumerate(rates)]
    return made


def one_expert(made: dict[str, list[ops.Entry]], e: int, x: Tensor, limit: float) -> Tensor:
    gate, up = (reference.linear(x, *made[name][e]) for name in ("gate", "up"))
    inner = torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    return reference.linear(inner, *made["down"][e])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_by_their_ids(shared: bool, dtype: torch.dtype) -> None:
    made = layer()
    count = EXPERTS if shared else EXPERTS + 1
    table = ops.experts_table(made["gate"], made["up"], made["down"])
    x = rows(6, HIDDEN)
    # Ids begin at 7. The last token has none of this table; 6 and 99 belong to others.
    ids = torch.tensor([[7, 8], [9, 7], [11, 99], [6, 10], [8, 9], [6, -1]])
    weights = torch.rand((6, 2), generator=torch.Generator().manual_seed(1))
    limit = 0.5
    right = torch.zeros(6, HIDDEN, dtype=torch.float64)
    for t in range(6):
        for j in range(2):
            e = int(ids[t, j]) - 7
            if 0 <= e < count:
                right[t] += weights[t, j] * one_expert(made, e, x[t : t + 1].double(), limit)[0]
    if shared:
        right += one_expert(made, EXPERTS, x.double(), limit)
    found = ops.experts(
        x, ids.to(dtype), weights, table, count, INTER, 10,
        first_id=7, shared=shared, limit=limit, dtype=torch.float32,
    )  # fmt: skip
    assert off(found, right) < 1e-6
    if not shared:
        assert torch.equal(found[5], torch.zeros(HIDDEN))
    assert ops.experts(x[:0], ids[:0], weights[:0], table, count, INTER, 10, shared=shared,
                       first_id=7).shape == (0, HIDDEN)  # fmt: skip


def test_the_limit_is_felt_and_none_is_none() -> None:
    made = layer()
    table = ops.experts_table(made["gate"], made["up"], made["down"])
    x, ids = rows(2, HIDDEN), torch.tensor([[0], [1]])
    weights = torch.ones(2, 1)

    def run(limit: float | None) -> Tensor:
        return ops.experts(x, ids, weights, table, EXPERTS + 1, INTER, 10, limit=limit)

    assert torch.equal(run(None), run(1e6)) and not torch.equal(run(None), run(0.1))


def test_what_is_decoded_at_once_is_bounded_and_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(256, 640), (256, 128), (512, 384), (128, 128), (1024, 128)]
    trellis = [matrix(*size, 6, seed)[0] for seed, size in enumerate(sizes)]
    numbers = [0, 1, 0, 2, 0]
    for decoded in (1 << 30, 256 * 640, 256 * 256, 1):
        monkeypatch.setattr(prefill, "DECODED", decoded)
        lists = list(prefill.pieces_of(trellis, numbers))
        for pieces in lists:
            values = [16 * one.trellis.shape[0] * one.columns for one in pieces]
            assert sum(values) <= decoded or (len(pieces) == 1 and pieces[0].columns == 128)
        every = [one for pieces in lists for one in pieces]
        found = [
            (one.matrix, at)
            for one in every
            for at in range(one.first, one.first + one.columns, 128)
        ]
        assert found == [(m, at) for m, size in enumerate(sizes) for at in range(0, size[1], 128)]
        assert all(trellis[one.matrix] is one.trellis for one in every)
        assert all(numbers[one.matrix] == one.codebook for one in every)
        assert (len(lists) == 1) == (decoded == 1 << 30)
    assert list(prefill.pieces_of([], [])) == []


def test_fakes_and_schemas_are_right() -> None:
    matrices = [matrix(256, 128, 6, 1), matrix(256, 256, 8, 2)]
    trellis, suh, svh = map(list, zip(*matrices, strict=True))
    tests = ("test_schema", "test_faketensor")
    given = ([rows(3, 256)], trellis, suh, svh, [None, None], [0, 0], torch.bfloat16)
    torch.library.opcheck(torch.ops.spark_exl3.group, given, test_utils=tests)
    torch.library.opcheck(torch.ops.spark_exl3.decode, (trellis[0], 0), test_utils=tests)
    made = layer()
    table = ops.experts_table(made["gate"], made["up"], made["down"])
    routed = (rows(2, HIDDEN), torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2))
    torch.library.opcheck(
        torch.ops.spark_exl3.experts,
        (*routed, table, EXPERTS, 0, True, INTER, 10, 10.0, torch.bfloat16),
        test_utils=tests,
    )


def test_compiled_code_calls_the_ops_as_they_are() -> None:
    parts = matrix(256, 128, 6, 1)

    def twice(x: Tensor) -> Tensor:
        return grouped([x], [parts], ["mul1"]) * 2

    x = rows(3, 256)
    compiled = torch.compile(twice, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), twice(x))


def test_arguments_that_do_not_fit_are_named() -> None:
    good = matrix(256, 128, 6, 1)
    x = rows(3, 256)

    def refused(text: str, xs: list[Tensor], *matrices: Any, **more: Any) -> None:
        books = more.pop("books", ["mul1"] * len(matrices))
        with pytest.raises((ValueError, Exl3FormatError), match=text):
            grouped(xs, list(matrices), books, **more)

    refused("expected bf16", [x.float()], good)
    refused("has 256 inputs, x", [x[:, :128]], good)
    refused("1 to 16 matrices", [x], *[good] * 17)
    refused("one input, or one each", [x, x], good, good, good)
    refused("rows alike", [x, rows(4, 256)], good, good)
    refused("contiguous int16", [x], (good[0].transpose(0, 1), *good[1:]))
    refused("scales", [x], (good[0], good[1].float(), good[2]))
    refused("scales", [x], (good[0], good[1], good[2][:64]))
    refused("no EXL3 rate", [x], (good[0][:, :, :30].contiguous(), *good[1:]))
    refused("mul1 only", [x], matrix(256, 128, 5, 1), books=["mcg"])
    refused("output torch.float16", [x], good, dtype=torch.float16)
    refused("bias torch.float32", [x], good, bias=[torch.zeros(128)])

    made = layer()
    table = ops.experts_table(made["gate"], made["up"], made["down"])
    ids, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)

    def experts(text: str, *changed: Any) -> None:
        given = [rows(1, HIDDEN), ids, weights, table, EXPERTS + 1, INTER, 10]
        for place, value in changed:
            given[place] = value
        with pytest.raises(ValueError, match=text):
            ops.experts(*given)

    experts("expected bf16", (0, rows(1, HIDDEN).float()))
    experts("expected int32 or int64", (1, ids.float()))
    experts("expected fp32", (2, weights.half()))
    experts("1 tokens", (1, ids.expand(2, 2)))
    experts("table", (4, EXPERTS))
    experts("intermediate", (5, 100))
    with pytest.raises(ValueError, match="1 gates, 2 ups"):
        ops.experts_table(made["gate"][:1], made["up"][:2], made["down"][:1])
    with pytest.raises(ValueError, match="down"):
        ops.experts_table(made["gate"], made["up"], made["gate"])


def test_counters_are_each_keys_own_and_stay() -> None:
    counters = workspace.Counters(torch.device("cpu"), block=256)
    first, second = counters.of("a", 10), counters.of("b", 10)
    assert not (first.any() or second.any()) and first.dtype == torch.int32
    assert abs(first.data_ptr() - second.data_ptr()) >= 128
    assert counters.of("a", 10).data_ptr() == first.data_ptr()
    larger = counters.of("a", 100)
    assert len(larger) >= 100 and larger.data_ptr() != first.data_ptr()
    second[:] = 7  # a launch in flight
    far = [counters.of(n, 60) for n in range(8)]  # more than the block holds
    assert not any(each.any() for each in far) and int(second.sum()) == 7 * len(second)
    places = sorted((c.data_ptr(), c.data_ptr() + 4 * len(c)) for c in (*far, larger, second))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))


def test_a_capture_needs_counters_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = workspace.Counters(torch.device("cuda", 0), block=64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(workspace.WorkspaceError, match="run the layers once before the capture"):
        counters.of("a", 1)


def test_a_tuner_tries_legal_plans_and_keeps_what_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    table = plan.read(plan.TABLES / "sm_121.json")
    shapes, _ = tune.groups_of(2)[0]
    for rows in plan.ROW_STEPS:
        plans = list(tune.group_plans(shapes, rows))
        assert len(plans) == len(set(plans)) > 10
        for one in plans:
            plan.check_group(one, shapes)
            assert plan.group_shared(shapes, rows, one) <= plan.MOST_SHARED
    for one in tune.experts_plans(5120, 1152, 6):
        plan.check_experts(one, 1152)

    rule, told = table.group_plan(shapes, 4), list[str]()
    quick = plan.GroupPlan(3, rule.parts)
    times = {rule: 1.0, quick: 0.5}
    made: dict[str, plan.GroupPlan] = {}

    def calls(one: plan.GroupPlan) -> list[Any]:
        made["last"] = one
        return [lambda: torch.ones(3) * (1 + 1e-7 * one.warps)]

    monkeypatch.setattr(tune, "seconds", lambda _: times.get(made["last"], 0.99))
    others = [plan.GroupPlan(7, rule.parts), quick]
    assert tune._best(rule, others, calls, "here", told.append) == quick
    assert tune._best(rule, others[:1], calls, "here", told.append) is None  # within the noise
    assert "none of 1 better" in told[-1]

    def wrong(one: plan.GroupPlan) -> list[Any]:
        return [lambda: torch.ones(3) * one.warps]

    with pytest.raises(RuntimeError, match="differs from the rule's"):
        tune._best(rule, others, wrong, "here", told.append)


def test_a_tuner_takes_what_is_best_in_the_layers_sequence() -> None:
    table = plan.read(plan.TABLES / "sm_121.json")
    groups = [tuple(shapes) for shapes, _ in tune.groups_of(2) if shapes[0].k2 == 10]
    wanted = {shapes: list(tune.group_plans(shapes, 8))[7 + n] for n, shapes in enumerate(groups)}
    told = list[str]()

    def took(tried: plan.Table) -> float:
        return 1e-5 * sum(1 - 0.2 * (tried.group.get((s, 8)) == wanted[s]) for s in groups)

    found = tune.in_sequence(table, groups, took, told.append)
    assert {shapes: found.group_plan(shapes, 4) for shapes in groups} == wanted
    assert all(found.group_plan(s, 64) == table.group_plan(s, 64) for s in groups)
    assert "60.0 us by each group's best, 48.0 in sequence" in told[-1]
    assert tune.in_sequence(table, groups, lambda _: 1.0, told.append).group == table.group
