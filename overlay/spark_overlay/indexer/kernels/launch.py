"""One call of the indexer: scores, candidate blocks and choice of a step's rows.

Rows are taken as many at a time as the workspace holds the scores of; everything else is decided
on the device. Host values used: the step's padded row count, and upper bounds of how far its rows
see and of how many rows a request has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from spark_overlay.indexer.format import KEY_DIM, STATE_BYTES
from spark_overlay.indexer.kernels import logits, select

#: Numbers (int32 or float32) to which every part of the workspace is rounded: 128 bytes.
ROUNDED = 32


@dataclass(frozen=True)
class Tuning:
    """Shapes of the launches; all of them give the same result.

    ``group``: query rows a program of the dense scores takes at most; ``waves``: programs it is
    given per multiprocessor, which share a row's keys where rows are few; ``block``: values of a
    program of the choice, more than twice what is chosen."""

    keys: int = 128
    group: int = 4
    warps: int = 4
    stages: int = 3
    waves: int = 4
    candidate_keys: int = 128
    candidate_warps: int = 4
    candidate_stages: int = 3
    block: int = 16384
    block_warps: int = 16


@dataclass(frozen=True)
class Step:
    """What a step's metadata says of its rows.

    ``request [>=T]`` int32: a row's request; ``starts [R + 1]`` int32: where each request's rows
    begin, the last is how many rows are not padding; ``positions [>=T]`` int64; ``table [R, P]``
    int32: pages of a request. On the host: ``longest``, rows of a request at most, and ``bound``,
    tokens of a request at most."""

    request: Tensor
    starts: Tensor
    positions: Tensor
    table: Tensor
    longest: int
    bound: int


@dataclass(frozen=True)
class Candidates:
    """``chosen [>=T, B]`` int32: blocks of ``size`` positions for each row, ascending, -1 padded.
    ``write``: they are chosen in this call, and do not limit it."""

    chosen: Tensor
    size: int
    write: bool


@dataclass(frozen=True)
class Plan:
    """Numbers a row needs in the workspace."""

    width: int  # scores
    best: int  # best scores of blocks
    rounds: tuple[int, ...]  # keys (and as many places) that each round but the last writes

    @property
    def numbers(self) -> int:
        return self.width + self.best + 2 * sum(self.rounds)


def rounded(count: int) -> int:
    return -(-count // ROUNDED) * ROUNDED


def rounds_of(entries: int, count: int, block: int) -> tuple[int, ...]:
    """Numbers each round but the last writes, for ``count`` of ``entries``."""
    if 2 * count > block:
        raise ValueError(f"{count} of blocks of {block}: a block must hold twice what is chosen")
    found = []
    while entries > block:
        entries = -(-entries // block) * count
        found.append(rounded(entries))
    return tuple(found)


def plan(width: int, count: int, blocks: int, size: int, block: int) -> Plan:
    """Of a call that scores ``width`` positions a row; ``blocks`` candidates of ``size`` are
    written (0: none)."""
    rounds = rounds_of(width, count, block)
    if not blocks:
        return Plan(rounded(width), 0, rounds)
    tops = -(-width // size)
    more = rounds_of(tops, blocks, block)
    longer = tuple(max(pair) for pair in _zipped(rounds, more))
    return Plan(rounded(width), rounded(tops), longer)


def _zipped(one: tuple[int, ...], other: tuple[int, ...]) -> list[tuple[int, int]]:
    most = max(len(one), len(other))
    filled = [(*each, *(0,) * (most - len(each))) for each in (one, other)]
    return list(zip(*filled, strict=True))


def workspace_numbers(
    rows: int, width: int, count: int, blocks: int, size: int, most: int, tuning: Tuning
) -> int:
    """Numbers of a workspace for steps of ``rows`` rows that see ``width`` positions: all rows at
    once, but not over ``most`` unless a single row needs more."""
    each = plan(width, count, blocks, size, tuning.block).numbers
    return max(each, min(rows * each, most))


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter runs one program after another
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def group_for(longest: int, most: int) -> int:
    """Rows a program takes: what a request has, as a power of two, at most ``most``."""
    return min(triton.next_power_of_2(max(longest, 1)), most)


class Selection:
    """The launches of one indexer layer; see ``__call__``.

    ``workspace``: int32 ``[numbers]`` on the device, for scores and what rounds hand on; it may be
    shared by layers that run one after another."""

    def __init__(self, ratio: int, count: int, workspace: Tensor, tuning: Tuning | None = None):
        self.ratio = ratio
        self.count = count
        self.workspace = workspace
        self.tuning = tuning or Tuning()

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        step: Step,
        final: Tensor,
        candidates: Candidates | None = None,
    ) -> None:
        """Fill ``final [T, count]`` int32 with each row's best positions, ascending, -1 padded.

        ``q [>=T, H, 128]`` e4m3 (or its bytes), ``weights [>=T, H]`` float32, ``cache [N, states,
        132]`` uint8 at any page stride that is a multiple of 4. ``T`` may be more than the step's
        rows: padding gets -1. Raises ValueError for what the kernels cannot read."""
        rows = final.shape[0]
        if not rows:
            return
        self._check(q, weights, cache, final)
        states = cache.shape[1]
        width = min(step.bound // self.ratio, step.table.shape[1] * states)
        if width <= self.count:
            self._fill(step, final, width)
            return
        if candidates is not None and width <= candidates.chosen.shape[1] * candidates.size:
            candidates = None  # every block is one
        self._run(q.view(torch.uint8), weights, cache, step, final, candidates, width)

    def _check(self, q: Tensor, weights: Tensor, cache: Tensor, final: Tensor) -> None:
        if q.shape[-1] != KEY_DIM or q.element_size() != 1 or not q.is_contiguous():
            raise ValueError(f"queries must be contiguous e4m3 [T, H, {KEY_DIM}], not {q.shape}")
        if weights.shape != q.shape[:2] or weights.dtype != torch.float32:
            raise ValueError(f"weights must be float32 {tuple(q.shape[:2])}, not {weights.shape}")
        if not weights.is_contiguous() or final.stride(1) != 1 or final.shape[1] != self.count:
            raise ValueError(f"weights and the choice [T, {self.count}] must have whole rows")
        if cache.dtype != torch.uint8 or cache.shape[2] != STATE_BYTES or cache.stride(0) % 4:
            raise ValueError(
                f"index keys must be uint8 [pages, states, {STATE_BYTES}] with pages at multiples "
                f"of 4 bytes, not {cache.dtype} {tuple(cache.shape)}, {cache.stride(0)} apart"
            )

    def _fill(self, step: Step, final: Tensor, width: int) -> None:
        rows = final.shape[0]
        select.fill_visible[(rows,)](
            step.starts,
            step.positions,
            final,
            rows,
            step.starts.shape[0] - 1,
            width,
            final.stride(0),
            RATIO=self.ratio,
            COUNT=self.count,
            PADDED=triton.next_power_of_2(self.count),
            num_warps=4,
        )

    def _run(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        step: Step,
        final: Tensor,
        candidates: Candidates | None,
        width: int,
    ) -> None:
        block = self.tuning.block
        limited = candidates is not None and not candidates.write
        count, size = 0, 1
        if candidates is not None:
            count, size = candidates.chosen.shape[1], candidates.size
        used = plan(
            count * size if limited else width, self.count, 0 if limited else count, size, block
        )
        most = self.workspace.numel() // used.numbers
        if not most:
            raise ValueError(
                f"the indexer's workspace has {self.workspace.numel()} numbers, a row that sees "
                f"{width} positions needs {used.numbers}"
            )
        total = final.shape[0]
        for first in range(0, total, most):
            last = min(first + most, total)
            parts = self._parts(used, last - first)
            if limited:
                assert candidates is not None
                self._candidate_scores(
                    q, weights, cache, step, candidates, parts[0], first, last, width
                )
            else:
                self._scores(q, weights, cache, step, candidates, parts, first, last, width)
            if candidates is not None and candidates.write:
                self._choose(
                    parts[1], parts[2:], step, candidates.chosen, None, first, last, width,
                    select.BLOCKS.value, candidates.size, count,
                )  # fmt: skip
            kind = select.CANDIDATES.value if limited else select.POSITIONS.value
            chosen = candidates.chosen if candidates is not None and limited else None
            self._choose(
                parts[0], parts[2:], step, final, chosen, first, last, width, kind, size, self.count
            )

    def _parts(self, used: Plan, rows: int) -> list[Tensor]:
        """Scores, blocks' best scores, and keys and places of each round: ``[rows, numbers]``."""
        sizes = [used.width, used.best]
        for each in used.rounds:
            sizes += [each, each]
        found, begin = [], 0
        for each in sizes:
            found.append(self.workspace[begin : begin + rows * each].view(rows, each))
            begin += rows * each
        found[:2] = [part.view(torch.float32) for part in found[:2]]
        return found

    def _splits(self, programs: int, width: int, keys: int, device: torch.device) -> int:
        """Programs that share one row's keys."""
        wanted = -(-self.tuning.waves * multiprocessors(device) // programs)
        return max(1, min(wanted, -(-width // keys)))

    def _scores(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        step: Step,
        candidates: Candidates | None,
        parts: list[Tensor],
        first: int,
        last: int,
        width: int,
    ) -> None:
        tuning, (out, best) = self.tuning, parts[:2]
        group = group_for(step.longest, tuning.group)
        tiles = -(-(last - first) // group)
        splits = self._splits(tiles, width, tuning.keys, q.device)
        logits.dense_logits[(tiles, splits)](
            q,
            weights,
            cache,
            step.table,
            step.request,
            step.starts,
            step.positions,
            out,
            best,
            first,
            last,
            step.starts.shape[0] - 1,
            width,
            cache.shape[0],
            cache.stride(0),
            step.table.stride(0),
            out.stride(0),
            max(best.stride(0), ROUNDED),
            RATIO=self.ratio,
            STATES=cache.shape[1],
            HEADS=q.shape[1],
            PADDED=max(16, triton.next_power_of_2(q.shape[1])),
            GROUP=group,
            KEYS=tuning.keys,
            SIZE=0 if candidates is None else candidates.size,
            PACKED=q.is_cuda,
            num_warps=tuning.warps,
            num_stages=tuning.stages,
        )

    def _candidate_scores(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        step: Step,
        candidates: Candidates,
        out: Tensor,
        first: int,
        last: int,
        width: int,
    ) -> None:
        tuning, chosen = self.tuning, candidates.chosen
        most = chosen.shape[1] * candidates.size
        splits = self._splits(last - first, most, tuning.candidate_keys, q.device)
        logits.candidate_logits[(last - first, splits)](
            q,
            weights,
            cache,
            step.table,
            step.request,
            step.starts,
            step.positions,
            chosen,
            out,
            first,
            last,
            step.starts.shape[0] - 1,
            width,
            cache.shape[0],
            cache.stride(0),
            step.table.stride(0),
            chosen.stride(0),
            out.stride(0),
            RATIO=self.ratio,
            STATES=cache.shape[1],
            HEADS=q.shape[1],
            PADDED=max(16, triton.next_power_of_2(q.shape[1])),
            KEYS=tuning.candidate_keys,
            SIZE=candidates.size,
            COUNT=chosen.shape[1],
            PACKED=q.is_cuda,
            num_warps=tuning.candidate_warps,
            num_stages=tuning.candidate_stages,
        )

    def _choose(
        self,
        values: Tensor,
        handed: list[Tensor],
        step: Step,
        final: Tensor,
        chosen: Tensor | None,
        first: int,
        last: int,
        width: int,
        kind: int,
        size: int,
        count: int,
    ) -> None:
        """``values`` of rows ``first .. last`` to their best ``count`` in ``final``."""
        tuning = self.tuning
        most = width
        if kind == select.BLOCKS.value:
            most = -(-width // size)
        elif chosen is not None:
            most = chosen.shape[1] * size
        places = values  # round 0 reads none
        for number in range(len(rounds_of(most, count, tuning.block)) + 1):
            parts = -(-most // tuning.block)
            keys, next_places, *_ = [*handed[2 * number : 2 * number + 2], values, values]
            select.choose[(last - first, parts)](
                values,
                places,
                final if chosen is None else chosen,
                step.starts,
                step.positions,
                final,
                keys,
                next_places,
                first,
                last,
                last,
                step.starts.shape[0] - 1,
                width,
                values.stride(0),
                0 if chosen is None else chosen.stride(0),
                final.stride(0),
                keys.stride(0),
                RATIO=self.ratio,
                KIND=kind,
                SIZE=size,
                CHOSEN=0 if chosen is None else chosen.shape[1],
                COUNT=count,
                TAIL=triton.next_power_of_2(count),
                BLOCK=tuning.block,
                ROUND=number,
                num_warps=tuning.block_warps,
            )
            values, places, most = keys, next_places, parts * count


def with_tuning(selection: Selection, **changes: int) -> Selection:
    """The same layer with other launch shapes; for measuring."""
    return Selection(
        selection.ratio,
        selection.count,
        selection.workspace,
        replace(selection.tuning, **changes),
    )
