"""The plan of this pair: one Spark's table, how far each setting goes, a split that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import launcher.plan.overlay  # noqa: F401  (before spark_overlay)
from launcher.plan.source import Source
from launcher.plan.words import gib, rows_of, tokens
from spark_overlay.budget.node import Asked, Largest, Node, largest, node
from spark_overlay.budget.weights import Part, total, weigh


@dataclass(frozen=True)
class PairPlan:
    """``whole`` is the weights of one Spark that held the whole model, in bytes."""

    source: Source
    asked: Asked
    node: Node
    largest: Largest
    whole: int

    @property
    def fits(self) -> bool:
        """One full prompt comes and leaves the floor, and the pool holds it."""
        return self.node.low >= self.asked.floor and self.node.capacity.requests >= 1


def plan_pair(source: Source, asked: Asked) -> PairPlan:
    """Raises Exl3FormatError and BudgetError for a checkpoint that two ranks cannot share."""
    shape, contents, serving = source.shape, source.contents, asked.serving
    part = Part.whole(shape, draft=serving.draft, vision=serving.vision)
    return PairPlan(
        source,
        asked,
        node(shape, contents, asked),
        largest(shape, contents, asked),
        total(weigh(contents, shape, part, 1)),
    )


def tell(plan: PairPlan) -> Iterator[str]:
    """The plan in words, line by line."""
    asked, found = plan.asked, plan.node
    yield f"checkpoint: {plan.source.name}"
    yield f"a DGX Spark with one rank of TP{asked.tp}, GiB:"
    yield from rows_of(found.rows)
    yield f"  {'available when warm':<36}{gib(found.left):>8}  of {gib(found.memory)}"
    yield f"  {f'after a prompt of {tokens(found.prompt)} tokens':<36}{gib(found.low):>8}"
    yield ""
    pool = found.capacity
    yield (
        f"KV cache: {tokens(pool.tokens)} tokens, {pool.requests:.2f} requests of "
        f"{tokens(asked.serving.max_len)} (MAX_MODEL_LEN)"
    )
    floor = f"{gib(asked.floor)} GiB (DSV41_MEM_GUARD_GIB)"
    if plan.fits:
        yield f"It fits: the longest prompt leaves more than {floor}."
    elif pool.requests < 1:
        yield "It does not fit: the KV pool does not hold one request of MAX_MODEL_LEN."
    else:
        yield f"It does not fit: the longest prompt leaves less than {floor}."
    yield "The most of each setting while the others stay:"
    yield f"  MAX_MODEL_LEN           {_most(plan.largest.max_len, tokens)}"
    yield f"  KV_CACHE_MEMORY_BYTES   {_most(plan.largest.pool, str)}"
    yield f"  MAX_NUM_BATCHED_TOKENS  {_most(plan.largest.batch, str)}"
    yield from _advice(plan)
    yield ""
    yield (
        "Prefill on one Spark and decoding on the other: each would hold the whole model, "
        f"{gib(plan.whole)} GiB of weights in {gib(found.memory)} GiB. It takes two Sparks a side."
    )


def _advice(plan: PairPlan) -> Iterator[str]:
    serving = plan.asked.serving
    if not plan.fits and serving.workspace > 1:
        yield (
            "Next: DSV41_INDEXER_PREFILL_FACTOR=1 makes the indexer's workspace "
            f"{serving.workspace} times smaller."
        )


def _most(value: int, how: Any) -> str:
    return how(value) if value else "none: change another setting first"


def as_json(plan: PairPlan) -> dict[str, Any]:
    found, pool = plan.node, plan.node.capacity
    return {
        "checkpoint": plan.source.name,
        "tp": plan.asked.tp,
        "fits": plan.fits,
        "memory_bytes": found.memory,
        "rows": [{"name": r.name, "bytes": r.bytes, "basis": r.basis} for r in found.rows],
        "available_bytes": found.left,
        "after_prompt": {"tokens": found.prompt, "available_bytes": found.low},
        "floor_bytes": plan.asked.floor,
        "kv": {"tokens": pool.tokens, "requests": pool.requests, "blocks": pool.blocks},
        "largest": {
            "MAX_MODEL_LEN": plan.largest.max_len,
            "KV_CACHE_MEMORY_BYTES": plan.largest.pool,
            "MAX_NUM_BATCHED_TOKENS": plan.largest.batch,
        },
        "prefill_decode_split": {
            "weights_bytes_each": plan.whole,
            "fits": plan.whole < found.memory,
        },
    }
