"""A copy that is done late: the next launch may start at once, and what it depends on comes after a
while. One that did not wait would read what was there before, or replace what is still to be read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spark_overlay.early import starts_early

#: Numbers of a program, few enough programs to run all at once; turns that it waits, 0.5 us each.
WORDS, TURNS = 4096, 200


@triton.jit
def _copy(to, source, words, clock, turns, EARLY: tl.constexpr, WORDS: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
    passed = 0
    for _ in range(turns):  # always 0, which no compiler knows
        passed = tl.atomic_add(clock + passed, 0)
    at = tl.program_id(0) * WORDS + passed + tl.arange(0, WORDS)
    tl.store(to + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit
def _peek(to, source, EARLY: tl.constexpr, WORDS: tl.constexpr):
    at = tl.arange(0, WORDS)
    tl.store(to + at, tl.load(source + at))
    if EARLY:
        gdc_wait()


def copy(to: Tensor, source: Tensor, clock: Tensor) -> None:
    """``source`` to ``to``, int32 ``[N]`` both; ``clock`` int32 ``[1]``, zero."""
    words, early = source.numel(), starts_early(to.device)
    _copy[(triton.cdiv(words, WORDS),)](to, source, words, clock, TURNS, EARLY=early, WORDS=WORDS)


def peek(to: Tensor, source: Tensor) -> None:
    """What is in ``source`` before the launch in front has ended, where that can be: its first
    ``WORDS`` numbers."""
    early = starts_early(to.device)
    more = {"launch_pdl": True} if early else {}
    _peek[(1,)](to, source, EARLY=early, WORDS=WORDS, **more)
