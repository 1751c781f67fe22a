"""How each launch divides its work: tables per GPU architecture, and the rule where one is silent.

Pure: no torch, no GPU. A plan changes the order of fp32 sums and the speed, never what is summed,
and both ranks of a pair must use the same one: it depends on table, shapes and rows alone.

A table (tables/sm_90.json and so on) says what it is: ``origin`` "measured" for entries that a
tuner wrote on that GPU, "modelled" where nothing was. ``entries`` of a measured table are looked up
by shape; what is not listed follows the rule.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from spark_overlay.exl3.cuda.plan_prefill import PrefillPlan

TABLES = Path(__file__).with_name("tables")
#: A table of one's own, as ``tune`` writes it, in place of the shipped one.
OVERRIDE = "SPARK_EXL3_TABLE"
BLOCK = 128

#: As api.h has them.
MAX_SHARDS, MAX_ROWS, MAX_SLOTS, MAX_WARPS, MAX_KBLOCKS, MAX_INTER = 16, 64, 128, 8, 16, 4096
#: Rows and slots a plan is made for: it serves every smaller number down to the next.
ROW_STEPS = (8, 16, 64)
SLOT_STEPS = (8, 16, 32, 64, 128)

#: Rates (mul1) with a kernel of their own; every other one goes through the generic one.
TUNED = (4, 6, 8, 10, 12, 16)

#: Compute capability -> the table its launches follow.
NEAREST: Mapping[int, str] = {80: "sm_80", 86: "sm_86", 87: "sm_86", 89: "sm_86", 90: "sm_90",
                              100: "sm_90", 103: "sm_90", 120: "sm_121", 121: "sm_121"}  # fmt: skip


#: Shared memory: what any CTA may have (99 KB), and what each is charged besides its dynamic part.
MOST_SHARED, STATIC_SHARED, CHARGED = 99 << 10, 1072, 1024
_SUMS = 8 * (BLOCK + 4) * 4  # a warp's fp32 sums, in the place of its ring


class PlanError(ValueError):
    """A table or a plan that no launch can follow."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One matrix of a group: inputs, outputs, rate in half bits."""

    inputs: int
    outputs: int
    k2: int

    @property
    def kblocks(self) -> int:
        return self.inputs // BLOCK

    @property
    def chunks(self) -> int:
        return self.outputs // BLOCK


@dataclass(frozen=True, slots=True)
class Part:
    """Of one shard: chunks of 128 outputs and k-blocks of 128 inputs that a CTA takes."""

    chunks: int
    kblocks: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    warps: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Launch A (gate, up) and launch B (down): a CTA's warps, chunks, k-blocks."""

    a_warps: int
    a_chunks: int
    a_kblocks: int
    b_warps: int
    b_chunks: int
    b_kblocks: int


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of scratch and int32 counters of one call."""

    scratch_bytes: int
    counters: int


@dataclass(frozen=True)
class Table:
    """``sms`` of the GPU it is for, each with ``shared_kb`` of shared memory for ``ctas_per_sm``
    CTAs of at most ``warps``: what the rule goes by. ``dense_rows`` and ``expert_slots``: up to
    where one call serves."""

    name: str
    origin: Literal["measured", "modelled"]
    how: str
    sms: int
    shared_kb: int
    dense_rows: int = MAX_ROWS
    expert_slots: int = MAX_SLOTS
    ctas_per_sm: int = 2
    warps: int = 8
    #: Slots from which on ``prefill`` serves; its variants up to so many rows an expert on average
    #: and beyond; its pool.
    prefill_slots: int = MAX_SLOTS + 1
    prefill_small: int = 44
    prefill_variants: tuple[int, int] = (0, 1)
    pool_mib: int = 352
    group: Mapping[tuple[tuple[Shape, ...], int], GroupPlan] = field(default_factory=dict)
    experts: Mapping[tuple[int, int, int], ExpertsPlan] = field(default_factory=dict)

    def group_plan(self, shapes: Sequence[Shape], rows: int) -> GroupPlan:
        """The plan of one launch over ``shapes`` for ``rows`` 1..64."""
        step = _step(rows, ROW_STEPS, "rows")
        found = self.group.get((tuple(shapes), step))
        return found or _group_rule(self, shapes, step)

    def experts_plan(
        self, hidden: int, inter: int, tokens: int, topk: int, max_k2: int
    ) -> ExpertsPlan:
        """The plan of both launches for tokens * top-k of 1..128."""
        step = _step(tokens * topk, SLOT_STEPS, "slots")
        found = self.experts.get((hidden, inter, step))
        return found or _experts_rule(self, hidden, inter, step, tokens, max_k2)

    def prefill_plan(self, slots: int, experts: int) -> PrefillPlan:
        """The plan of a prefill's experts call."""
        few, many = self.prefill_variants
        return PrefillPlan(many if slots > self.prefill_small * experts else few, self.pool_mib)

    def fits(self, shared: int) -> bool:
        """Whether as many CTAs as wanted are on an SM at once, by shared memory."""
        return self.resident(1, shared)[1] == self.ctas_per_sm

    def resident(self, warps: int, shared: int) -> tuple[int, int]:
        """Warps and CTAs on an SM at once, by shared memory; none of a CTA that is too large."""
        if shared + STATIC_SHARED > MOST_SHARED:
            return 0, 0
        room = (self.shared_kb << 10) // (shared + STATIC_SHARED + CHARGED)
        return warps * min(room, self.ctas_per_sm), min(room, self.ctas_per_sm)


def _step(count: int, steps: Sequence[int], what: str) -> int:
    for step in steps:
        if 0 < count <= step:
            return step
    raise PlanError(f"{count} {what}: a launch takes 1 to {steps[-1]}")


def _group_rule(table: Table, shapes: Sequence[Shape], rows: int) -> GroupPlan:
    """Of what leaves room for another CTA what costs least: the k-blocks of the busiest SM, and a
    round through scratch for each split; of those the most warps. The two costs are fitted to an
    H200 (wq_a at 4 rows: 3.5 us + 0.84 us a k-block + 0.21 us a split)."""
    most = max(shape.kblocks for shape in shapes)

    def parts(splits: int) -> tuple[Part, ...]:
        return tuple(Part(1, -(-shape.kblocks // splits)) for shape in shapes)

    def cost(chosen: GroupPlan) -> float:
        both = list(zip(shapes, chosen.parts, strict=True))
        splits = max(-(-shape.kblocks // part.kblocks) for shape, part in both)
        ctas = sum(s.chunks * -(-s.kblocks // part.kblocks) for s, part in both)
        each = max(part.kblocks for part in chosen.parts)
        return 0.84 * -(-ctas // table.sms) * each + 0.21 * splits

    every = [parts(splits) for splits in range(-(-most // MAX_KBLOCKS), most + 1)]
    sizes = range(table.warps, 3, -1)
    plans = (GroupPlan(warps, one) for warps in sizes for one in every)
    fitting = [one for one in plans if table.fits(group_shared(shapes, rows, one))]
    if fitting:
        return min(fitting, key=cost)
    return GroupPlan(4, tuple(Part(1, 1) for _ in shapes))


def _experts_rule(
    table: Table, hidden: int, inter: int, slots: int, tokens: int, max_k2: int
) -> ExpertsPlan:
    """Of all shapes of a CTA what keeps most warps at work: those on an SM at once, times the part
    of their rounds that has a k-block for each, times the part of the GPU that has a CTA. A split
    of the inputs costs a round through scratch, taken as a fiftieth of a warp."""
    kblocks, chunks = hidden // BLOCK, inter // BLOCK

    def work(warps: int, shared: int, items: int, ctas: int) -> float:
        there, each = table.resident(warps, shared)
        even = items / (warps * -(-items // warps))
        return there * even * min(1.0, ctas / max(1, table.sms * each))

    def score_a(one: ExpertsPlan) -> float:
        splits = -(-kblocks // one.a_kblocks)
        shared = experts_shared(inter, max_k2, one)[0]
        at_once = work(one.a_warps, shared, one.a_kblocks, slots * chunks * splits)
        return at_once - splits / 50

    def score_b(one: ExpertsPlan) -> float:
        splits = -(-chunks // one.b_kblocks)
        shared = experts_shared(inter, max_k2, one)[1]
        ctas = slots * -(-kblocks // one.b_chunks) * splits
        return work(one.b_warps, shared, one.b_kblocks * one.b_chunks, ctas) - splits / 50

    sizes = range(1, table.warps + 1)
    blocks = range(1, min(kblocks, MAX_KBLOCKS) + 1)
    chosen = max((ExpertsPlan(w, 1, n, 1, 1, chunks) for w in sizes for n in blocks), key=score_a)
    parts = sorted({-(-chunks // splits) for splits in (1, 2, 3)}, reverse=True)
    second = (
        replace(chosen, b_warps=w, b_chunks=n, b_kblocks=k)
        for w in sizes
        for n in (1, 2)
        if w % n == 0
        for k in parts
    )
    return max(second, key=score_b)


def ring_bytes(k2: int) -> int:
    """Of a warp's ring of stages for one rate, as engine.cuh sizes it."""
    tiles = 2 if k2 in (4, 6, 8) else 1
    return (4 if tiles == 1 and k2 <= 12 else 3) * tiles * BLOCK * k2


def flight_bytes(k2: int) -> int:
    """Bytes of weights that a warp has asked for and not yet got: all stages of its ring but the
    one it computes with. Rates without a kernel of their own have three stages of one tile."""
    if k2 not in TUNED:
        return 2 * BLOCK * k2
    tiles = 2 if k2 in (4, 6, 8) else 1
    return ring_bytes(k2) - tiles * BLOCK * k2


def _shared(warps: int, k2: int, blocks: int, height: int, padding: int = 0) -> int:
    ring = max(ring_bytes(rate) for rate in range(2, k2 + 1))
    return max(warps * ring + blocks * 256 * height + padding, warps * _SUMS)


def group_shared(shapes: Sequence[Shape], rows: int, plan: GroupPlan) -> int:
    """Dynamic shared memory of a CTA, in bytes."""
    both = zip(shapes, plan.parts, strict=True)
    blocks = max(min(shape.kblocks, part.kblocks) for shape, part in both)
    return _shared(plan.warps, max(s.k2 for s in shapes), blocks, 8 if rows <= 8 else 16)


def experts_shared(inter: int, max_k2: int, plan: ExpertsPlan) -> tuple[int, int]:
    """Dynamic shared memory of a CTA of launch A and of launch B, in bytes."""
    blocks = min(inter // BLOCK, plan.b_kblocks)
    return (
        _shared(plan.a_warps, max_k2, plan.a_kblocks, 8),
        _shared(plan.b_warps, max_k2, blocks, 8, padding=8 * 32),
    )


def check_group(plan: GroupPlan, shapes: Sequence[Shape]) -> None:
    """Raise PlanError unless exl3_group takes it."""
    if len(plan.parts) != len(shapes) or not 1 <= len(shapes) <= MAX_SHARDS:
        raise PlanError(f"{len(plan.parts)} parts for {len(shapes)} shards; at most {MAX_SHARDS}")
    _check_warps(plan.warps)
    for part in plan.parts:
        _check_part(part.chunks, part.kblocks, plan.warps)


def check_experts(plan: ExpertsPlan, inter: int) -> None:
    """Raise PlanError unless exl3_experts takes it."""
    _check_warps(plan.a_warps)
    _check_warps(plan.b_warps)
    _check_part(plan.a_chunks, plan.a_kblocks, plan.a_warps)
    _check_part(plan.b_chunks, 1, plan.b_warps)
    if inter > MAX_INTER or not 1 <= plan.b_kblocks <= MAX_INTER // BLOCK:
        raise PlanError(
            f"{inter} intermediate channels, {plan.b_kblocks} k-blocks; launch B takes at most "
            f"{MAX_INTER} and 1 to {MAX_INTER // BLOCK}"
        )


def _check_warps(warps: int) -> None:
    if not 1 <= warps <= MAX_WARPS:
        raise PlanError(f"{warps} warps a CTA; 1 to {MAX_WARPS}")


def _check_part(chunks: int, kblocks: int, warps: int) -> None:
    if not 1 <= chunks <= warps or warps % chunks or not 1 <= kblocks <= MAX_KBLOCKS:
        raise PlanError(
            f"{chunks} chunks and {kblocks} k-blocks for {warps} warps; the chunks divide the "
            f"warps, and at most {MAX_KBLOCKS} k-blocks fit"
        )


def group_need(shapes: Sequence[Shape], rows: int, plan: GroupPlan) -> Need:
    """What exl3_group_need says (api.h), without the library."""
    height = 8 if rows <= 8 else 16
    passes = -(-rows // height)
    scratch = counters = 0
    for shape, part in zip(shapes, plan.parts, strict=True):
        splits = -(-shape.kblocks // part.kblocks)
        if splits > 1:
            scratch += passes * shape.chunks * splits * height * 512
        counters += -(-shape.chunks // part.chunks)
    return Need(scratch, passes * counters)


def experts_need(
    hidden: int, inter: int, tokens: int, slots: int, shared: bool, plan: ExpertsPlan
) -> Need:
    """What exl3_experts_need says (api.h), without the library."""
    rows = slots + (tokens if shared else 0)
    splits = -(-(hidden // BLOCK) // plan.a_kblocks)
    parts = -(-(inter // BLOCK) // plan.b_kblocks)
    sizes = (rows * 2 * splits * inter * 4, rows * inter * 2, rows * parts * hidden * 4)
    counters = (slots + shared) * -(-(inter // BLOCK) // plan.a_chunks)
    counters += -(-(hidden // BLOCK) // plan.b_chunks)
    return Need(sum(-(-size // 256) * 256 for size in sizes), counters)


def parse(value: Mapping[str, Any], name: str) -> Table:
    """A table from its JSON. Raises PlanError for one that is not as it must be."""
    try:
        group = {
            (tuple(Shape(*shape) for shape in entry["shapes"]), int(entry["rows"])): GroupPlan(
                int(entry["warps"]), tuple(Part(*part) for part in entry["parts"])
            )
            for entry in value.get("group", ())
        }
        experts = {
            (int(entry["hidden"]), int(entry["inter"]), int(entry["slots"])): ExpertsPlan(
                *map(int, entry["plan"])
            )
            for entry in value.get("experts", ())
        }
        few, many = value.get("prefill_variants", (0, 1))
        table = Table(
            name=str(value["name"]),
            origin=value["origin"],
            how=str(value["how"]),
            sms=int(value["sms"]),
            shared_kb=int(value["shared_kb"]),
            dense_rows=int(value.get("dense_rows", MAX_ROWS)),
            expert_slots=int(value.get("expert_slots", MAX_SLOTS)),
            ctas_per_sm=int(value.get("ctas_per_sm", 2)),
            warps=int(value.get("warps", 8)),
            prefill_slots=int(value.get("prefill_slots", MAX_SLOTS + 1)),
            prefill_small=int(value.get("prefill_small", 44)),
            prefill_variants=(int(few), int(many)),
            pool_mib=int(value.get("pool_mib", 352)),
            group=group,
            experts=experts,
        )
        for (shapes, _), plan in group.items():
            check_group(plan, shapes)
        for (_, inter, _), experts_plan in experts.items():
            check_experts(experts_plan, inter)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{name}: no launch table ({type(error).__name__}: {error})") from error
    right = table.origin in ("measured", "modelled") and 1 <= table.dense_rows <= MAX_ROWS
    if not right or not 1 <= table.expert_slots <= MAX_SLOTS:
        raise PlanError(f"{name}: no launch table: origin, dense_rows or expert_slots is off")
    return table


def show(table: Table) -> dict[str, Any]:
    """The JSON of a table."""
    return {
        "name": table.name,
        "origin": table.origin,
        "how": table.how,
        "sms": table.sms,
        "shared_kb": table.shared_kb,
        "dense_rows": table.dense_rows,
        "expert_slots": table.expert_slots,
        "ctas_per_sm": table.ctas_per_sm,
        "warps": table.warps,
        "prefill_slots": table.prefill_slots,
        "prefill_small": table.prefill_small,
        "prefill_variants": list(table.prefill_variants),
        "pool_mib": table.pool_mib,
        "group": [
            {
                "shapes": [[s.inputs, s.outputs, s.k2] for s in shapes],
                "rows": rows,
                "warps": plan.warps,
                "parts": [[part.chunks, part.kblocks] for part in plan.parts],
            }
            for (shapes, rows), plan in table.group.items()
        ],
        "experts": [
            {
                "hidden": hidden,
                "inter": inter,
                "slots": slots,
                "plan": list(astuple(plan)),
            }
            for (hidden, inter, slots), plan in table.experts.items()
        ],
    }


@cache
def read(path: Path) -> Table:
    """Raises PlanError for a file that is missing or no table."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: no launch table ({error})") from error
    return parse(value, str(path))


@cache
def for_capability(major: int, minor: int) -> Table:
    """The table of a GPU: of SPARK_EXL3_TABLE where that is set, else the shipped one.

    Raises PlanError for a GPU older than sm_80 or a file that is no table."""
    if asked := os.environ.get(OVERRIDE):
        return read(Path(asked))
    number = 10 * major + minor
    below = [known for known in NEAREST if known <= number]
    if not below:
        raise PlanError(f"sm_{number}: the EXL3 kernels need sm_80 or newer")
    return read(TABLES / f"{NEAREST[max(below)]}.json")
