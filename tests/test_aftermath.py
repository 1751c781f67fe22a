"""After a stop: the memory of both nodes must be back before the next start needs it."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from collections.abc import Callable
from dataclasses import dataclass, field
from io import StringIO

from launcher.console import Console
from launcher.pair.aftermath import SLACK, of_ranks, wait_for_memory
from launcher.runtimes.base import RankStatus

GIB = 1 << 30
BEFORE = {"head": 115 * GIB, "worker": 117 * GIB}


@dataclass
class Nodes:
    """What both have available, by second; sleeping lets the time pass."""

    of: Callable[[float], dict[str, int]]
    now: float = 0.0
    err: StringIO = field(default_factory=StringIO)

    def wait(self) -> bool:
        def sleep(seconds: float) -> None:
            self.now += seconds

        return wait_for_memory(
            lambda: self.of(self.now),
            BEFORE,
            Console(StringIO(), self.err),
            limit=120.0,
            clock=lambda: self.now,
            sleep=sleep,
        )


def test_what_is_back_is_not_waited_for() -> None:
    nodes = Nodes(lambda now: {"head": 114 * GIB, "worker": 115 * GIB})
    assert nodes.wait() and nodes.now == 0


def test_the_slower_node_is_waited_for() -> None:
    nodes = Nodes(lambda now: {"head": 115 * GIB, "worker": int(min(117, 20 + 4 * now)) * GIB})
    assert nodes.wait() and 23 <= nodes.now <= 25


def test_memory_that_does_not_come_back_is_told_with_the_figure_and_stops_nothing() -> None:
    nodes = Nodes(lambda now: {"head": 115 * GIB, "worker": 84 * GIB})
    assert not nodes.wait()
    assert nodes.now == 120
    said = nodes.err.getvalue()
    assert "worker 84.0 of 117.0 GiB" in said and "doctor" in said and "head" not in said


def test_a_little_less_than_before_is_enough() -> None:
    nodes = Nodes(lambda now: {role: have - SLACK for role, have in BEFORE.items()})
    assert nodes.wait()


def test_what_a_pair_without_a_record_has_left_is_told_in_its_own_words() -> None:
    absent = [RankStatus("worker", "absent"), RankStatus("head", "absent")]
    told = of_ranks(absent).told()
    assert told == "the pair has no container of this checkout on the head or the worker"
    other = RankStatus("head", "absent", note="dsv41-head is of spark:/other")
    assert "dsv41-head is of spark:/other" in of_ranks([absent[0], other]).told()
    lost = RankStatus("worker", "unreachable", note="no answer")
    told = of_ranks([lost, absent[1]]).told()
    assert "not seen: the worker cannot be reached (no answer)" in told and "doctor" in told
    for state in ("running", "exited"):
        assert of_ranks([lost, RankStatus("head", state)]).there  # type: ignore[arg-type]
