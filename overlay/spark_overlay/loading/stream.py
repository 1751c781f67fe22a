"""Blocks on their way: read ahead, staged, cut, and each tensor to its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from spark_overlay.loading.plan import BLOCK, Block, Wanted, blocks
from spark_overlay.loading.progress import Progress
from spark_overlay.loading.reader import Reader
from spark_overlay.loading.staging import Flat, Staging, place

log = logging.getLogger("vllm.spark_overlay.loading")

#: Reads at once, and blocks of staging: one is cut while the others are read.
THREADS = 6
SLOTS = 8

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}


@dataclass(slots=True)
class Place:
    """Into memory that is there already: the bytes from ``base`` on in ``target``; ``done`` is
    called when the last has come."""

    target: Flat
    base: int
    done: Callable[[], object]


@dataclass(slots=True)
class Handed:
    """Into a tensor of its own on the host; ``take`` gets it whole, None hands it on to whoever
    reads the stream."""

    take: Callable[[Tensor], object] | None = None
    memory: Flat | None = None


Into: TypeAlias = Place | Handed


def stream(
    wanted: Sequence[Wanted],
    device: torch.device,
    *,
    who: str = "rank 0",
    keep: bool = False,
    direct: bool = True,
    threads: int = THREADS,
    slots: int = SLOTS,
    size: int = BLOCK,
) -> Iterator[tuple[str, Tensor]]:
    """Read what is wanted (each ``into`` an ``Into``); yield the tensors that are handed on, on the
    host, as they come. ``keep``: through the page cache, and it stays. Raises LoadError."""
    plan = list(blocks(wanted, size))
    kept = sum(one.left for one in wanted)
    progress = Progress(who, sum(block.length for block in plan), kept, log.info)
    yield from (_handed(one) for one in wanted if not one.left and _goes_on(one.into))
    with (
        Staging(device, slots, size) as staging,
        closing(
            Reader(plan, staging.views, threads=threads, direct=direct, keep=keep, told=log.warning)
        ) as reader,
    ):
        before: int | None = None
        for block, slot in reader:
            yield from _cut(block, staging.host[slot], staging.upload(slot, block.length))
            if before is not None:
                staging.settle(before)
                reader.release(before)
            before = slot
            progress.add(block.length)
        if before is not None:
            staging.settle(before)
    progress.end()


def _cut(block: Block, host: Flat, there: Flat) -> Iterator[tuple[str, Tensor]]:
    for one in block.tensors:
        into: Into = one.into
        if isinstance(into, Place):
            source, target, base = there, into.target, into.base
        else:
            if into.memory is None:
                into.memory = Flat(torch.empty(one.cut.nbytes, dtype=torch.uint8, device="cpu"))
            source, target, base = host, into.memory, 0
        for piece in one.cut.pieces(block.begin, block.end):
            place(source, piece, target, base)
            one.left -= piece.width * piece.rows
        if one.left:
            continue
        if isinstance(into, Place):
            into.done()
        elif into.take is None:
            yield _handed(one)
        else:
            into.take(_handed(one)[1])


def _goes_on(into: Into) -> bool:
    return isinstance(into, Handed) and into.take is None


def _handed(one: Wanted) -> tuple[str, Tensor]:
    into: Handed = one.into
    held, into.memory = into.memory, None
    flat = torch.empty(0, dtype=torch.uint8, device="cpu") if held is None else held.bytes
    return one.name, flat.view(DTYPES[one.header.dtype]).reshape(one.header.shape)
