"""The plan of other machines: every way to spread the model over N GPUs, and the KV they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import launcher.plan.overlay  # noqa: F401  (before spark_overlay)
from launcher.plan.machines import SMALL_RECORD, Machine, capability
from launcher.plan.source import NAME as PUBLISHED
from launcher.plan.source import Source
from launcher.plan.words import gib, tokens
from spark_overlay.budget import kv
from spark_overlay.budget.layouts import Layout, layout, layouts, tp_faults
from spark_overlay.budget.node import CONTEXT, GIB, PROCESSES, Asked, rank_rows
from spark_overlay.budget.weights import total, weigh

#: Of a GPU of its own: CUDA context, kernels, graphs, and the allocator's slack.
GPU_CONTEXT = 3 * GIB
#: What the published boot keeps free on a Spark, whose system lives from the same memory.
SPARK_FREE = 4 * GIB
#: Both Engram tables, in GiB.
TABLES = 189
#: TP2 x PP3 of six A100-class GPUs, as DeepInfer-SM80 serves from (a fork of vLLM).
SIX = (14, 14, 12)
SIX_NOTE = (
    "the layout of DeepInfer-SM80, whose fork of vLLM shares KV between stages; it reports "
    "4,648,480 tokens on six GPUs of 64 GB, from the native checkpoint"
)


@dataclass(frozen=True)
class Way:
    """A layout on a machine. ``weights`` and ``pool``: bytes of the heaviest stage's GPU and of
    the tightest pool; ``longest``: tokens of one request, and ``tokens`` in requests as long."""

    layout: Layout
    weights: int
    pool: int
    tokens: int = 0
    longest: int = 0

    @property
    def fits(self) -> bool:
        return self.longest > 0

    @property
    def runs(self) -> bool:
        return self.fits and not self.layout.faults


def plan_machine(
    source: Source, machine: Machine, gpus: int, asked: Asked, stages: Sequence[int] = ()
) -> list[Way]:
    """Every layout of ``gpus``, or the one with so many layers a stage.

    Raises BudgetError for stages that are no partition or do not divide the GPUs.
    """
    shape, contents = source.shape, source.contents
    # Up to the model's own length, with a workspace that does not hold 40 such prompts.
    serving = replace(
        asked.serving,
        max_len=shape.max_position,
        workspace=min(asked.serving.workspace, asked.serving.requests),
    )
    asked = replace(asked, serving=serving)
    if stages:
        found = [layout(shape, contents, gpus // len(stages), stages, draft=serving.draft)]
    else:
        found = layouts(shape, contents, gpus, draft=serving.draft, vision=serving.vision)
        if gpus == 6 and shape.layers == sum(SIX):
            known = layout(shape, contents, 2, SIX, draft=serving.draft)
            found.append(replace(known, notes=(SIX_NOTE, *known.notes)))
    return [_way(source, machine, each, asked) for each in found]


def _way(source: Source, machine: Machine, chosen: Layout, asked: Asked) -> Way:
    shape, serving = source.shape, asked.serving
    parts = chosen.parts(draft=serving.draft, vision=serving.vision)
    if chosen.tp_faults:
        # No rank can hold a part of what cannot be cut: an even share, for the size alone.
        whole = sum(total(weigh(source.contents, shape, part, 1)) for part in parts)
        return Way(chosen, whole // (chosen.tp * chosen.pp), 0)
    asked = replace(asked, tp=chosen.tp)
    memory = int(machine.memory * GIB)
    taken = CONTEXT + PROCESSES + SPARK_FREE if machine.unified else GPU_CONTEXT
    pools, weights = [], 0
    for part in parts:
        rows = rank_rows(shape, source.contents, part, asked)
        weights = max(weights, rows[0].bytes)
        pools.append(memory - taken - sum(row.bytes for row in rows))
    pool = min(pools)
    if pool <= 0:
        return Way(chosen, weights, pool)
    longest = kv.longest(shape, parts, pools, serving, shape.max_position)
    if not longest:
        return Way(chosen, weights, pool)
    capacity = kv.capacity(shape, parts, pools, replace(serving, max_len=longest))
    return Way(chosen, weights, pool, capacity.tokens, longest)


def tell(source: Source, machine: Machine, gpus: int, ways: Sequence[Way]) -> Iterator[str]:
    yield f"checkpoint: {source.name}"
    yield f"{gpus} x {machine.name}, {machine.memory:g} GiB each, {machine.arch}"
    yield from _common(source, machine)
    for way in ways:
        yield ""
        yield f"{_name(way)}: {_verdict(way)}"
        yield f"  {gib(way.weights)} GiB of weights on the heaviest GPU"
        if way.pool:
            yield f"  {gib(way.pool)} GiB are left for its KV pool"
        for fault in way.layout.faults:
            yield f"  refused: {fault}"
        for note in way.layout.notes:
            yield f"  note: {note}"
    yield ""
    yield from remarks(source, gpus)
    if any(way.runs for way in ways):
        yield from CLOSING
    else:
        yield "None of these runs: it takes more GPUs, or GPUs with more memory."


def remarks(source: Source, gpus: int) -> list[str]:
    """On layouts of so many GPUs that are no TP x PP."""
    if gpus != 6:
        return []
    wide = tp_faults(source.shape, source.contents, 4)
    return [
        "TP2 beside TP4, as was tried on six GPUs: refused: vLLM gives every stage the same TP"
        + (f"; and at TP4 {wide[-1]}" if wide else "")
    ]


CLOSING = (
    "The launcher starts TP2 on two nodes; other layouts are started by hand, a pipeline's stages",
    "with vLLM's VLLM_PP_LAYER_PARTITION.",
)


def tell_all(source: Source, machine: Machine, found: Mapping[int, Sequence[Way]]) -> Iterator[str]:
    """The best way of each number of GPUs, a line each."""
    yield f"checkpoint: {source.name}"
    yield f"{machine.name}, {machine.memory:g} GiB each, {machine.arch}"
    yield from _common(source, machine)
    for gpus, ways in found.items():
        running = [way for way in ways if way.runs]
        if running:
            best = max(running, key=lambda way: way.tokens)
            yield f"  {gpus}: {_name(best)}: {_verdict(best)}"
        else:
            smallest = min(ways, key=lambda way: (bool(way.layout.faults), way.weights))
            yield f"  {gpus}: none; {_name(smallest)} needs {gib(smallest.weights)} GiB for weights"
    yield "With --gpus N every layout of that number is shown, and why it fails."


def _name(way: Way) -> str:
    stages = f" ({', '.join(map(str, way.layout.layers))} layers)"
    return way.layout.name + (stages if way.layout.pp > 1 else "")


def _verdict(way: Way) -> str:
    if not way.fits:
        size = "fits" if way.layout.tp_faults else "too little memory"
        return "refused" if way.layout.faults and size == "fits" else size
    much = f"{tokens(way.tokens)} tokens of KV, requests up to {tokens(way.longest)}"
    return f"refused; would hold {much}" if way.layout.faults else much


def _common(source: Source, machine: Machine) -> Iterator[str]:
    if capability(machine.arch) in SMALL_RECORD:
        yield "  SM100 keeps 528 bytes a token, not 584: its KV holds about a tenth more than shown"
    if source.shape.engram_layers:
        size = f", {TABLES} GiB on every node" if source.name == PUBLISHED else ""
        yield f"  Engram's tables are read from files{size}: memory holds only the rows of a step"


def as_json(source: Source, machine: Machine, gpus: int, ways: Sequence[Way]) -> dict[str, Any]:
    return {
        "checkpoint": source.name,
        "machine": {"name": machine.name, "memory_gib": machine.memory, "arch": machine.arch},
        "gpus": gpus,
        "remarks": remarks(source, gpus),
        "layouts": [
            {
                "name": way.layout.name,
                "tp": way.layout.tp,
                "layers": list(way.layout.layers),
                "runs": way.runs,
                "fits": way.fits,
                "refused": list(way.layout.faults),
                "notes": list(way.layout.notes),
                "weights_bytes": way.weights,
                "kv_pool_bytes": max(0, way.pool),
                "kv_tokens": way.tokens,
                "longest_request": way.longest,
            }
            for way in ways
        ],
    }
