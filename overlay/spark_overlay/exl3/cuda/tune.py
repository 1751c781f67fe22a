"""Measures a launch table on the GPU at hand: ``./start.sh tune``, which brings it to both nodes of
a pair, or ``python -m spark_overlay.exl3.cuda.tune OUT.json``.

For each group of V4.1's matrices and each number of rows, and for its experts, legal plans are
timed over weights that the L2 cache cannot hold, each first compared with what the rule gives. Of
those that agree the fastest is kept where it beats the rule by more than the clock's noise. For few
rows the groups of a layer are then timed one after the other, as they run: where launches overlap,
what is best beside its like need not be so there. About a minute and a half; the table serves where
SPARK_EXL3_TABLE names it, and must be the same on both ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from spark_overlay.exl3.cuda import ops, plan
from spark_overlay.exl3.cuda.plan import ExpertsPlan, GroupPlan, Part, Shape

#: What a plan must win to be kept, and how far its output may be from the rule's (relative RMS):
#: sums of another order, and with experts fp16 roundings between the launches that fall otherwise.
GAIN, CLOSE, EXPERTS_CLOSE = 0.02, 1e-4, 1e-3
SETS_BYTES, REPLAYS = 256 << 20, 5
#: In the layer's sequence: rows, what a plan must win of the whole of it, turns through its groups.
SEQUENCE_ROWS, SEQUENCE_GAIN, TURNS = 4, 0.003, 2
TOPK, EXPERTS = 6, 384

Call = Callable[[], Tensor]
Plan = TypeVar("Plan", GroupPlan, ExpertsPlan)


def groups_of(tp: int) -> list[tuple[list[Shape], bool]]:
    """V4.1's groups on one of ``tp`` ranks, as the 2.9 bpw pack has them; whether each matrix has
    an input of its own. A group of other rates follows the rule."""

    def like(k2: int, *sizes: tuple[int, int]) -> list[Shape]:
        return [Shape(n_in, n_out, k2) for n_in, n_out in sizes]

    inner = 2304 // tp
    found: list[tuple[list[Shape], bool]] = []
    for k2 in (10, 8):  # backbone, draft
        found += [
            (like(k2, (5120, 1280), (5120, 512)), False),
            (like(k2, (1280, 32768 // tp)), False),
            (like(k2, *[(4096, 1024)] * (8 // tp)), True),
            (like(k2, (8192 // tp, 5120)), False),
            (like(k2, (5120, inner), (5120, inner)), False),
            (like(k2, (inner, 5120)), False),
        ]
    return [*found, (like(12, (5120, 129280 // tp)), False)]


def group_plans(shapes: Sequence[Shape], rows: int) -> Iterator[GroupPlan]:
    """Legal plans worth a try: even splits, chunks beside each other, no warp under two k-tiles."""
    most = max(shape.kblocks for shape in shapes)
    tried = set()
    for warps in (4, 6, 8):
        for chunks in (n for n in (1, 2, 4) if warps % n == 0):
            for splits in range(1, most + 1):
                kblocks = [-(-shape.kblocks // splits) for shape in shapes]
                if max(kblocks) > plan.MAX_KBLOCKS or warps // chunks > 4 * min(kblocks):
                    continue
                made = GroupPlan(warps, tuple(Part(chunks, n) for n in kblocks))
                legal = (
                    plan.group_shared(shapes, rows, made) <= plan.MOST_SHARED - plan.STATIC_SHARED
                )
                if legal and made not in tried:
                    tried.add(made)
                    yield made


def experts_plans(hidden: int, inter: int, k2: int) -> Iterator[ExpertsPlan]:
    """Every legal plan worth a try of either launch; the other one's part is 1, 1, 1."""

    def legal(one: ExpertsPlan) -> bool:
        most = max(plan.experts_shared(inter, k2, one))
        return most <= plan.MOST_SHARED - plan.STATIC_SHARED

    def splits(width: int) -> list[int]:
        """k-blocks of a CTA: those of even splits."""
        most = width // plan.BLOCK
        return sorted({-(-most // splits) for splits in range(1, most + 1)})

    for warps in (3, 4, 6, 8):
        for chunks in (n for n in (1, 2, 3, 4) if warps % n == 0):
            for kblocks in splits(hidden):
                if kblocks <= plan.MAX_KBLOCKS and warps // chunks <= 2 * kblocks:
                    one = ExpertsPlan(warps, chunks, kblocks, 1, 1, 1)
                    if legal(one):
                        yield one
    for warps in range(2, plan.MAX_WARPS + 1):
        for chunks in (n for n in (1, 2, 3, 4) if warps % n == 0):
            for kblocks in splits(inter):
                if kblocks > 1 and warps // chunks <= 2 * kblocks:
                    one = ExpertsPlan(1, 1, 1, warps, chunks, kblocks)
                    if legal(one):
                        yield one


def tuned(table: plan.Table, tp: int, say: Callable[[str], None]) -> plan.Table:
    """``table`` with what was measured on the present GPU. Raises RuntimeError where a plan's sums
    are not the rule's."""
    table = replace(table, group={}, experts={})
    group: dict[tuple[tuple[Shape, ...], int], GroupPlan] = {}
    for shapes, own in groups_of(tp):
        for rows in plan.ROW_STEPS:
            found = best_group(table, shapes, own, rows, say)
            if found is not None:
                group[tuple(shapes), rows] = found
    table = replace(table, group=group)
    for k2 in (10, 8):
        layer = [one for one in groups_of(tp) if one[0][0].k2 == k2]
        table = in_sequence(
            table, [tuple(shapes) for shapes, _ in layer], layer_seconds(layer), say
        )
    experts: dict[tuple[int, int, int], ExpertsPlan] = {}
    hidden, inter = 5120, 2304 // tp
    routed = Layer(hidden, inter, 6)
    for slots in plan.SLOT_STEPS:
        chosen = best_experts(table, routed, slots // TOPK, say)
        if chosen is not None:
            experts[hidden, inter, slots] = chosen
    return replace(table, experts=experts)


def best_group(
    table: plan.Table, shapes: Sequence[Shape], own: bool, rows: int, say: Callable[[str], None]
) -> GroupPlan | None:
    calls = _group_calls(shapes, own, rows, max(2, SETS_BYTES // _bytes(shapes)))
    rule = table.group_plan(shapes, rows)
    label = f"{_name(shapes)}, {rows} rows"
    return _best(rule, group_plans(shapes, rows), calls, label, say)


def _bytes(shapes: Sequence[Shape]) -> int:
    return sum(shape.inputs * shape.outputs * shape.k2 // 16 for shape in shapes)


def _name(shapes: Sequence[Shape]) -> str:
    return f"{'+'.join(f'{s.inputs}x{s.outputs}' for s in shapes)} K2={shapes[0].k2}"


def _group_calls(
    shapes: Sequence[Shape], own: bool, rows: int, count: int
) -> Callable[[GroupPlan], list[Call]]:
    """By a plan, a call each of ``count`` sets of random matrices."""
    sets = [[_matrix(shape) for shape in shapes] for _ in range(count)]
    xs = [_rows(rows, shape.inputs) for shape in (shapes if own else shapes[:1])]

    def calls(chosen: GroupPlan) -> list[Call]:
        def one(parts: list[tuple[Tensor, Tensor, Tensor]]) -> Call:
            trellis, suh, svh = (list(column) for column in zip(*parts, strict=True))
            nothing: list[Tensor | None] = [None] * len(parts)
            books = [0] * len(parts)
            return lambda: ops.launch_group(
                xs, trellis, suh, svh, nothing, books, torch.float32, chosen
            )

        return [one(parts) for parts in sets]

    return calls


def layer_seconds(layer: Sequence[tuple[list[Shape], bool]]) -> Callable[[plan.Table], float]:
    """By a table, the time of one pass through all groups of a layer, in their order."""
    count = max(2, SETS_BYTES // sum(_bytes(shapes) for shapes, _ in layer))
    made = [(shapes, _group_calls(shapes, own, SEQUENCE_ROWS, count)) for shapes, own in layer]

    def took(table: plan.Table) -> float:
        each = [calls(table.group_plan(shapes, SEQUENCE_ROWS)) for shapes, calls in made]
        return seconds([call for turn in zip(*each, strict=True) for call in turn]) * len(made)

    return took


def in_sequence(
    table: plan.Table,
    groups: Sequence[tuple[Shape, ...]],
    took: Callable[[plan.Table], float],
    say: Callable[[str], None],
) -> plan.Table:
    """``table`` with the plans of few rows that are best where ``groups`` run one after the other,
    found one group at a time. Every plan tried was compared with the rule's sums before."""
    start = least = took(table)
    step = plan.ROW_STEPS[0]
    for _ in range(TURNS):
        for shapes in groups:
            for one in group_plans(shapes, step):
                tried = replace(table, group={**table.group, (shapes, step): one})
                this = took(tried)
                if this < least * (1 - SEQUENCE_GAIN):
                    table, least = tried, this
    say(
        f"layer of K2={groups[0][0].k2}, {SEQUENCE_ROWS} rows: {start * 1e6:.1f} us by each "
        f"group's best, {least * 1e6:.1f} in sequence"
    )
    return table


class Layer:
    """Random experts of one rate."""

    def __init__(self, hidden: int, inter: int, k2: int) -> None:
        self.hidden, self.inter, self.k2 = hidden, inter, k2
        up, down = Shape(hidden, inter, k2), Shape(inter, hidden, k2)
        self.parts: list[list[ops.Entry]] = [
            [(*_matrix(shape), "mul1") for _ in range(EXPERTS)] for shape in (up, up, down)
        ]
        self.table = ops.experts_table(*self.parts)


def best_experts(
    table: plan.Table, layer: Layer, tokens: int, say: Callable[[str], None]
) -> ExpertsPlan | None:
    x = _rows(tokens, layer.hidden)
    routes = []
    for _ in range(max(4, 64 // tokens)):
        weights, ids = torch.rand((tokens, EXPERTS), device="cuda").topk(TOPK, -1)
        routes.append((ids, weights.contiguous()))

    def calls(chosen: ExpertsPlan) -> list[Call]:
        def one(ids: Tensor, weights: Tensor) -> Call:
            routed = ops.Routed(
                x, ids, weights, layer.table, EXPERTS, 0, False, layer.inter, layer.k2, 10.0,
                torch.float32,
            )  # fmt: skip
            return lambda: ops.launch_experts(routed, chosen)

        return [one(*route) for route in routes]

    rule = table.experts_plan(layer.hidden, layer.inter, tokens, TOPK, layer.k2)
    every = list(experts_plans(layer.hidden, layer.inter, layer.k2))
    first = [
        replace(rule, a_warps=one.a_warps, a_chunks=one.a_chunks, a_kblocks=one.a_kblocks)
        for one in every
        if one.b_warps == 1
    ]
    label = f"experts, {tokens} tokens"
    chosen = _best(rule, first, calls, f"{label}, gate and up", say)
    base = chosen or rule
    second = [
        replace(base, b_warps=one.b_warps, b_chunks=one.b_chunks, b_kblocks=one.b_kblocks)
        for one in every
        if one.a_warps == 1
    ]
    return _best(base, second, calls, f"{label}, down", say) or chosen


def _best(
    rule: Plan,
    plans: Sequence[Plan] | Iterator[Plan],
    calls: Callable[[Plan], list[Call]],
    label: str,
    say: Callable[[str], None],
) -> Plan | None:
    right = calls(rule)[0]()
    start = seconds(calls(rule))
    best, least, count = None, start * (1 - GAIN), 0
    for one in plans:
        made = calls(one)
        off = ((made[0]() - right).norm() / right.norm()).item()
        if not off <= (CLOSE if isinstance(one, GroupPlan) else EXPERTS_CLOSE):
            raise RuntimeError(f"{label}: {one} differs from the rule's {rule} by {off:.2g}")
        took, count = seconds(made), count + 1
        if took < least:
            best, least = one, took
    better = f"{least * 1e6:.1f} by {best} of {count}" if best else f"none of {count} better"
    say(f"{label}: {start * 1e6:.1f} us by the rule, {better}")
    return best


def seconds(calls: Sequence[Call]) -> float:
    """Of one call, from replays of a graph that holds them all; the median."""
    graph = torch.cuda.CUDAGraph()
    calls[0]()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(found)


def attention_of(device: torch.device) -> str | None:
    """Which attention class is to serve, where vLLM has one that may: on SM12x by FlashInfer."""
    if torch.cuda.get_device_capability(device)[0] != 12 or find_spec("flashinfer") is None:
        return None
    from spark_overlay.attention.contest import contest

    return contest(device, lambda call: seconds([call] * 8), lambda line: print(line, flush=True))


def _matrix(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    tiles = (shape.inputs // 16, shape.outputs // 16, 8 * shape.k2)
    trellis = torch.randint(-(1 << 15), 1 << 15, tiles, dtype=torch.int16, device="cuda")
    suh = torch.randn(shape.inputs, device="cuda").half()
    return trellis, suh, (torch.randn(shape.outputs, device="cuda") / shape.inputs**0.5).half()


def _rows(count: int, width: int) -> Tensor:
    return torch.randn((count, width), device="cuda").bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("out", type=Path, nargs="?")
    where.add_argument("--print", action="store_true", help="a line `table JSON`, or `table null`")
    parser.add_argument("--tp", type=int, choices=(1, 2), default=2)
    given = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    shipped = ops.table_of(device)
    found = tuned(shipped, given.tp, lambda line: print(line, flush=True))
    took = time.monotonic() - began
    when = datetime.now(UTC).date().isoformat()
    how = (
        f"Measured on one {torch.cuda.get_device_name(device)} on {when} in {took:.0f} s, torch "
        f"{torch.__version__}: V4.1's shapes on one of {given.tp} ranks; the rest by the rule."
    )
    table = replace(found, origin="measured", how=how)
    attention = attention_of(device)
    value = plan.show(table) | ({"attention": attention} if attention else {})
    better = bool(table.group or table.experts or attention)
    if given.print:
        print(f"table {json.dumps(value if better else None)}", flush=True)
        return
    if not better:
        sys.exit("no plan beats the rule: nothing to write")
    given.out.write_text(json.dumps(value, indent=1) + "\n")
    plan.read(given.out)
    counts = f"{len(table.group)} groups, {len(table.experts)} steps of experts"
    print(f"{given.out}: {counts}, {took:.0f} s")


if __name__ == "__main__":
    main()
