"""`./start.sh pack` without nodes: its words, both packers at once, containers, what is used."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import io
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import spark_facts
from docker.types import HostConfig
from settings_root import settings_of

from launcher import rehearsal
from launcher.commands.container import NodePlace, place_of
from launcher.console import Console
from launcher.deployment import Rank
from launcher.errors import LauncherError
from launcher.facts.base import Missing
from launcher.facts.packs import Packs, PacksFact
from launcher.nodes.local import LocalNode
from launcher.packing import container, words
from launcher.packing.container import ContainerJob, packer
from launcher.packing.local import LocalJob
from launcher.packing.run import Ended, pack
from launcher.packing.words import PREPARE
from launcher.preflight import check
from launcher.preflight.weights import packs as preflight_packs
from launcher.record import Record
from launcher.runtimes.base import RankStatus
from spark_overlay.engram.meter import Meter

GB = 10**9
PLACE = NodePlace("/srv/model", "/srv/engram-src", "/srv/cache", packed_dir="/srv/packs")


def plan(left: int = 2 * GB, free: int = 9 * GB, absent: Sequence[str] = ("a.bin",)) -> str:
    told = {"folder": "/x", "total": 2 * GB, "left": left, "free": free, "needed": left + GB // 4}
    return json.dumps({**told, "absent": list(absent)})


@dataclass
class Fake:
    """A packer that says its lines; ``waits`` until it is told to end."""

    role: str
    plan: str = field(default_factory=plan)
    lines: Sequence[str] = ("packed 2.00 of 2.00 GB, 1.00 GB/s, 0 s left", "whole")
    status: int = 0
    waits: bool = False
    error: Exception | None = None
    asked: list[tuple[str, ...]] = field(default_factory=list)
    stopped: bool = False
    where: str = "/srv/packs"
    drive: str = ""

    @property
    def node(self) -> str:
        return self.drive or self.role

    @property
    def key(self) -> str:
        return f"{self.role.upper()}_PACKED_DIR"

    def run(
        self, extra: Sequence[str], line: Callable[[str], None], stop: threading.Event
    ) -> Ended:
        self.asked.append(tuple(extra))
        if extra == ["--plan"]:
            line(self.plan)
            return Ended(0, "ended with exit code 0")
        if self.error is not None:
            raise self.error
        for each in self.lines:
            line(each)
        if self.waits:
            self.stopped = stop.wait(20)
            time.sleep(0.2)  # the drive
        return Ended(self.status, f"ended with exit code {self.status}")


class Told(Console):
    def __init__(self, interrupt: bool = False) -> None:
        self.said = io.StringIO()
        super().__init__(self.said, self.said)
        self.interrupt = interrupt
        self.shown: list[str] = []

    def progress(self, text: str, since: float | None = None) -> None:
        self.shown.append(text)
        if self.interrupt and "head" in text:
            raise KeyboardInterrupt


def run(tmp_path: Path, *jobs: Fake, verify: bool = False, interrupt: bool = False) -> Told:
    console = Told(interrupt)
    pack(jobs, verify, console, Record(tmp_path), "./start.sh pack")
    return console


def test_the_packers_lines_are_read_as_they_are_written() -> None:
    lines: list[str] = []
    meter = Meter(lines.append, "packed", 200 * GB)
    meter.skip(100 * GB)
    meter.add(100 * GB)
    found = words.progress(lines[-1])
    assert found is not None and (found.done, found.total, found.left) == (200.0, 200.0, 0)
    both = words.both({"head": found, "worker": "begins"})
    assert both.startswith("head 200.0/200.0 GB ") and both.endswith(" | worker begins")
    assert words.progress("layer 1, rank 0 of 2: goes on after 7 rows") is None


@pytest.mark.parametrize("text", ["", "{", "{}", '{"total": "x"}', "WARNING {", "[1]"])
def test_what_is_no_plan_is_none(text: str) -> None:
    assert words.plan_of([text]) is None


def test_a_plan_is_found_among_other_lines() -> None:
    found = words.plan_of(["a warning of a library", plan(), "another"])
    assert found == words.Plan(2 * GB, 2 * GB, 9 * GB, 2 * GB + GB // 4, ("a.bin",))


def test_paths_of_the_container_are_told_as_the_nodes() -> None:
    places = {"/engram-packed": "/home/me/engram-src/packs", "/engram-src": "/data/src"}
    text = "/engram-packed/a.bin: not of /engram-src/b (see /engram-src2, /engram-packed)"
    assert words.translated(text, places) == (
        "/home/me/engram-src/packs/a.bin: not of /data/src/b"
        " (see /engram-src2, /home/me/engram-src/packs)"
    )


def test_both_are_planned_and_run(tmp_path: Path) -> None:
    head, worker = Fake("head"), Fake("worker")
    told = run(tmp_path, head, worker).said.getvalue()
    assert head.asked == worker.asked == [("--plan",), ()]
    assert "head: /srv/packs: 2.0 GB to write; 9.0 GB free" in told
    assert "all packed files are whole" in told


def test_what_is_whole_is_said_and_left_alone(tmp_path: Path) -> None:
    head, worker = Fake("head", plan(0, absent=())), Fake("worker", plan(GB))
    told = run(tmp_path, head, worker).said.getvalue()
    assert (head.asked, worker.asked) == ([("--plan",)], [("--plan",), ()])
    assert "head: /srv/packs: 2.0 GB, whole: nothing to do" in told
    assert "worker: /srv/packs: 1.0 GB to write of 2.0 GB, the rest is there" in told


def test_verify_compares_all_and_asks_for_no_space(tmp_path: Path) -> None:
    head, worker = Fake("head", plan(0, 0, ())), Fake("worker", plan(GB, 0))
    run(tmp_path, head, worker, verify=True)
    assert head.asked == worker.asked == [("--plan",), ("--verify",)]


def test_no_room_on_one_node_and_neither_begins(tmp_path: Path) -> None:
    head, worker = Fake("head"), Fake("worker", plan(free=GB))
    with pytest.raises(LauncherError) as caught:
        run(tmp_path, head, worker)
    assert caught.value.found == "the worker has 1.0 GB free for /srv/packs"
    assert caught.value.needed == "2.2 GB there, for a.bin"
    assert "WORKER_PACKED_DIR" in caught.value.do_next
    assert head.asked == [("--plan",)]


def test_two_ranks_on_one_drive_need_the_room_of_both(tmp_path: Path) -> None:
    """One has room for either, as the rehearsal's may, and not for both."""
    jobs = [Fake(role, plan(free=4 * GB), drive="local") for role in ("head", "worker")]
    with pytest.raises(LauncherError) as caught:
        run(tmp_path, *jobs)
    assert caught.value.found == "the head and the worker have 4.0 GB free for /srv/packs"
    assert caught.value.needed == "4.5 GB there, for a.bin, a.bin"


def test_when_one_fails_the_other_goes_on_and_the_error_has_its_words(tmp_path: Path) -> None:
    head = Fake("head", lines=["…", "/srv/x: cannot be read. Look after the drive"], status=1)
    worker = Fake("worker")
    with pytest.raises(LauncherError) as caught:
        run(tmp_path, head, worker)
    assert "the head's packer ended with exit code 1" in caught.value.found
    assert "/srv/x: cannot be read. Look after the drive" in caught.value.found
    assert "./start.sh pack: it goes on where it stopped" in caught.value.do_next
    assert worker.asked[-1] == ()
    assert "whole" in (tmp_path / "log.txt").read_text()


def test_a_packer_without_a_plan_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="told no plan"):
        run(tmp_path, Fake("head", "usage: pack"), Fake("worker"))


def test_a_lost_node_is_told_in_its_own_words(tmp_path: Path) -> None:
    lost = LauncherError("it is gone", "a node", "look at it")
    with pytest.raises(LauncherError, match="worker: it is gone") as caught:
        run(tmp_path, Fake("head"), Fake("worker", error=lost))
    assert caught.value.do_next == "look at it"


def test_ctrl_c_waits_until_both_have_ended(tmp_path: Path) -> None:
    head, worker = Fake("head", waits=True), Fake("worker", waits=True)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, head, worker, interrupt=True)
    assert head.stopped and worker.stopped and time.monotonic() - began < 10


# ---- containers ----


@dataclass
class Machine:
    """A runtime whose rank is in these states, one a look; the last one stays."""

    states: list[str]
    said: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    started: list[Rank] = field(default_factory=list)
    deaf: int = 0  # answers that `stop` does not get

    def inspect(self, role: str) -> RankStatus:
        state: Any = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return RankStatus(role, state, exit_code=0 if state == "exited" else None, note="noted")

    def start(self, rank: Rank, launch_id: str) -> int:
        self.started.append(rank)
        return 1

    def stop(self, role: str, grace: float) -> RankStatus:
        self.deaf -= 1
        self.stops.append(role)
        return RankStatus(role, "unreachable" if self.deaf >= 0 else "exited", note="noted")

    def lines(self, role: str) -> list[str]:
        said, self.said = self.said, []
        return said


def job(machine: Machine) -> tuple[ContainerJob, Callable[[], float]]:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    made: Any = ContainerJob("worker", 1, machine, PLACE, sleep, lambda: now[0])  # type: ignore[arg-type]
    return made, lambda: now[0]


def test_a_container_runs_to_its_end_and_is_removed() -> None:
    machine = Machine(["absent", "running", "exited"], ["/engram-packed/x: whole"])
    lines: list[str] = []
    ended = job(machine)[0].run(["--plan"], lines.append, threading.Event())
    assert ended.status == 0 and machine.stops == ["worker"]
    assert lines == ["/srv/packs/x: whole"]
    assert machine.started[0].argv[-5:] == ("--rank", "1", "--tp", "2", "--plan")


def test_one_that_a_killed_launcher_left_is_ended_first() -> None:
    machine = Machine(["running", "exited"])
    job(machine)[0].run([], lambda text: None, threading.Event())
    assert machine.stops == ["worker", "worker"]


def test_a_node_that_does_not_answer_is_waited_for_and_then_given_up() -> None:
    machine = Machine(["absent", "unreachable"])
    made, now = job(machine)
    with pytest.raises(LauncherError, match="cannot be seen for 120 s: noted"):
        made.run([], lambda text: None, threading.Event())
    assert 120 < now() < 130
    machine = Machine(["absent", *["unreachable"] * 50, "running", "exited"])
    assert job(machine)[0].run([], lambda text: None, threading.Event()).status == 0


def test_a_stop_insists() -> None:
    stop = threading.Event()
    stop.set()
    machine = Machine(["absent", "running"], deaf=5)
    assert job(machine)[0].run([], lambda text: None, stop).how == "was stopped"
    assert len(machine.stops) == 6
    with pytest.raises(LauncherError, match="could not be ended") as caught:
        job(Machine(["absent", "running"], deaf=10**6))[0].run([], lambda text: None, stop)
    assert "the next ./start.sh pack" in caught.value.do_next


def test_a_packers_container_gets_two_directories_and_nothing_else(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "VLLM_API_KEY=a-secret-of-mine\n")
    rank = Rank(1, "worker", "worker", ("python3", "-m", "x"), {"SPARK_LAUNCH_ID": "ab"}, {}, {})
    made = packer(rank, settings, PLACE, "me:/kit")
    host = made.host()
    HostConfig(version="1.44", **host)
    assert (made.name, made.secret_file) == ("dsv41-exl3-worker-pack", "")
    assert (host["network_mode"], host["cap_add"], host["devices"]) == ("none", [], [])
    assert host["device_requests"] == [] and host["ipc_mode"] == "private"
    mounts = {one["Target"]: (one["Source"], one["ReadOnly"]) for one in host["mounts"]}
    assert mounts == {
        "/engram-src": ("/srv/engram-src", True),
        "/engram-packed": ("/srv/packs", False),
    }
    assert made.writable() == ("/srv/packs",)
    assert dict(made.env) == {"SPARK_LAUNCH_ID": "ab"}
    # Not the ranks' label: a start that finds a packer is not kept by it.
    assert "dsv41.owner" not in made.labels and made.labels[container.PACKER] == "me:/kit"


def test_prepared_weights_are_made_of_the_checkpoint(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "")
    rank = Rank(0, "head", "head", ("python3", "-m", "x"), {"SPARK_LAUNCH_ID": "ab"}, {}, {})
    made = packer(rank, settings, PLACE, "me:/kit", PREPARE)
    assert made.name == "dsv41-exl3-head-prepare"
    mounts = {one["Target"]: (one["Source"], one["ReadOnly"]) for one in made.host()["mounts"]}
    assert mounts == {"/model": ("/srv/model", True), "/engram-packed": ("/srv/packs", False)}
    machine = Machine(
        ["absent", "running", "exited"], ["/engram-packed/w: not of /model/config.json"]
    )
    one = replace(job(machine)[0], what=PREPARE)
    lines: list[str] = []
    one.run(["--plan"], lines.append, threading.Event())
    assert lines == ["/srv/packs/w: not of /srv/model/config.json"]
    assert machine.started[0].argv[:5] == (
        "python3", "-m", "spark_overlay.loading.prepare", "--source", "/model",
    )  # fmt: skip
    assert words.argv("py", "/model", "/out", 1, ["--plan"], PREPARE) == (
        "py", "-m", "spark_overlay.loading.prepare",
        "--source", "/model", "--out", "/out", "--rank", "1", "--tp", "2", "--plan",
    )  # fmt: skip


def test_what_is_said_of_prepared_files(tmp_path: Path) -> None:
    console, record = Told(), Record(tmp_path)
    jobs = [Fake("head", plan()), Fake("worker", plan(left=0, absent=()))]
    pack(jobs, False, console, record, "./start.sh prepare", PREPARE)
    assert "all prepared files are whole" in console.said.getvalue()
    assert "looking at the checkpoint" in console.shown[0]
    failed = [Fake("head", plan(), status=1), Fake("worker", plan())]
    with pytest.raises(LauncherError, match="prepared files of this source") as caught:
        pack(failed, False, console, record, "./start.sh prepare", PREPARE)
    assert "./start.sh prepare: it goes on where it stopped" in caught.value.do_next


# ---- what is used ----


@pytest.mark.parametrize(("dotenv", "head", "worker"), [
    ("", "/home/a/dsv41-engram", "/home/b/dsv41-engram"),
    ("HEAD_PACKED_DIR=/fast/e\n", "/fast/e", "/fast/e"),
    ("HEAD_PACKED_DIR=/fast/e\nWORKER_PACKED_DIR=~/e\n", "/fast/e", "/home/b/e"),
])  # fmt: skip
def test_each_node_has_its_own_directory(
    tmp_path: Path, dotenv: str, head: str, worker: str
) -> None:
    settings = settings_of(tmp_path, dotenv)
    assert place_of(settings, "head", "/home/a").packed_dir == head
    assert place_of(settings, "worker", "/home/b").packed_dir == worker


def files(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "a folder's"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"x" * 7)
    return folder


def test_only_whole_files_of_the_rank_count(tmp_path: Path) -> None:
    folder = files(
        tmp_path, "engram-l1-r0of2.bin", "engram-l14-r0of2.bin.tmp", "engram-l1-r1of4.bin",
        "engram-l1-r0of2.bin.progress", "engram-lx-r0of2.bin",
        "weights-r0of2.safetensors", "weights-r0of2.safetensors.tmp",
    )  # fmt: skip
    fact = PacksFact()
    for place in (folder, folder / "none", ""):
        done = LocalNode().run([*fact.argv, "", "", str(place)])
        assert (done.status, done.err) == (0, b"")
        found = fact.parse(done.text)
        names = ("engram-l1-r0of2.bin", "engram-l1-r1of4.bin", "weights-r0of2.safetensors")
        assert found == Packs(dict.fromkeys(names, 7) if place == folder else {})
        assert found.weights(0) is (place == folder) and not found.weights(1)
    assert Packs({"engram-l1-r0of2.bin": 7, "engram-l1-r1of4.bin": 7}).of(0) == (
        "engram-l1-r0of2.bin",
    )
    assert Packs({"engram-l1-r1of4.bin": 7}).of(1) == ()


@pytest.mark.parametrize("store", ["file", "plain", "memory"])
def test_the_rehearsal_uses_its_packs_where_rows_are_read_by_native_code(
    tmp_path: Path, store: str
) -> None:
    settings = settings_of(tmp_path, f"ENGRAM_STORE={store}\n")
    folder = tmp_path / "r"
    (folder / "packed").mkdir(parents=True)
    (folder / "packed" / "engram-l1-r1of2.bin").touch()
    assert rehearsal.packed_dir(settings, folder, "head") == ""
    expected = str(folder / "packed") if store == "file" else ""
    assert rehearsal.packed_dir(settings, folder, "worker") == expected
    (folder / "packed" / "weights-r0of2.safetensors").touch()
    assert rehearsal.prepared_dir(folder, "head") == str(folder / "packed")
    assert rehearsal.prepared_dir(folder, "worker") == ""


def test_a_local_packer_is_a_process_that_ends_when_it_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"$@\"\ntrap 'exit 143' TERM\nsleep 60 & wait\n")
    python.chmod(0o755)
    made = LocalJob("head", 0, LocalNode(), python, tmp_path / "src", tmp_path / "out")
    stop, lines = threading.Event(), []

    def line(text: str) -> None:
        lines.append(text)
        stop.set()

    began = time.monotonic()
    assert made.run([], line, stop) == Ended(None, "was stopped")
    assert time.monotonic() - began < 10
    assert lines == [
        f"-m spark_overlay.engram.pack --source {tmp_path}/src --out {tmp_path}/out --rank 0 --tp 2"
    ]


def test_packs_that_cannot_be_listed_keep_a_start() -> None:
    """A pair that serves from them would else be started anew without."""
    assert preflight_packs(spark_facts.survey("head")) == []
    hangs = spark_facts.survey("worker", packs=Missing("no answer within 5 s"))
    both = check(spark_facts.GIVEN, spark_facts.survey("head"), hangs, None, [])
    (found,) = [each for each in both if "packed Engram rows" in each.found]
    assert "on the worker" in found.found and "no answer within 5 s" in found.found
    assert found.level == "wrong" and "WORKER_PACKED_DIR" in found.mend
