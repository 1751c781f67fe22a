"""The memory guard: when it acts, and on whom. /proc and clock are ours."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from guarded_node import CHILD, FLOOR, HOG, ID, MIB, SERVER, Node, Story, sample

from launcher.watch.guard import proc
from launcher.watch.guard.core import GIB, Guard, Policy


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "proc")


def room(node: Node) -> int:
    """Bytes until the floor is reached."""
    return node.available - FLOOR


def test_a_slow_leak_of_the_server_stops_it(node: Node) -> None:
    """8 MiB a second: a minute's worth is less than what would be looked at."""
    full = node.private[CHILD] + room(node)
    start = full - GIB

    def leaks(at: float) -> None:
        if node.up:
            node.private[CHILD] = start + int(at * 8 * MIB)

    leaks(0)
    story = Story(node, leaks, seconds=300)
    assert story.run() == 3
    assert story.ended_at is not None and 128 <= story.ended_at < 132
    assert node.signals == [(ID, "SIGTERM")]
    assert "the server +" in story.whys[0]["why"] and story.whys[0]["stopped"] == "dsv41-exl3-head"
    # The lines of a night can be read.
    assert len(story.lines) < 10 + story.ended_at / 30


def test_a_very_slow_leak_is_seen_over_hours() -> None:
    """2 GiB in eleven hours, looked at once a minute, and at last every second."""
    guard = Guard(Policy(FLOOR))
    kinds = []
    for second in (*range(0, 40_000, 60), *range(40_000, 40_010)):
        leaked = min(second, 40_000) * 2 * GIB // 40_000
        look = sample(float(second), available=FLOOR + 2 * GIB - leaked - 1, driver=leaked)
        kinds.append(guard.see(look).kind)
    assert kinds[:-10] == ["calm"] * (len(kinds) - 10)
    assert kinds[-10:-8] == ["low", "stop"]


def test_a_hog_of_seven_gib_beside_an_idle_server_is_named_and_the_server_is_left_alone(
    node: Node,
) -> None:
    """What once killed a healthy server: an upload that took 7 GiB in 41 s."""
    node.private[CHILD] += room(node) - 6 * GIB

    def uploads(at: float) -> None:
        if at < 150:
            node.private[HOG] = int(min(at / 41, 1) * 7 * GIB)
        else:
            node.private.pop(HOG, None)

    story = Story(node, uploads, seconds=160)
    assert story.run() is None
    assert node.signals == [] and story.whys == []
    (first, *_) = story.told("not the server's doing")
    assert f"pid {HOG} (hf) +" in first and "systemd-run --scope" in first
    # It stays for minutes, longer than a minute's looks, and is the hog's all that time.
    assert 4 <= len(story.told("not the server's doing")) < 8
    assert story.told("memory is back")
    assert story.lows[-1]["available"] < FLOOR and "hf" in story.lows[-1]["largest"]


def test_told_otherwise_the_server_makes_room_for_the_hog(node: Node) -> None:
    node.private[CHILD] += room(node) - 6 * GIB

    def uploads(at: float) -> None:
        node.private[HOG] = int(min(at / 41, 1) * 7 * GIB)

    story = Story(node, uploads, seconds=120)
    assert story.run(anyone=True) == 3
    assert node.signals == [(ID, "SIGTERM")] and "hf" in story.whys[0]["why"]


def test_a_full_page_cache_is_no_shortage(node: Node) -> None:
    """MemFree is near zero while weights are read, and some wait for the disk."""
    node.driver = 10 * GIB

    def reads(at: float) -> None:
        node.cached, node.full = node.available - 100 * MIB, 40.0

    story = Story(node, reads, seconds=90)
    assert story.run() is None
    assert not story.told("low: ") and node.signals == []


def test_swap_thrash_counts_although_some_is_available(node: Node) -> None:
    """The server's own pages are out: it grew, as the sum of both shows."""
    node.swap_total = 16 * GIB
    node.private[CHILD] += room(node) - 4 * GIB

    def thrashes(at: float) -> None:
        if node.up:
            grown = int(min(at / 30, 1) * 14 * GIB)
            node.private[CHILD] = 3 * GIB + (before := node_before) + grown
            assert before >= 0
            node.swapped[CHILD] = max(0, grown - 3 * GIB)
            node.full = 60.0 if at > 30 else 0.0

    node_before = node.private[CHILD] - 3 * GIB
    story = Story(node, thrashes, seconds=300)
    assert story.run() == 3
    assert "stalled 60 %" in story.whys[0]["why"] and "swapped out" in story.whys[0]["why"]
    assert FLOOR < story.whys[0]["available"] < 4 * FLOOR


def test_a_container_that_is_gone_ends_the_guard(node: Node) -> None:
    def leaves(at: float) -> None:
        if at > 100:
            node.end()

    story = Story(node, leaves)
    assert story.run() == 0
    assert story.ended_at is not None and 100 < story.ended_at < 102
    assert story.told("is gone: nothing is left to guard") and node.signals == []
    assert story.lows, "the low water of a quiet life is written, too"


def test_two_looks_below_and_back_again(node: Node) -> None:
    """Three are asked for: two are told, and forgotten."""

    def dips(at: float) -> None:
        if node.up:
            low = 30 <= at % 60 < 31
            node.private[CHILD] = 3 * GIB + (base + 2 * GIB if low else base)

    base = room(node) - GIB
    node.private[CHILD] += base
    story = Story(node, dips, seconds=130)
    assert story.run(samples=3) is None
    assert node.signals == []
    assert len(story.told("memory is back after 2 looks")) == 2
    # With two it is stopped at the second.
    again = Story(node, dips, seconds=130)
    node.now = 1000.0
    assert again.run(samples=2) == 3 and again.ended_at == 30.75


def test_stop_comes_before_kill(node: Node) -> None:
    node.deaf = True
    story = Story(node, surge(node, 1))
    assert story.run() == 3
    assert [signal for _, signal in node.signals] == ["SIGTERM", "SIGKILL"]
    (asked,) = story.told("asked to stop")
    (killed,) = story.told("killed")
    assert 4.9 < float(killed.split()[0]) - float(asked.split()[0]) < 5.5


def test_what_runs_out_faster_is_killed_after_a_second(node: Node) -> None:
    node.deaf = True
    story = Story(node, surge(node, 1, more=GIB))
    assert story.run() == 3
    (asked,), (killed,) = story.told("asked to stop"), story.told("memory runs out")
    assert 1 <= float(killed.split()[0]) - float(asked.split()[0]) < 1.5


def surge(node: Node, at: float, more: int = 0) -> Callable[[float], None]:
    """The server takes all above the floor at once, and then ``more`` of what is left."""
    wanted = node.private[CHILD] + room(node) + GIB // 2

    def happens(now: float) -> None:
        if node.up and now >= at:
            node.private[CHILD] = wanted + (more if now > at + 1 else 0)

    return happens


def test_not_armed_it_only_watches(node: Node) -> None:
    story = Story(node, surge(node, 1), seconds=120)
    assert story.run(armed=False) is None
    assert node.signals == [] and story.told("the guard is not armed")


@pytest.mark.parametrize(
    "cgroup",
    [
        f"0::/system.slice/docker-{ID}.scope",  # v2, systemd
        f"0::/docker/{ID}",  # v2, cgroupfs
        f"12:memory:/docker/{ID}\n3:cpu:/docker/{ID}\n0::/",  # v1
        "0::/",  # a control group namespace of its own: only the process tree tells
    ],
)
def test_whatever_the_control_groups_the_server_s_processes_are_its_own(
    node: Node, cgroup: str
) -> None:
    node.cgroup = cgroup
    node.write()
    target = node.container()
    assert target.find() and target.pids() == {SERVER, CHILD}


def test_a_renamed_container_is_still_the_same(node: Node) -> None:
    def renamed(at: float) -> None:
        node.names_given.pop("dsv41-exl3-head", None)
        surge_at(at)

    surge_at = surge(node, 60)
    story = Story(node, renamed)
    assert story.run() == 3
    assert node.signals == [(ID, "SIGTERM")], "by its id"


def test_a_kernel_without_psi_leaves_it_to_mem_available(node: Node) -> None:
    node.full = None
    node.write()
    sample = proc.look(lambda: {SERVER}, 0.0, node.root)
    assert sample.full is None
    assert Story(node, surge(node, 1)).run() == 3


def test_a_daemon_that_does_not_answer_is_told_and_tried_again(node: Node) -> None:
    surging = surge(node, 1)

    def happens(at: float) -> None:
        node.mute = at < 8
        surging(at)

    story = Story(node, happens, seconds=60)
    assert story.run() == 3
    assert len(story.told("the stop failed: no answer")) == 1
    # Nor could it kill; it asked again as soon as it was answered.
    assert story.told("the kill failed") and node.signals == [(ID, "SIGKILL")]


def test_a_guard_that_comes_late_blames_nobody(node: Node) -> None:
    """Low from its first look on: it has not seen who took it."""
    node.private[CHILD] += room(node) + GIB
    story = Story(node, lambda at: None, seconds=200)
    assert story.run() is None
    assert story.told("who took it was not seen") and node.signals == []


def test_proc_that_cannot_be_read_for_a_minute_ends_it_with_a_word(node: Node) -> None:
    def breaks(at: float) -> None:
        pass

    story = Story(node, breaks)
    node.write()
    real = node.write

    def write() -> None:
        real()
        (node.root / "meminfo").write_text("MemTotal: 1 kB\n")

    node.write = write  # type: ignore[method-assign]
    assert story.run() == 1
    assert story.told("has no line MemAvailable") and story.told("gives up")


def test_the_stop_and_the_kill_come_though_proc_cannot_be_searched_meanwhile(node: Node) -> None:
    """What is short of memory answers with ENOMEM, just when it matters."""

    def leaks(at: float) -> None:
        if node.up:
            node.private[CHILD] = int(min(at * GIB, 6 * GIB))

    class Blind(Story):
        def used(self, pids: Iterable[int]) -> set[Path]:
            raise OSError(12, "Cannot allocate memory")

        def clean(self, left: Iterable[Path]) -> list[Path]:
            raise OSError(12, "Cannot allocate memory")

    node.driver, node.deaf = node.driver + room(node) + 3 * GIB - 4 * GIB, True
    assert Blind(node, leaks, seconds=90).run() == 3
    assert [name for _, name in node.signals] == ["SIGTERM", "SIGKILL"]
