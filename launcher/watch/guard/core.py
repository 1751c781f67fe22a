"""What the guard makes of its samples. Pure: no clock, no /proc, no Docker.

MemAvailable alone says that memory is short, not who took it. A guard that ends the server because
an upload beside it was greedy does harm, so growth is attributed before anything is stopped. CUDA's
memory on a GB10 is nobody's RSS: it is what the kernel's own accounts leave open (``driver``), and
the server's, which is the node's user of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
STALLED = 25.0  # percent of ten seconds in which every process waited for memory
SHORT = 4  # … and that counts as low only below so many times the floor
HORIZONS = (60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0)  # seconds looked back over, the nearest first
TAKEN = GIB // 2  # what must be gone within a horizon before it says who took it
REMIND = 30.0  # seconds between two lines on the same trouble
ADVICE = "systemd-run --scope -p MemoryMax=2G <job> keeps such a job within bounds"


@dataclass(frozen=True, slots=True)
class Process:
    """``private``: anonymous memory and what of it is swapped out; ``shared``: tmpfs and shm."""

    pid: int
    ticks: int  # start, so that a reused pid is another process
    name: str
    private: int
    shared: int = 0

    @property
    def size(self) -> int:
        return self.private + self.shared


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes; ``full`` is PSI's percent of ten seconds, None where the kernel has none. ``at`` in
    seconds of a clock that never goes back."""

    at: float
    available: int
    free: int
    cached: int
    shmem: int
    driver: int
    swap_used: int
    full: float | None
    own: tuple[Process, ...]
    others: tuple[Process, ...]

    @property
    def own_size(self) -> int:
        return size(self.own) + self.driver


def size(group: Sequence[Process]) -> int:
    """Shared memory of a group is counted once."""
    return sum(each.private for each in group) + max((each.shared for each in group), default=0)


@dataclass(frozen=True, slots=True)
class Policy:
    """``floor`` bytes of MemAvailable; ``samples`` looks in a row below it; ``anyone``: act
    whoever took the memory; ``armed``: act at all; ``grace`` seconds from stop to kill."""

    floor: int
    samples: int = 2
    anyone: bool = False
    armed: bool = True
    grace: float = 5.0


@dataclass(frozen=True, slots=True)
class Growth:
    """Since ``seconds`` ago: bytes gone, those that the server took, and the others by growth.

    ``rest`` is what all others took, shared memory counted once: a hundred processes that map one
    segment have not taken it a hundred times, nor at all if it was there already.
    """

    seconds: float
    taken: int
    own: int
    tmpfs: int  # files in tmpfs beyond what processes have mapped
    others: tuple[tuple[Process, int], ...]
    rest: int

    @property
    def ours(self) -> bool:
        return self.own > 0 and self.own >= self.rest

    def told(self) -> str:
        parts = [f"the server {signed(self.own)} GiB"]
        parts += [
            f"pid {each.pid} ({each.name}) {signed(grown)} GiB" for each, grown in self.others[:3]
        ]
        if self.tmpfs >= GIB // 16:
            parts.append(f"files in tmpfs {signed(self.tmpfs)} GiB")
        return f"{gib(self.taken)} GiB gone in {self.seconds:.0f} s: {', '.join(parts)}"


Kind = Literal["calm", "low", "back", "spare", "watch", "stop", "kill"]


@dataclass(frozen=True, slots=True)
class Decision:
    """``stop`` and ``kill`` are to be carried out; ``text`` is to be told unless it is empty."""

    kind: Kind
    text: str = ""
    growth: Growth | None = None


class Guard:
    """Sees one sample after the other. ``lowest`` is the sample with the least available."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.lowest: Sample | None = None
        self.streak = 0
        self._past: list[Sample] = []
        self._growth: Growth | None = None  # of this trouble, as it began
        self._stopping: float | None = None
        self._killed = False
        self._told = -REMIND

    def see(self, now: Sample) -> Decision:
        """What to do after this look."""
        if self.lowest is None or now.available < self.lowest.available:
            self.lowest = now
        decision = self._decide(now)
        self._keep(now)
        return decision

    def _decide(self, now: Sample) -> Decision:
        if self._stopping is not None:
            return self._ending(now)
        if not self._low(now):
            was, self.streak, self._growth = self.streak, 0, None
            if not was:
                return Decision("calm")
            self._told = -REMIND
            return Decision("back", f"memory is back after {was} looks: {state(now)}")
        self.streak += 1
        # Who took it is settled as long as the trouble lasts: what stands still does not grow.
        if self._growth is None or not self._growth.ours:
            found = growth(self._past, now)
            if found is not None and (self._growth is None or found.taken > self._growth.taken):
                self._growth = found
        if self.streak < self.policy.samples:
            return self._say("low", now, f"look {self.streak} of {self.policy.samples}")
        ours = self._growth is not None and self._growth.ours
        if not ours and not self.policy.anyone:
            why = f"not the server's doing, so nothing is stopped; {ADVICE}"
            if self._growth is None:
                why = f"who took it was not seen, so nothing is stopped; {ADVICE}"
            return self._say("spare", now, why)
        if not self.policy.armed:
            return self._say("watch", now, "the guard is not armed (DSV41_MEM_GUARD=0)")
        self._stopping = now.at
        self._told = now.at
        return Decision("stop", self._text(now, "the server is asked to stop"), self._growth)

    def failed(self, at: float) -> None:
        """What was decided could not be done: it is decided anew after another grace."""
        self._stopping, self._killed = at, False

    def _ending(self, now: Sample) -> Decision:
        """It was asked to stop: given its grace, unless memory runs out faster than that."""
        assert self._stopping is not None
        spent = now.at - self._stopping
        urgent = spent >= 1.0 and now.available < self.policy.floor // 2
        if self._killed or not (urgent or spent >= self.policy.grace):
            return Decision("calm")
        self._killed = True
        why = "memory runs out" if urgent else "it has not ended"
        return Decision("kill", f"{why} {spent:.1f} s after that: it is killed; {state(now)}")

    def _low(self, now: Sample) -> bool:
        if now.available < self.policy.floor:
            return True
        stalled = now.full is not None and now.full >= STALLED
        return stalled and now.available < SHORT * self.policy.floor

    def _say(self, kind: Kind, now: Sample, why: str) -> Decision:
        if now.at - self._told < REMIND and self.streak not in (1, self.policy.samples):
            return Decision(kind, growth=self._growth)
        self._told = now.at
        return Decision(kind, self._text(now, why), self._growth)

    def _text(self, now: Sample, why: str) -> str:
        took = f"; {self._growth.told()}" if self._growth else ""
        return f"low: {state(now)}, floor {gib(self.policy.floor)}{took}; {why}"

    def _keep(self, now: Sample) -> None:
        """Every look of the last minute, then ever fewer: at most a few hundred in all."""
        kept: list[Sample] = []
        for each in self._past:
            age = now.at - each.at
            if age > HORIZONS[-1] * 1.02:
                continue
            gap = age / 60 if age > 61 else 0.0
            if not kept or each.at - kept[-1].at >= gap:
                kept.append(each)
        self._past = [*kept, now]


def growth(past: Sequence[Sample], now: Sample) -> Growth | None:
    """Who took the memory, over the nearest horizon in which enough of it went; None: not seen."""
    for horizon in HORIZONS:
        before = next((each for each in past if now.at - each.at <= horizon), None)
        if before is not None and before.available - now.available >= TAKEN:
            return between(before, now)
    return None


def between(before: Sample, now: Sample) -> Growth:
    """Touching shared memory that is there takes none: no more of it counts than came to be."""
    came = max(0, now.shmem - before.shmem)
    had = {(each.pid, each.ticks): each for each in before.others}
    grown, private = [], 0
    for each in now.others:
        was = had.get((each.pid, each.ticks))
        alone = each.private - (was.private if was else 0)
        private += max(0, alone)
        grown.append((each, alone + min(each.shared - (was.shared if was else 0), came)))
    grown = sorted((pair for pair in grown if pair[1] > 0), key=lambda pair: -pair[1])
    mapped = [max((p.shared for p in (*s.own, *s.others)), default=0) for s in (before, now)]
    files = now.shmem - before.shmem - max(0, mapped[1] - mapped[0])
    mine = [max((p.shared for p in s.own), default=0) for s in (before, now)]
    shared = mine[1] - mine[0]
    return Growth(
        seconds=now.at - before.at,
        taken=before.available - now.available,
        own=now.own_size - before.own_size - max(0, shared - came),
        tmpfs=max(0, files),
        others=tuple(grown),
        rest=private + max(0, came - max(0, shared)),
    )


def state(now: Sample) -> str:
    """A sample in a few words."""
    text = f"{gib(now.available)} GiB available, {gib(now.free)} free, {gib(now.cached)} page cache"
    if now.swap_used:
        text += f", {gib(now.swap_used)} swapped out"
    return text if now.full is None else f"{text}, stalled {now.full:g} %"


def largest(now: Sample, count: int = 3) -> str:
    """The largest processes, the server's among them, for the report of every half minute."""
    every = sorted((*now.own, *now.others), key=lambda each: -each.size)[:count]
    return ", ".join(f"{each.name} {gib(each.size)} (pid {each.pid})" for each in every)


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def signed(count: float) -> str:
    return f"{count / GIB:+.2f}"
