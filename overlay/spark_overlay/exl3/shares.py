"""Which part of a packed matrix a tensor-parallel rank holds: the one rule of loader and budget.

The loader allocates by ``share`` and compares it with the sizes of vLLM's own layer; the budget
(spark_overlay.budget) adds up the same shares from headers alone. No numpy, no torch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from spark_overlay.exl3.layout import TILE, Exl3FormatError, Exl3Slice
from spark_overlay.exl3.modules import Exl3Facts
from spark_overlay.exl3.names import parse

#: By output columns; by input rows; whole matrices, one for each group of heads; not at all.
Split = Literal["columns", "rows", "groups", "none"]

_COLUMNS = frozenset(
    ["attn.wq_b", "ffn.shared_experts.gate_up_proj", "engram.wkv", "lm_head"]
)  # the head's columns are the vocabulary
_ROWS = frozenset(["attn.wo_b", "ffn.shared_experts.down_proj"])
_GATE_AND_UP = ("w1", "w3")


@lru_cache(4096)
def split_of(key: str) -> Split:
    """How the ranks share a packed linear. Raises Exl3NameError for a name V4.1 does not have."""
    target = parse(key)
    if target.module == "ffn.experts":
        return "columns" if target.shard in _GATE_AND_UP else "rows"
    if target.slice is not None:
        return "groups"
    if target.module in _COLUMNS:
        return "columns"
    return "rows" if target.module in _ROWS else "none"


def share(facts: Exl3Facts, rank: int, tp: int, groups: int = 0) -> Exl3Slice | None:
    """What ``rank`` of ``tp`` keeps of a matrix; None if it holds nothing of it.

    ``groups`` (o_groups) is needed for ``attn.wo_a`` alone, whose slices go to ranks in order.
    Raises Exl3FormatError where a cut would go through a block of 128 or through a group.
    """
    if not 0 <= rank < tp:
        raise Exl3FormatError(f"{facts.key}: there is no rank {rank} of {tp}")
    split = split_of(facts.key)
    if split == "columns":
        return facts.column_slice(*facts.column_ranges(tp)[rank])
    if split == "rows":
        return facts.row_slice(*facts.row_ranges(tp)[rank])
    if split == "groups":
        if groups < 1 or groups % tp:
            raise Exl3FormatError(
                f"{facts.key}: {tp} ranks cannot hold whole ones of {groups} groups"
            )
        index = parse(facts.key).slice
        assert index is not None
        if index // (groups // tp) != rank:
            return None
    return facts.column_slice(0, facts.out_features)


def share_sizes(facts: Exl3Facts, part: Exl3Slice) -> tuple[int, int]:
    """Input and output channels of a share."""
    rows, columns, _ = facts.trellis_shape
    tiles = [
        len(range(*cut.indices(n))) for cut, n in zip(part.trellis, (rows, columns), strict=True)
    ]
    return TILE * tiles[0], TILE * tiles[1]


def share_bytes(facts: Exl3Facts, part: Exl3Slice | None) -> int:
    """Bytes that a rank allocates for its share: trellis, and fp16 ``suh`` and ``svh``.

    Markers and legacy sign bits are read and not kept.
    """
    if part is None:
        return 0
    n_in, n_out = share_sizes(facts, part)
    return n_in * n_out * facts.k2 // 16 + 2 * (n_in + n_out)
