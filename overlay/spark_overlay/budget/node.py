"""Where the memory of a DGX Spark goes, and how far it can be stretched.

On a GB10 the GPU's memory is the host's: every row is part of the same 121.69 GiB. Rows say what
they stand on: "computed" from checkpoint and config; "set" by a setting; "published" where only a
measurement of this checkpoint on two Sparks is known (vLLM, TP2, 614,400 tokens of context, chunks
of 2048, a pool of 2.5 GiB: 98.93 GiB after loading, 4.14 available on the head when warm, 2.56
after a prompt of 455,000 tokens, 2.1 after 601,000); "estimate" where not even that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from spark_overlay.budget import kv
from spark_overlay.budget.buffers import (
    MIB,
    Serving,
    engram_staging,
    indexer_buffers,
    model_buffers,
)
from spark_overlay.budget.checkpoint import Contents
from spark_overlay.budget.shape import ModelShape
from spark_overlay.budget.weights import Part, total, weigh

GIB = 1 << 30
SPARK = int(121.69 * GIB)

#: vLLM's Python processes, system, Docker and desktop of the head. The worker has 1.7 GiB less.
PROCESSES = 9 * GIB
#: CUDA context, kernels, graphs and the allocator's slack: what the published boot leaves over.
CONTEXT = int(5.9 * GIB)
#: Pinned and mapped by NCCL with buffers of 1 MiB and 8 channels, and with NCCL's own.
NCCL_SMALL, NCCL_STOCK = int(0.14 * GIB), int(4.7 * GIB)
NCCL_SMALL_BUFFER = MIB
#: Streams, queries and the experts' intermediates of one token of a step.
STEP_BYTES = 400_000
#: What a long prompt takes for good, by its token: 1.58 GiB at 455,000, 2.04 at 601,000.
GROWTH_BYTES = 3_700
#: From this pool on, half a GiB more costs a prefill a whole one.
CHEAP_POOL = int(2.5 * GIB)
#: Nodes were wedged by long prompts in larger steps.
MAX_BATCH = 2048
#: Of a pool.
STEP = 64 * MIB

Basis = Literal["computed", "set", "published", "estimate"]


@dataclass(frozen=True)
class Row:
    name: str
    bytes: int
    basis: Basis


@dataclass(frozen=True)
class Asked:
    """What a node is to hold. ``pool`` and ``engram_cache`` in bytes, ``floor``: what must stay
    available at the worst moment; ``nccl_buffer``: NCCL_BUFFSIZE."""

    serving: Serving
    pool: int
    floor: int
    tp: int = 2
    memory: int = SPARK
    engram_cache: int = 0
    nccl_buffer: int = MIB


@dataclass(frozen=True)
class Node:
    rows: tuple[Row, ...]
    memory: int
    capacity: kv.Capacity
    prompt: int  # tokens of the longest prompt that can come
    low: int  # bytes available after it

    @property
    def used(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def left(self) -> int:
        """Bytes available when the server is warm."""
        return self.memory - self.used


@dataclass(frozen=True)
class Largest:
    """The most of one setting while the others stay; 0 where nothing fits."""

    max_len: int
    pool: int
    batch: int


def rank_rows(shape: ModelShape, contents: Contents, part: Part, asked: Asked) -> list[Row]:
    """What one rank takes beside its KV pool, as far as it can be computed."""
    serving, tp = asked.serving, asked.tp
    buffers = model_buffers(shape, part, tp, serving)
    staging = engram_staging(shape, part, tp, serving)
    rows = [
        Row("weights", total(weigh(contents, shape, part, tp)), "computed"),
        Row("the model's buffers", sum(each.bytes for each in buffers), "computed"),
        Row("Engram staging", sum(each.bytes for each in staging), "computed"),
    ]
    rows += [Row(each.name, each.bytes, "set") for each in indexer_buffers(shape, part, serving)]
    if asked.engram_cache:
        rows.append(Row("Engram rows kept (DSV41_CACHE_GIB)", asked.engram_cache, "set"))
    rows.append(Row("a step's activations", serving.batch * STEP_BYTES, "estimate"))
    if tp > 1:
        small = asked.nccl_buffer <= NCCL_SMALL_BUFFER
        rows.append(Row("NCCL's buffers", NCCL_SMALL if small else NCCL_STOCK, "published"))
    return rows


def node(shape: ModelShape, contents: Contents, asked: Asked) -> Node:
    """The table of one Spark with one rank of ``asked.tp``. Raises Exl3FormatError, BudgetError."""
    serving = asked.serving
    part = Part.whole(shape, draft=serving.draft, vision=serving.vision)
    rows = rank_rows(shape, contents, part, asked)
    rows.insert(1, Row("KV pool", asked.pool, "set"))
    rows.append(Row("CUDA context, kernels, graphs", CONTEXT, "published"))
    rows.append(Row("processes, system, desktop", PROCESSES, "published"))
    capacity = kv.capacity(shape, [part], [asked.pool], serving)
    prompt = min(serving.max_len, capacity.tokens)
    left = asked.memory - sum(row.bytes for row in rows)
    return Node(tuple(rows), asked.memory, capacity, prompt, low_water(left, prompt, asked.pool))


def low_water(left: int, prompt: int, pool: int) -> int:
    """Bytes available after a prompt, of ``left`` before it."""
    return left - prompt * GROWTH_BYTES - max(0, pool - CHEAP_POOL)


def largest(shape: ModelShape, contents: Contents, asked: Asked) -> Largest:
    """How far each setting goes by itself before a long prompt breaks the floor."""
    first = node(shape, contents, asked)
    part = Part.whole(shape, draft=asked.serving.draft, vision=asked.serving.vision)
    fixed = sum(row.bytes for row in first.rows) - _settable(shape, part, asked)

    def holds(trial: Asked) -> bool:
        serving = trial.serving
        left = trial.memory - fixed - _settable(shape, part, trial)
        requests = kv.capacity(shape, [part], [trial.pool], serving).requests
        return requests >= 1 and low_water(left, serving.max_len, trial.pool) >= trial.floor

    def long(max_len: int) -> bool:
        return holds(replace(asked, serving=replace(asked.serving, max_len=max_len)))

    def wide(batch: int) -> bool:
        return holds(replace(asked, serving=replace(asked.serving, batch=batch)))

    one = first.capacity.blocks_per_request * first.capacity.block_bytes
    pools = range(-(-one // STEP) * STEP, 64 * GIB, STEP)
    return Largest(
        _most(range(1024, shape.max_position + 1, 1024), long),
        _most(pools, lambda pool: holds(replace(asked, pool=pool))),
        _most(range(64, MAX_BATCH + 1, 64), wide),
    )


def _settable(shape: ModelShape, part: Part, asked: Asked) -> int:
    """Bytes of the rows that context, pool and batch decide."""
    serving = asked.serving
    buffers = [
        *model_buffers(shape, part, asked.tp, serving),
        *engram_staging(shape, part, asked.tp, serving),
        *indexer_buffers(shape, part, serving),
    ]
    return sum(each.bytes for each in buffers) + asked.pool + serving.batch * STEP_BYTES


def _most(choices: range, holds: Callable[[int], bool]) -> int:
    """The largest choice that holds, where all smaller ones do; 0 for none."""
    low, high = -1, len(choices) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if holds(choices[middle]):
            low = middle
        else:
            high = middle - 1
    return choices[low] if low >= 0 else 0
