"""A long prompt on its way in: lines of its progress, and when the allocator gives memory back.

Pure: what was scheduled, the clock, MemAvailable and the release come as arguments. vLLM moves its
own counter of prompt tokens only when the first token of the answer is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spark_overlay.memory.readings import GIB, gib

#: A step with more tokens of a request than this is a prefill, as one of its prompt is (a last
#: chunk may be small); DSpark verifies at most 6.
DECODE = 64


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request in one step. ``before``: tokens computed before it; ``prompt``: tokens of the
    whole prompt."""

    request: str
    before: int
    tokens: int
    prompt: int

    @property
    def after(self) -> int:
        return self.before + self.tokens

    @property
    def prefills(self) -> bool:
        return self.tokens > DECODE or self.before < self.prompt

    @property
    def done(self) -> bool:
        return self.after >= self.prompt


@dataclass(frozen=True, slots=True)
class Rule:
    """``tokens``: prompt length from which memory is given back between chunks, while MemAvailable
    is under ``below`` bytes (0: always). ``at_end``: once more when such a prompt is done."""

    tokens: int
    below: int
    at_end: bool = False


class Release:
    """Gives cached blocks of the allocator back after a step, by ``rule``. Releasing always would
    cost a fifth of the prefill's speed, so it is done when memory is short only."""

    def __init__(
        self,
        rule: Rule,
        available: Callable[[], int],
        release: Callable[[], None],
        write: Callable[[str], None],
    ) -> None:
        self._rule, self._available, self._release = rule, available, release
        self._write = write
        self.count = 0

    def after(self, step: Iterable[Scheduled]) -> bool:
        """Whether memory was given back after this step."""
        long = [one for one in step if one.prefills and one.after >= self._rule.tokens]
        if not long:
            return False
        before = self._available()
        low = self._rule.below == 0 or before < self._rule.below
        if not low and not (self._rule.at_end and any(one.done for one in long)):
            return False
        self._release()
        self.count += 1
        if self.count == 1 or self.count % 64 == 0:
            now = self._available()
            self._write(
                f"[mem] released after {max(one.after for one in long)} tokens of a prompt: "
                f"{gib(before)} -> {gib(now)} GiB available, {self.count} times so far"
            )
        return True


class Progress:
    """Every ``every`` tokens of a prompt, and at its end: how far it is, and how fast."""

    def __init__(
        self,
        every: int,
        mark: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every, self._mark, self._clock = every, mark, clock
        self._since: dict[
            str, tuple[int, float]
        ] = {}  # request -> tokens, seconds at the last line
        self._ended = clock()  # of the step before

    def after(self, step: Sequence[Scheduled], gone: Iterable[str] = ()) -> None:
        """``gone``: requests that have ended, by whatever way."""
        for request in gone:
            self._since.pop(request, None)
        now, began = self._clock(), self._ended
        self._ended = now
        for one in step:
            if not one.prefills and one.request not in self._since:
                continue
            tokens, since = self._since.setdefault(one.request, (one.before, began))
            if one.before < tokens:  # preempted: it begins again
                tokens, since = self._since[one.request] = (one.before, began)
            if one.after - tokens < self._every and not one.done:
                continue
            if one.done:
                del self._since[one.request]
            else:
                self._since[one.request] = (one.after, now)
            if one.prompt < self._every:
                continue  # a short prompt is not worth a line
            reached = min(one.after, one.prompt)
            rate = (reached - tokens) / max(now - since, 1e-9)
            self._mark(f"prefill {reached} of {one.prompt} tokens, {rate:.1f} tok/s")


def every(max_model_len: int, chunk: int) -> int:
    """Tokens between two lines: some 64 a prompt of full length, never less than a chunk."""
    return max(chunk, min(8192, max_model_len // 64), 1)


def rule(tokens: int, below_gib: float, at_end: bool) -> Rule:
    return Rule(tokens, int(below_gib * GIB), at_end)
