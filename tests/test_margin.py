"""The look at both nodes' memory when the old ranks are gone, and the guards that are set there."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import io
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from settings_root import settings_of
from spark_facts import GIVEN, docker, rank, survey

from launcher.console import Console
from launcher.errors import LauncherError
from launcher.facts.base import Missing
from launcher.facts.memory import Memory
from launcher.findings import Finding
from launcher.nodes.base import Done
from launcher.nodes.local import LocalNode
from launcher.pair import margin
from launcher.preflight.memory import memory
from launcher.preflight.pair import standing
from launcher.steps import guard

GIB = 1 << 30
NEED = 110 * GIB
GOOD = Memory(121 * GIB, 116 * GIB, 90 * GIB, 20 * GIB, 0, 0)
FULL = Memory(121 * GIB, 116 * GIB, 2 * GIB, 110 * GIB, 0, 0)


@dataclass
class Nodes:
    """What both have, by second."""

    of: Callable[[float], dict[str, Memory | Missing]]
    sudo: Callable[[str], str | None] = lambda role: None
    now: float = 0.0
    asked: list[str] = field(default_factory=list)
    out: StringIO = field(default_factory=StringIO)
    err: StringIO = field(default_factory=StringIO)

    def look(self) -> Mapping[str, Memory | Missing]:
        return self.of(self.now)

    def drop(self, role: str) -> str | None:
        self.asked.append(role)
        return self.sudo(role)

    def settle(self, drop: bool = True) -> list[Finding]:
        def sleep(seconds: float) -> None:
            self.now += seconds

        return margin.settled(
            self.look, self.drop, NEED, drop, Console(self.out, self.err),
            clock=lambda: self.now, sleep=sleep,
        )  # fmt: skip


def test_enough_on_both_nodes_asks_for_nothing() -> None:
    nodes = Nodes(lambda now: {"head": GOOD, "worker": GOOD})
    assert nodes.settle() == [] and nodes.asked == [] and nodes.now == 0
    assert nodes.out.getvalue() == nodes.err.getvalue() == ""


def test_a_full_page_cache_is_dropped_where_it_is_full() -> None:
    dropped: list[str] = []

    def sudo(role: str) -> str | None:
        dropped.append(role)
        return None

    nodes = Nodes(lambda now: {"head": GOOD, "worker": GOOD if dropped else FULL}, sudo)
    assert nodes.settle() == [] and nodes.asked == ["worker"]
    assert "worker: page cache 110.0 GiB -> 20.0 GiB, free 2.0 GiB -> 90.0 GiB" in (
        nodes.out.getvalue()
    )


@pytest.mark.parametrize(
    ("drop", "why"), [(True, "sudo: a password is required"), (False, "DSV41_DROP_PAGE_CACHE=0")]
)
def test_where_it_may_not_be_dropped_the_number_is_told(drop: bool, why: str) -> None:
    nodes = Nodes(
        lambda now: {"head": FULL, "worker": GOOD}, lambda role: "sudo: a password is required"
    )
    assert nodes.settle(drop) == []
    said = nodes.err.getvalue()
    assert why in said and "2.0 GiB are free beside 110.0 GiB" in said and "drop_caches" in said
    assert nodes.asked == (["head"] if drop else [])


def test_memory_that_comes_back_is_waited_for() -> None:
    def of(now: float) -> dict[str, Memory | Missing]:
        have = int(min(116, 80 + 4 * now)) * GIB
        return {"head": GOOD, "worker": Memory(121 * GIB, have, 90 * GIB, 0, 0, 0)}

    nodes = Nodes(of)
    assert nodes.settle() == [] and 7 <= nodes.now <= 9


def test_memory_that_does_not_is_a_finding_for_each_node() -> None:
    short = Memory(121 * GIB, 84 * GIB, 80 * GIB, 0, 0, 0)
    nodes = Nodes(lambda now: {"head": short, "worker": Missing("no answer within 10 s")})
    head, worker = nodes.settle()
    assert nodes.now == margin.WAIT
    assert "the head has 84.0 GiB" in head.found and "110.0 GiB" in head.needed
    assert "no answer within 10 s" in worker.found
    assert head.level == worker.level == "wrong"


class Node(LocalNode):
    """Answers one command as told, or not at all."""

    def __init__(self, status: int = 0, said: bytes = b"", missing: bool = False) -> None:
        super().__init__("head")
        self.status, self.said, self.missing = status, said, missing
        self.ran: list[Sequence[str]] = []

    def run(self, argv: Sequence[str], **more: Any) -> Done:
        self.ran.append(argv)
        if self.missing:
            raise LauncherError(f"{argv[0]} could not be started", "", "")
        return Done(tuple(argv), self.status, b"", self.said)


def test_sudo_is_asked_so_that_it_never_asks_back() -> None:
    node = Node()
    assert margin.drop_cache(node) is None
    assert [argv[0] for argv in node.ran] == ["sync", "sudo"] and node.ran[1][1] == "-n"
    assert margin.drop_cache(Node(1, b"sudo: a password is required\n")) == (
        "sudo: a password is required"
    )
    assert "could not be started" in str(margin.drop_cache(Node(missing=True)))


def test_swapping_is_told() -> None:
    found = survey("head").memory
    assert isinstance(found, Memory)
    swapping = survey("head", memory=Memory(
        found.total, found.available, found.free, found.cached, 16 * GIB, 13 * GIB))  # fmt: skip
    pair = standing(GIVEN.owner, swapping, survey("worker"))
    (told,) = memory(GIVEN, pair, swapping, survey("worker"))
    assert told.level == "warn" and "3.0 GiB swapped out" in told.found
    # Not while our own rank runs: it is kept, or ended first.
    up = survey("head", docker=docker(rank("head")), memory=swapping.memory)
    assert memory(GIVEN, standing(GIVEN.owner, up, survey("worker")), up, survey("worker")) == []


# ---- the guard on a node ----


def test_the_bundle_is_the_guard_alone_and_equal_each_time() -> None:
    made = guard.bundle()
    assert made == guard.bundle()
    names = zipfile.ZipFile(io.BytesIO(made)).namelist()
    assert {"__main__.py", "launcher/watch/guard/core.py", "launcher/watch/guard/run.py"} <= set(
        names
    )
    assert not [
        n for n in names if "guard" not in n and not n.endswith(("__init__.py", "main__.py"))
    ]


def test_the_bundle_runs_by_itself(tmp_path: Path) -> None:
    """Without site-packages and far from the checkout."""
    file = tmp_path / "guard.pyz"
    file.write_bytes(guard.bundle())
    done = subprocess.run(
        [sys.executable, "-S", "-I", str(file), "--pid", str(2**30), "--wait", "0.1"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and f"no process {2**30} runs" in done.stderr, done


def test_what_the_guard_is_told(tmp_path: Path) -> None:
    node = Node()
    post = guard.Post(node, PurePosixPath(tmp_path) / "memguard", ("dsv41-exl3-head",))
    text = "DSV41_MEM_GUARD=1\nDSV41_MEM_GUARD_GIB=2.25\nDSV41_MEM_GUARD_SAMPLES=3\n"
    guard.start("head", post, settings_of(tmp_path, text))
    (argv,) = node.ran
    assert argv[:2] == ["python3", "-S"] and argv[3] == "dsv41-exl3-head"
    assert Path(argv[2]).read_bytes() == guard.bundle()
    told = " ".join(argv[4:])
    assert "--gib 2.25 --samples 3 --armed" in told and "--any" not in told
    guard.start("head", post, settings_of(tmp_path, text + "DSV41_MEM_GUARD_ANY=1\n"))
    assert "--any" in node.ran[1]


def test_a_guard_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    post = guard.Post(Node(1, b"memguard: no answer\n"), PurePosixPath(tmp_path), ("x",))
    with pytest.raises(LauncherError, match="guard of the worker did not start") as error:
        guard.start("worker", post, settings_of(tmp_path))
    assert "memguard: no answer" in error.value.found and "DSV41_MEM_GUARD=0" in error.value.do_next


def test_a_guard_outlives_the_command_that_set_it_and_ends_with_its_rank(tmp_path: Path) -> None:
    """As on the rehearsal: a real process, the real node, the guard in the background."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        folder = PurePosixPath(tmp_path) / "memguard"
        guards = ("--pid", str(server.pid))
        post = guard.Post(LocalNode(), folder, guards, sys.executable)
        guard.start("head", post, settings_of(tmp_path, "DSV41_MEM_GUARD_GIB=0.001\n"))
        low, pid = Path(folder / "head.log.low.json"), Path(folder / "head.pid")
        until(low.exists)
        running = int(pid.read_text())
        assert Path(f"/proc/{running}").exists()
        # A second one sees the first, and leaves.
        guard.start("head", post, settings_of(tmp_path, "DSV41_MEM_GUARD_GIB=0.001\n"))
        server.communicate(b"\n")
    until(lambda: "nothing is left to guard" in Path(post.log("head")).read_text())
    until(lambda: not Path(f"/proc/{running}").exists())


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)
