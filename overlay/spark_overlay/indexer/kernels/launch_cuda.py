"""The launches of one call by the CUDA library: the same results as Triton's kernels.

The library chooses; it makes the scores, too, a request's rows at once where they share their keys.
Triton makes those that ``Tuning`` leaves it (of several rows where they are few) and what the
library does not take: other numbers of heads, pages it cannot read, longer contexts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spark_overlay.indexer.kernels import library, select
from spark_overlay.indexer.kernels.library import ChooseArgs, ScoresArgs, StepArgs

if TYPE_CHECKING:
    from spark_overlay.indexer.kernels.launch import Candidates, Rows, Step
    from spark_overlay.indexer.kernels.sizes import Tuning

KEYS, WARPS = 32, 4  # keys of a warp, warps of a CTA
CTAS, CANDIDATE_CTAS = 3, 2  # that a multiprocessor holds at once, by registers
#: Bytes of shared memory of a CTA that scores several rows: CUDA's, a warp's keys', a row's; the
#: last two are scores_rows.cu's, which says the same.
RESERVED, STAGE, ROW = 1024, 4096, 8336
#: Rows at once that are worth a CTA less on a multiprocessor: keys are made fp16 once for all.
ENOUGH = 4
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
    if step.table.stride(0) < step.table.shape[1]:
        return False  # rows that lie in each other
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


def scores_too(step: Step, limited: bool, width: int, tuning: Tuning) -> bool:
    """Whether of a call that the library serves it makes the scores, too: of candidates those of
    a decode step; over all ``width`` positions what ``tuning`` says."""
    if limited:
        return step.longest <= DECODED
    if step.longest > DECODED:
        return width >= tuning.prompt_width
    scores = (step.starts.shape[0] - 1) * step.longest * width
    return step.longest == 1 or scores >= tuning.enough


@dataclass(frozen=True)
class Shares:
    """How CTAs share a request's rows and keys: see csrc/indexer/api.h."""

    group: int
    held: int
    parts: int
    splits: int  # where they are more than the keys give work to, they share a group's rows, too


def shares(
    requests: int,
    rows: int,
    longest: int,
    width: int,
    together: int,
    held: int,
    multiprocessors: int,
    shared: int,
) -> Shares:
    """Of scores of ``rows`` rows, at most ``longest`` of a request and ``together`` at once, over
    at most ``width`` positions; ``shared``: bytes of shared memory of a multiprocessor, which is
    to hold ``held`` CTAs that take several rows."""
    longest = max(1, min(longest, rows))
    warps = WARPS
    wanted = max(1, min(longest, together, library.MOST_ROWS))
    ctas, group = CTAS, wanted
    if wanted > 1:
        warps = 3 * WARPS if held == 1 else WARPS
        used = RESERVED + warps * STAGE
        room = {n: (shared // n - used) // ROW for n in range(held, 0, -1)}
        ctas = next((n for n in room if room[n] >= min(wanted, ENOUGH)), 1)
        group = max(1, min(wanted, room[ctas]))
    parts = -(-longest // group)
    group = -(-longest // parts)  # as many each
    # Groups that have rows, at most: not every request has as many as the longest.
    groups = min(requests * parts, requests + rows // group)
    slots = ctas * multiprocessors
    most = max(1, min(-(-width // (KEYS * warps)) * group, 65535))
    few = max(1, slots // groups)
    # As near below a whole number of rounds as a few more of them come.
    splits = min(range(few, few + 8), key=lambda n: -(-groups * n // slots) / n)
    return Shares(group, 1 if warps > WARPS else CTAS, parts, min(splits, most))


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that the CTAs of a multiprocessor share."""
    if device.type != "cuda":
        return 100 << 10  # the least that a GPU has which the library is for
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


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
    together: int = 1,
    held: int = CTAS,
    candidates: Candidates | None = None,
) -> None:
    """Fill ``rows.scores`` and ``rows.tops``: of all positions, ``together`` rows of a request at
    once at most by ``held`` CTAs of a multiprocessor, or of ``candidates``."""
    step = rows.step
    requests = step.starts.shape[0] - 1
    if candidates is None:
        count, shared = rows.last - rows.first, shared_memory(q.device)
        chip = (multiprocessors, shared)
        by = shares(requests, count, step.longest, rows.width, together, held, *chip)
    else:
        parts = max(step.longest, 1)
        wanted = CANDIDATE_CTAS * multiprocessors // (requests * parts)
        width = candidates.chosen.shape[1] * candidates.size
        by = Shares(1, CTAS, parts, max(1, min(wanted, -(-width // (KEYS * WARPS)), 65535)))
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
        group=by.group,
        held=by.held,
        parts=by.parts,
        splits=by.splits,
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
    few = rows.step.longest <= DECODED  # a prompt's choice would hold room while it waits
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
        early=(rows.scored_by_library and few) or rows.early,
    )
    if candidates is not None:
        args.chosen, args.chosen_row = candidates.chosen.data_ptr(), candidates.chosen.stride(0)
        args.chosen_count = candidates.chosen.shape[1]
    with torch.cuda.device(final.device):
        stream = torch.cuda.current_stream(final.device).cuda_stream
        library.load().choose(step_of(rows, ratio), args, stream)
