"""What the tensors of a checkpoint weigh on one rank, by class.

Packed matrices are counted as the loader allocates them (spark_overlay.exl3.shares). What is not
packed lies whole on every rank, but for the embedding and the attention sinks. Counted is the
packed form that kernels read; the torch path without kernels holds every matrix decoded beside it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from spark_overlay.budget.checkpoint import Contents
from spark_overlay.budget.names import Place, native_place, packed_place
from spark_overlay.budget.shape import BudgetError, ModelShape
from spark_overlay.exl3.modules import Exl3Facts
from spark_overlay.exl3.shares import share, share_bytes

#: vLLM makes the vocabulary a multiple of this before it cuts it.
VOCAB_STEP = 64


@dataclass(frozen=True)
class Part:
    """What of the model a rank holds. ``layers`` of the backbone; the embedding is the first
    pipeline stage's, norm, head and draft are the last one's."""

    layers: range
    first: bool = True
    last: bool = True
    draft: bool = True
    vision: bool = True

    @classmethod
    def whole(cls, shape: ModelShape, *, draft: bool = True, vision: bool = True) -> Part:
        return cls(range(shape.layers), draft=draft, vision=vision)

    def holds(self, place: Place) -> bool:
        match place.where:
            case "layer":
                return place.layer in self.layers
            case "draft":
                return self.last and self.draft
            case "vision":  # every pipeline stage builds the tower
                return self.vision
            case "embedding":  # a draft on a stage without the target's has one of its own
                return self.first or (self.last and self.draft)
            case "top":
                return self.last
            case _:
                return True


@dataclass(frozen=True)
class ClassWeight:
    """``stored`` bytes of ``tensors`` tensors in the checkpoint are ``resident`` on one rank.
    ``split`` says how ranks share them."""

    name: str
    split: str
    tensors: int
    stored: int
    resident: int


class _Table:
    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list[int]] = {}

    def add(self, place: Place, tensors: int, stored: int, resident: int) -> None:
        row = self.rows.setdefault((place.name, place.split), [0, 0, 0])
        for at, value in enumerate((tensors, stored, resident)):
            row[at] += value


def weigh(
    contents: Contents, shape: ModelShape, part: Part, tp: int, rank: int = 0
) -> list[ClassWeight]:
    """Every class of tensor, heaviest first, whether this rank holds any of it or not.

    Raises Exl3FormatError where ``tp`` ranks cannot share a matrix, Exl3NameError and BudgetError
    for a tensor that V4.1 has no place for.
    """
    return [*_weigh(contents, shape, part, tp, rank)]


@lru_cache(512)  # a plan asks for the same stages again and again
def _weigh(
    contents: Contents, shape: ModelShape, part: Part, tp: int, rank: int
) -> tuple[ClassWeight, ...]:
    table = _Table()
    _weigh_packed(table, contents, shape, part, tp, rank)
    _weigh_native(table, contents, shape, part, tp)
    heaviest = sorted(table.rows.items(), key=lambda row: (-row[1][2], row[0]))
    return tuple(ClassWeight(name, split, *row) for (name, split), row in heaviest)


def total(rows: Collection[ClassWeight]) -> int:
    """Resident bytes of a rank."""
    return sum(row.resident for row in rows)


def _weigh_packed(
    table: _Table, contents: Contents, shape: ModelShape, part: Part, tp: int, rank: int
) -> None:
    for facts, count in contents.kinds.items():
        place = packed_place(facts.key)
        resident = 0
        if part.holds(place):
            resident = share_bytes(facts, share(facts, rank, tp, shape.o_groups))
        marker = facts.codebook != "3inst"
        stored = facts.trellis_bytes + 4 * marker + _side_bytes(facts)
        table.add(place, count * (3 + marker), count * stored, count * resident)


def _side_bytes(facts: Exl3Facts) -> int:
    """Stored bytes of the scales, or of the sign bits of an old pack."""
    sides = ((facts.in_features, facts.legacy_su), (facts.out_features, facts.legacy_sv))
    return sum(size // 8 if legacy else 2 * size for size, legacy in sides)


def _weigh_native(
    table: _Table, contents: Contents, shape: ModelShape, part: Part, tp: int
) -> None:
    unknown = []
    for tensor, header in contents.native.items():
        place = native_place(tensor)
        if place is None:
            unknown.append(tensor)
            continue
        held = part.holds(place)
        resident = place.element * _elements(header.shape, tensor, place, tp) if held else 0
        table.add(place, 1, header.nbytes, resident)
        # vLLM makes the router a bias for image tokens wherever the model has a tower, though some
        # packs do not store it and a text-only server does not use it.
        lacks = tensor.endswith(".ffn.gate.bias") and f"{tensor}_vl" not in contents.native
        if lacks and shape.vision.layers:
            table.add(place, 0, 0, resident)
    if unknown:
        raise BudgetError(
            f"{len(unknown)} tensors that DeepSeek V4.1 as an EXL3 pack has no place for, first "
            f"{', '.join(sorted(unknown)[:3])}: the checkpoint is of another model, or not EXL3"
        )


def _elements(size: tuple[int, ...], tensor: str, place: Place, tp: int) -> int:
    """Elements of this rank; of a native tensor every rank has as many."""
    count = math.prod(size)
    by_rows = place.split == "vocabulary" or tensor.endswith(".markov_head.head.weight")
    if by_rows:
        rows = -(-size[0] // VOCAB_STEP) * VOCAB_STEP
        count = count // size[0] * rows
    if place.split in ("none", "file"):
        return count
    if count % tp:
        raise BudgetError(f"{tensor}: {list(size)} cannot be shared by {tp} ranks")
    return count // tp
