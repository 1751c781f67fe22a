"""Sizes of the indexer's launches and of its workspace. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from spark_overlay.indexer.kernels import select

#: Numbers (int32 or float32) to which every part of the workspace is rounded: 128 bytes.
ROUNDED = 32
LINE = select.LINE.value
#: Values that a step of a choice looks at, at most: 32 a thread.
MOST = 16384
#: More scores or positions than there can be.
NEVER = 1 << 60
#: Keys, warps and stages of the dense scores by rows that a program takes, as measured on an H200;
#: shared memory fits every GPU's 99 KB.
DENSE = {1: (128, 4, 5), 2: (128, 4, 2), 4: (128, 4, 2), 8: (64, 4, 3)}


@dataclass(frozen=True)
class Tuning:
    """Shapes of the launches; all of them give the same result.

    ``group``: query rows a program of the dense scores takes at most; ``waves``: programs per
    multiprocessor, which share a row's keys where rows are few; ``last``: values of a row among
    which it chooses at once; ``fan``: scores of which the best is written."""

    group: int = 8
    keys: int = 0  # this and the next two: 0 is what DENSE says of the group
    warps: int = 0
    stages: int = 0
    waves: int = 2
    candidate_keys: int = 128
    candidate_warps: int = 4
    candidate_stages: int = 3
    fan: int = 16
    last: int = 8192
    choice_warps: int = 16
    library: bool = True  # the CUDA library where it is and can
    early: bool = True  # its choice starts while Triton's scores end, too, where launches may
    # Dense scores of several rows are the library's from so many of a decode step on (all
    # requests'), a prompt's from so many positions on. The host knows upper bounds of both.
    enough: int = 1 << 19
    prompt_width: int = 16384
    together: int = 8  # rows of a request that its dense scores take at once, at most
    held: int = 1  # CTAs that do so on a multiprocessor at once: a large one, or 2 or 3


@dataclass(frozen=True)
class Steps:
    """Values that a row's choice looks at in each step (select.choose); 0: the step is not."""

    last: int
    middle: int
    first: int
    picked: int  # blocks between two steps, at most


def steps_of(entries: int, count: int, fan: int, last: int) -> Steps:
    """For ``count`` of at most ``entries``, in blocks of ``fan``; ``last`` if that holds twice the
    count's blocks, else what does. Sizes are few: each is a kernel of its own to compile."""
    last = max(last, triton.next_power_of_2(count * fan), LINE)
    if entries <= last:
        few = max(last // 4, LINE)
        return Steps(few if entries <= few else last, 0, 0, count)
    picked = max(count, last // fan)
    blocks = -(-entries // fan)
    few = max(last // 8, LINE)
    middle = few if blocks <= few else last
    if blocks <= middle:
        return Steps(last, middle, 0, picked)
    few = max(last // 2, LINE)
    more = few if blocks <= few * fan else MOST
    if blocks > more * fan:
        raise ValueError(
            f"{entries} values are more than the indexer chooses of ({MOST * fan * fan}): serve a "
            "shorter context"
        )
    return Steps(last, middle, more, picked)


@dataclass(frozen=True)
class Plan:
    """Numbers a row needs in the workspace."""

    width: int  # scores
    tops: int  # the best of each few
    lists: int  # of picked blocks

    @property
    def numbers(self) -> int:
        return self.width + self.tops + self.lists


def rounded(count: int) -> int:
    return -(-count // ROUNDED) * ROUNDED


def plan(width: int, fan: int) -> Plan:
    """Of a call that scores ``width`` positions a row and writes the best of each ``fan``."""
    return Plan(rounded(width), rounded(-(-width // fan)), 2 * MOST // fan)


def workspace_numbers(
    rows: int, width: int, blocks: int, size: int, most: int, tuning: Tuning
) -> int:
    """Numbers of a workspace for steps of ``rows`` rows that see ``width`` positions: all rows at
    once, but not over ``most`` unless a single row needs more. ``blocks`` candidates of ``size``
    are chosen, too (0: none)."""
    each = plan(width, size if blocks else tuning.fan).numbers
    return max(each, min(rows * each, most))


def group_for(longest: int, most: int) -> int:
    """Rows a program takes: what a request has, as a power of two, at most ``most``."""
    return min(triton.next_power_of_2(max(longest, 1)), most)
