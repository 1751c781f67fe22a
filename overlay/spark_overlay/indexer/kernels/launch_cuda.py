"""The launches of one call by the CUDA library: the same results as Triton's kernels.

The library chooses; it scores where a request has one row, and candidates of a decode step. Of
several rows that share their keys Triton's scores are as fast, and of a prompt's faster. Triton's
also take what the library does not: other numbers of heads, pages it cannot read, longer contexts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spark_overlay.indexer.kernels import library, select
from spark_overlay.indexer.kernels.library import ChooseArgs, ScoresArgs, StepArgs

if TYPE_CHECKING:
    from spark_overlay.indexer.kernels.launch import Candidates, Rows, Step

KEYS, WARPS = 32, 4  # keys of a warp, warps of a CTA
CTAS, CANDIDATE_CTAS = 3, 2  # that a multiprocessor holds at once
POSITIONS_MOST, CANDIDATE_SIZE = 512, 8
#: Rows of a request in a decode step, at most.
DECODED = 8


def serves(
    q: Tensor,
    cache: Tensor,
    step: Step,
    width: int,
    count: int,
    fan: int,
    candidates: Candidates | None,
) -> bool:
    """Whether the library computes such a call: of ``fan`` scores the best is written."""
    if not (q.is_cuda and library.present()) or q.shape[1] != library.HEADS or fan not in (8, 16):
        return False
    numbers = [step.request, step.starts, step.lengths, step.table]
    if candidates is not None:
        numbers.append(candidates.chosen)
    if any(one.dtype != torch.int32 or one.stride(-1) != 1 for one in numbers):
        return False
    states = cache.shape[1]
    pages = states >= KEYS and states & (states - 1) == 0
    aligned = not (cache.data_ptr() % 16 or cache.stride(0) % 16 or q.data_ptr() % 16)
    few = width <= library.MOST_ENTRIES * fan and count <= POSITIONS_MOST
    if candidates is not None:
        most = candidates.chosen.shape[1]
        few = few and candidates.size == CANDIDATE_SIZE and most <= library.MOST_CHOSEN
        few = few and -(-width // CANDIDATE_SIZE) <= library.MOST_ENTRIES
    return pages and aligned and few


def scores_too(step: Step, limited: bool) -> bool:
    """Whether of a call that the library serves it makes the scores, too."""
    return step.longest <= (DECODED if limited else 1)


def step_of(rows: Rows, ratio: int) -> StepArgs:
    step = rows.step
    return StepArgs(
        request=step.request.data_ptr(),
        starts=step.starts.data_ptr(),
        lengths=step.lengths.data_ptr(),
        requests=step.starts.shape[0] - 1,
        first_row=rows.first,
        rows=rows.last,
        width=rows.width,
        ratio=ratio,
    )


def scores(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    rows: Rows,
    fan: int,
    ratio: int,
    multiprocessors: int,
    candidates: Candidates | None = None,
) -> None:
    """Fill ``rows.scores`` and ``rows.tops``: of all positions, or of ``candidates``."""
    step = rows.step
    requests = step.starts.shape[0] - 1
    parts = max(step.longest, 1)
    width = rows.width
    if candidates is not None:
        width = candidates.chosen.shape[1] * candidates.size
    ctas = CTAS if candidates is None else CANDIDATE_CTAS
    wanted = ctas * multiprocessors // (requests * parts)
    splits = max(1, min(wanted, -(-width // (KEYS * WARPS)), 65535))
    args = ScoresArgs(
        q=q.data_ptr(),
        weights=weights.data_ptr(),
        cache=cache.data_ptr(),
        stride=cache.stride(0),
        table=step.table.data_ptr(),
        table_row=step.table.stride(0),
        out=rows.scores.data_ptr(),
        out_row=rows.scores.stride(0),
        tops=rows.tops.data_ptr(),
        tops_row=rows.tops.stride(0),
        blocks=cache.shape[0],
        states=cache.shape[1],
        fan=fan,
        parts=parts,
        splits=splits,
    )
    if candidates is not None:
        args.chosen, args.chosen_row = candidates.chosen.data_ptr(), candidates.chosen.stride(0)
        args.chosen_count = candidates.chosen.shape[1]
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream(q.device).cuda_stream
        library.load().scores(step_of(rows, ratio), args, stream)


def choose(
    rows: Rows,
    final: Tensor,
    kind: int,
    entries: int,
    fan: int,
    ratio: int,
    candidates: Candidates | None,
) -> None:
    """The best of each row's values, at most ``entries``, to ``final``."""
    values = rows.tops if kind == select.BLOCKS.value else rows.scores
    args = ChooseArgs(
        values=values.data_ptr(),
        values_row=values.stride(0),
        tops=rows.tops.data_ptr(),
        tops_row=rows.tops.stride(0),
        final=final.data_ptr(),
        final_row=final.stride(0),
        kind=kind,
        count=final.shape[1],
        fan=fan,
        size=1 if candidates is None else candidates.size,
        entries=entries,
        early=rows.scored_by_library or rows.early,
    )
    if candidates is not None:
        args.chosen, args.chosen_row = candidates.chosen.data_ptr(), candidates.chosen.stride(0)
        args.chosen_count = candidates.chosen.shape[1]
    with torch.cuda.device(final.device):
        stream = torch.cuda.current_stream(final.device).cuda_stream
        library.load().choose(step_of(rows, ratio), args, stream)
