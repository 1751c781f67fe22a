"""One call of the indexer: scores, candidate blocks and choice of a step's rows.

Rows are taken as many at a time as the workspace holds the scores of; everything else is decided
on the device. Host values used: the step's padded row count, and upper bounds of how far its rows
see and of how many rows a request has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from spark_overlay.early import starts_early
from spark_overlay.indexer.format import KEY_DIM, STATE_BYTES
from spark_overlay.indexer.kernels import launch_cuda, library, logits, select
from spark_overlay.indexer.kernels.sizes import (
    DENSE,
    MOST,
    NEVER,
    Plan,
    Tuning,
    group_for,
    plan,
    steps_of,
)


@dataclass(frozen=True)
class Step:
    """What a step's metadata says of its rows.

    ``request [>=T]`` int32: a row's request; ``starts [R + 1]`` int32: where each request's rows
    begin, the last is how many rows are not padding; ``lengths [R]`` int32: tokens of a request,
    its rows are the last of them; ``table [R, P]`` int32: its pages. On the host: ``longest``, rows
    of a request at most, and ``bound``, tokens of a request at most."""

    request: Tensor
    starts: Tensor
    lengths: Tensor
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


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter runs one program after another
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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

    def compile(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        step: Step,
        final: Tensor,
        candidates: Candidates | None = None,
    ) -> None:
        """Every kernel that a call on such tensors can come to need, by calls for its first rows:
        one compiled or loaded later would hold up a reply. What they write is what those get."""
        few = min(2, len(q), len(final))  # two: the library scores several at once
        if candidates is not None:
            candidates = replace(candidates, chosen=candidates.chosen[:few])
        most = step.table.shape[1] * cache.shape[1] * self.ratio
        # Rows of a request: each group of Triton's scores, and a prompt's. Few are Triton's, too.
        more = launch_cuda.DECODED + 1
        rows = [*(group for group in DENSE if group <= self.tuning.group), more]
        layers = [with_tuning(self, enough=NEVER, prompt_width=NEVER)]
        if self.tuning.library and library.present():
            layers.append(with_tuning(self, enough=0, prompt_width=0))
        # Lengths on either side of each size that a choice knows.
        bounds = sorted({most, *(1 << n for n in range(most.bit_length()))})
        for longest, bound in [*((1, n) for n in bounds), *((n, most) for n in rows)]:
            some = replace(step, longest=longest, bound=bound)
            for layer in layers:
                layer(q[:few], weights[:few], cache, some, final[:few], candidates)

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
            step.request,
            step.starts,
            step.lengths,
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
        limited = candidates is not None and not candidates.write
        scored, fan = width, self.tuning.fan
        if candidates is not None:
            if limited:
                scored = candidates.chosen.shape[1] * candidates.size
            else:
                fan = candidates.size
        by_library = self.tuning.library and launch_cuda.serves(
            q, cache, step, width, self.count, fan, candidates
        )
        scored_by_library = by_library and launch_cuda.scores_too(step, limited, width, self.tuning)
        used = plan(scored, fan)
        at_once = self.workspace.numel() // used.numbers
        if not at_once:
            raise ValueError(
                f"the indexer's workspace has {self.workspace.numel()} numbers, a row that sees "
                f"{width} positions needs {used.numbers}"
            )
        total = final.shape[0]
        for first in range(0, total, at_once):
            last = min(first + at_once, total)
            parts = self._parts(used, last - first)
            early = by_library and not limited and self._early(step, q.device)
            rows = Rows(step, first, last, width, *parts, by_library, scored_by_library, early)
            if limited:
                assert candidates is not None
                self._candidate_scores(q, weights, cache, rows, candidates, fan)
                self._choose(rows, final, select.CANDIDATES.value, scored, fan, candidates)
                continue
            self._scores(q, weights, cache, rows, fan)
            if candidates is not None:
                self._choose(
                    rows, candidates.chosen, select.BLOCKS.value, -(-width // fan), fan, candidates
                )
            self._choose(rows, final, select.POSITIONS.value, scored, fan, None)

    def _parts(self, used: Plan, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and the best of each few, float32, and lists int32: ``[rows, numbers]``."""
        sizes = (used.width, used.tops, used.lists)
        found, begin = [], 0
        for each in sizes:
            found.append(self.workspace[begin : begin + rows * each].view(rows, each))
            begin += rows * each
        scores, tops, lists = found
        return scores.view(torch.float32), tops.view(torch.float32), lists

    def _early(self, step: Step, device: torch.device) -> bool:
        """Of a prompt's rows each would hold a multiprocessor's room while it waits."""
        few = step.longest <= launch_cuda.DECODED
        return self.tuning.early and few and starts_early(device)

    def _splits(self, programs: int, width: int, keys: int, device: torch.device) -> int:
        """Programs that share one row's keys."""
        wanted = -(-self.tuning.waves * multiprocessors(device) // programs)
        return max(1, min(wanted, -(-width // keys)))

    def _scores(self, q: Tensor, weights: Tensor, cache: Tensor, rows: Rows, fan: int) -> None:
        if rows.scored_by_library:
            size = multiprocessors(q.device)
            how = (self.tuning.together, self.tuning.held)
            launch_cuda.scores(q, weights, cache, rows, fan, self.ratio, size, *how)
            return
        tuning, step = self.tuning, rows.step
        group = group_for(step.longest, tuning.group)
        keys, warps, stages = DENSE[group]
        keys = tuning.keys or keys
        tiles = -(-(rows.last - rows.first) // group)
        splits = self._splits(tiles, rows.width, keys, q.device)
        logits.dense_logits[(tiles, splits)](
            q,
            weights,
            cache,
            step.table,
            step.request,
            step.starts,
            step.lengths,
            rows.scores,
            rows.tops,
            rows.first,
            rows.last,
            step.starts.shape[0] - 1,
            rows.width,
            cache.shape[0],
            cache.stride(0),
            step.table.stride(0),
            rows.scores.stride(0),
            rows.tops.stride(0),
            RATIO=self.ratio,
            STATES=cache.shape[1],
            HEADS=q.shape[1],
            PADDED=max(16, triton.next_power_of_2(q.shape[1])),
            GROUP=group,
            KEYS=keys,
            FAN=fan,
            PACKED=q.is_cuda,
            EARLY=rows.early,
            num_warps=tuning.warps or warps,
            num_stages=tuning.stages or stages,
        )

    def _candidate_scores(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        rows: Rows,
        candidates: Candidates,
        fan: int,
    ) -> None:
        if rows.scored_by_library:
            size = multiprocessors(q.device)
            launch_cuda.scores(
                q, weights, cache, rows, fan, self.ratio, size, candidates=candidates
            )
            return
        tuning, step, chosen = self.tuning, rows.step, candidates.chosen
        most = chosen.shape[1] * candidates.size
        count = rows.last - rows.first
        splits = self._splits(count, most, tuning.candidate_keys, q.device)
        logits.candidate_logits[(count, splits)](
            q,
            weights,
            cache,
            step.table,
            step.request,
            step.starts,
            step.lengths,
            chosen,
            rows.scores,
            rows.tops,
            rows.first,
            rows.last,
            step.starts.shape[0] - 1,
            rows.width,
            cache.shape[0],
            cache.stride(0),
            step.table.stride(0),
            chosen.stride(0),
            rows.scores.stride(0),
            rows.tops.stride(0),
            RATIO=self.ratio,
            STATES=cache.shape[1],
            HEADS=q.shape[1],
            PADDED=max(16, triton.next_power_of_2(q.shape[1])),
            KEYS=tuning.candidate_keys,
            SIZE=candidates.size,
            COUNT=chosen.shape[1],
            FAN=fan,
            PACKED=q.is_cuda,
            num_warps=tuning.candidate_warps,
            num_stages=tuning.candidate_stages,
        )

    def _choose(
        self,
        rows: Rows,
        final: Tensor,
        kind: int,
        entries: int,
        fan: int,
        candidates: Candidates | None,
    ) -> None:
        """The best of each row's values, at most ``entries``, to ``final``."""
        if rows.by_library:
            launch_cuda.choose(rows, final, kind, entries, fan, self.ratio, candidates)
            return
        step, count = rows.step, final.shape[1]
        blocks = kind == select.BLOCKS.value
        values = rows.tops if blocks else rows.scores
        # A block's best is written for positions alone: of blocks, eight are read for each.
        sizes = steps_of(entries, count, fan, MOST if blocks else self.tuning.last)
        if blocks and sizes.first:
            raise ValueError(f"{entries} blocks are more than candidates are chosen of")
        chosen = final if candidates is None else candidates.chosen
        select.choose[(rows.last - rows.first,)](
            values,
            rows.tops,
            chosen,
            step.request,
            step.starts,
            step.lengths,
            final,
            rows.lists,
            rows.first,
            rows.last,
            step.starts.shape[0] - 1,
            rows.width,
            values.stride(0),
            rows.tops.stride(0),
            chosen.stride(0),
            final.stride(0),
            rows.lists.stride(0),
            RATIO=self.ratio,
            KIND=kind,
            SIZE=1 if candidates is None else candidates.size,
            CHOSEN=chosen.shape[1],
            COUNT=count,
            TAIL=triton.next_power_of_2(count),
            PICKED=sizes.picked,
            ROOM=triton.next_power_of_2(sizes.picked),
            FAN=fan,
            LAST=sizes.last,
            MIDDLE=sizes.middle,
            FIRST=sizes.first,
            num_warps=self.tuning.choice_warps * (1 + (max(sizes.last, sizes.first) >= MOST)),
        )


@dataclass(frozen=True)
class Rows:
    """Rows ``first .. last`` of a step, which see at most ``width``, and their workspace."""

    step: Step
    first: int
    last: int
    width: int
    scores: Tensor
    tops: Tensor
    lists: Tensor
    by_library: bool = False  # chosen of
    scored_by_library: bool = False
    early: bool = False  # the choice starts while Triton's scores end


def with_tuning(selection: Selection, **changes: Any) -> Selection:
    """The same layer with other launch shapes; for measuring."""
    return Selection(
        selection.ratio,
        selection.count,
        selection.workspace,
        replace(selection.tuning, **changes),
    )
