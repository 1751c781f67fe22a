"""The memory guard: who took the memory, when it acts, and on whom. /proc and clock are ours."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
from guarded_node import CHILD, HOG, ID, MIB, SERVER, Node, Story

from launcher.watch import memguard
from launcher.watch.guard import __main__ as command
from launcher.watch.guard import proc, shm
from launcher.watch.guard.core import GIB, Guard, Policy, Process, Sample, between, size
from launcher.watch.guard.engine import SOCKET, DockerFault, Engine, socket_of
from launcher.watch.guard.target import Tree

FLOOR = int(1.5 * GIB)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "proc")


def room(node: Node) -> int:
    """Bytes until the floor is reached."""
    return node.available - FLOOR


# ---- stories ----


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


# ---- attribution ----


def sample(at: float = 0.0, **more: Any) -> Sample:
    plain: dict[str, Any] = {
        "available": 10 * GIB, "free": GIB, "cached": GIB, "shmem": 0, "driver": 0,
        "swap_used": 0, "full": None, "own": (), "others": (),
    }  # fmt: skip
    return Sample(at, **{**plain, **more})


def test_a_reused_pid_is_another_process() -> None:
    before = sample(others=(Process(7, 1, "old", 3 * GIB),))
    now = sample(60, available=8 * GIB, others=(Process(7, 2, "new", 4 * GIB),))
    assert between(before, now).others[0][1] == 4 * GIB


def test_files_in_tmpfs_are_nobody_s_and_not_the_server_s() -> None:
    before = sample(own=(Process(1, 1, "vllm", GIB),))
    now = sample(60, available=7 * GIB, shmem=3 * GIB, own=(Process(1, 1, "vllm", GIB + 1),))
    found = between(before, now)
    assert found.tmpfs == 3 * GIB and not found.ours and "files in tmpfs +3.00" in found.told()


def test_shared_memory_of_the_ranks_is_counted_once() -> None:
    assert size([Process(1, 1, "a", GIB, GIB), Process(2, 1, "b", GIB, GIB)]) == 3 * GIB


def test_a_segment_that_many_map_was_taken_once() -> None:
    """Sixteen others came to a gigabyte of shared memory; the server took five."""
    others = tuple(Process(pid, 1, "db", 9 << 20, GIB) for pid in range(2, 18))
    now = sample(60, available=4 * GIB, shmem=GIB, driver=5 * GIB, others=others)
    found = between(sample(), now)
    assert found.ours and found.own == 5 * GIB and found.rest == GIB + 16 * (9 << 20)


def test_to_touch_what_is_there_takes_nothing() -> None:
    """Ten gigabytes lay in tmpfs before; who maps them did not take them, server or not."""
    before = sample(shmem=10 * GIB)
    reader = Process(2, 1, "reader", 0, 10 * GIB)
    now = sample(60, available=7 * GIB, shmem=10 * GIB, driver=3 * GIB, others=(reader,))
    assert between(before, now).ours and between(before, now).others == ()
    server, hog = Process(1, 1, "vllm", 0, 10 * GIB), Process(3, 1, "hf", 3 * GIB)
    now = sample(60, available=7 * GIB, shmem=10 * GIB, own=(server,), others=(hog,))
    assert not between(before, now).ours and between(before, now).own == 0


def test_the_driver_s_memory_is_the_server_s() -> None:
    found = between(sample(), sample(30, available=5 * GIB, driver=5 * GIB))
    assert found.ours and found.own == 5 * GIB


def test_a_day_of_looks_is_kept_in_a_few_hundred() -> None:
    guard = Guard(Policy(FLOOR))
    for second in (*range(0, 89_800, 10), *range(89_800, 90_000)):
        guard.see(sample(float(second)))
    kept = [each.at for each in guard._past]
    assert len(kept) < 700 and kept == sorted(kept)
    assert 89_999 - kept[0] > 80_000
    assert sum(each >= 89_940 for each in kept) == 60


# ---- this machine's own /proc ----


def test_this_machine_s_own_processes() -> None:
    found = proc.look(lambda: {os.getpid()}, 0.0)
    assert [each.pid for each in found.own] == [os.getpid()]
    assert found.available > 0 and found.driver >= 0
    assert found.own[0].private > 1 << 20


def test_a_tree_is_followed_and_ended_whole() -> None:
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)\nprint(p.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        other = int(child.stdout.readline())
        tree = Tree(child.pid)
        assert tree.find() and tree.pids() == {child.pid, other}
        tree.kill()
        child.wait()
        assert not tree.runs()
        assert not Path(f"/proc/{other}").exists() or proc.zombie(Path(f"/proc/{other}"))


def test_a_tree_without_its_first_process_is_headless_until_it_is_ended() -> None:
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(p.pid, flush=True)\ninput()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None and child.stdin is not None
        other = int(child.stdout.readline())
        tree = Tree(child.pid)
        assert tree.find() and tree.pids() == {child.pid, other} and not tree.headless()
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.wait()
        assert tree.runs() and tree.headless() and tree.pids() == {other}
        tree.kill()
        assert not tree.runs() and not tree.headless()


def test_shared_memory_that_is_left_is_removed_and_that_in_use_is_not() -> None:
    made = shared_memory.SharedMemory(create=True, size=4096)
    kept = shared_memory.SharedMemory(create=True, size=4096)
    try:
        used = shm.used([os.getpid()])
        assert {Path("/dev/shm") / made.name, Path("/dev/shm") / kept.name} <= used
        made.close()
        gone = shm.clean([Path("/dev/shm") / made.name, Path("/dev/shm") / kept.name])
        assert gone == [Path("/dev/shm") / made.name]
    finally:
        kept.close()
        kept.unlink()
        from multiprocessing import resource_tracker

        resource_tracker.unregister(f"/{made.name}", "shared_memory")


# ---- the command ----


def test_another_daemon_s_address_is_refused(tmp_path: Path) -> None:
    assert socket_of({"DOCKER_HOST": "unix:///x.sock"}) == "/x.sock"
    with pytest.raises(DockerFault, match="this node's own"):
        socket_of({"DOCKER_HOST": "ssh://worker"})
    if not Path(SOCKET).exists():
        (tmp_path / "docker.sock").touch()
        assert socket_of({"XDG_RUNTIME_DIR": str(tmp_path)}) == str(tmp_path / "docker.sock")
    with pytest.raises(DockerFault, match="does not answer") as fault:
        Engine(str(tmp_path / "none")).inspect("x")
    assert "systemctl status docker" in fault.value.needed


@pytest.mark.parametrize(
    ("argv", "environ", "told"),
    [
        ([], {}, "name one container"),
        (["x", "--pid", "1"], {}, "name one container"),
        (["x", "lots"], {}, "'lots' is no number"),
        (["x"], {"DSV41_MEM_GUARD_GIB": "lots"}, "DSV41_MEM_GUARD_GIB: 'lots'"),
        (["x"], {"DSV41_MEM_GUARD_SAMPLES": "0"}, "DSV41_MEM_GUARD_SAMPLES: '0'"),
        (["--pid", "-3"], {}, "no whole number"),
        ([""], {}, "name one container"),
    ],
)
def test_what_cannot_be_is_refused(
    argv: list[str], environ: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(argv, environ)
    assert end.value.code == 2 and told in capsys.readouterr().err


def test_the_dot_env_s_word_is_above_the_environment_s(tmp_path: Path) -> None:
    assert memguard.environment(tmp_path, {"DSV41_MEM_GUARD": "1"}) == {"DSV41_MEM_GUARD": "1"}
    (tmp_path / ".env").write_text("DSV41_MEM_GUARD=1\nDSV41_MEM_GUARD_GIB='2.5'\n")
    found = memguard.environment(tmp_path, {"DSV41_MEM_GUARD": "0", "DSV41_MEM_GUARD_ANY": "1"})
    assert found == {
        "DSV41_MEM_GUARD": "1", "DSV41_MEM_GUARD_GIB": "2.5", "DSV41_MEM_GUARD_ANY": "1"
    }  # fmt: skip
    (tmp_path / ".env").write_text("DSV41_MEM_GUARD=yes\n")
    assert memguard.main(["x"], {}, tmp_path) == 2


SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "memguard.sh"


def test_a_server_that_ends_by_itself(tmp_path: Path) -> None:
    """The script itself, beside a process that lives for a moment."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        words = [str(SCRIPT), "--pid", str(server.pid), "--gib", "0", "--armed"]
        log, held = tmp_path / "guard.log", tmp_path / "guard.pid"
        words += ["--log", str(log), "--pidfile", str(held)]
        with subprocess.Popen(words) as guard:
            while not (tmp_path / "guard.log.low.json").exists():
                assert guard.poll() is None
                time.sleep(0.05)
            assert " armed: " in log.read_text()
            assert held.read_text().strip() == str(guard.pid)
            server.communicate(b"\n")
            assert guard.wait(20) == 0
    assert f"pid {server.pid} is gone" in log.read_text()
    low = json.loads((tmp_path / "guard.log.low.json").read_text())
    assert low["available"] > 0 and not (tmp_path / "guard.log.why.json").exists()


def test_a_pid_is_not_waited_for_and_is_known_by_its_first_look(tmp_path: Path) -> None:
    """Whoever has it later is another, and would be stopped in the server's place."""
    began = time.monotonic()
    done = subprocess.run([str(SCRIPT), "--pid", str(2**30)], capture_output=True, text=True)
    assert done.returncode == 1 and "needed: the pid of a running server" in done.stderr
    assert time.monotonic() - began < 30
    node = Node(tmp_path / "proc")
    node.write()
    tree = Tree(SERVER, node.root)
    assert tree.find() and tree.find()
    stat = node.root / str(SERVER) / "stat"
    stat.write_text(stat.read_text().replace(f" {SERVER * 10} ", " 77 "))
    assert not tree.find() and SERVER not in tree.pids()


def test_a_container_that_never_comes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.names_given = {}
    story = Story(node, lambda at: None)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    assert not command._found(node.container(), story, 0.0)  # type: ignore[arg-type]
    assert story.told("did not come within 0 s: it does not run")


def test_a_full_disk_behind_its_output_does_not_end_it() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server,
        open("/dev/full", "wb") as full,
        subprocess.Popen(
            [str(SCRIPT), "--pid", str(server.pid)], stdout=full, stderr=subprocess.PIPE
        ) as guard,
    ):
        with pytest.raises(subprocess.TimeoutExpired):
            guard.wait(2)
        server.communicate(b"\n")
        _, told = guard.communicate(timeout=20)
        assert guard.returncode == 0 and told == b""


def test_a_guard_that_is_ended_says_that_nobody_guards(tmp_path: Path) -> None:
    log = tmp_path / "guard.log"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        words = [str(SCRIPT), "--pid", str(server.pid), "--log", str(log)]
        with subprocess.Popen(words) as guard:
            while not (tmp_path / "guard.log.low.json").exists():
                assert guard.poll() is None
                time.sleep(0.05)
            guard.terminate()
            assert guard.wait(20) == 128 + 15
        server.communicate(b"\n")
    assert f"ended by SIGTERM: nobody guards pid {server.pid} now" in log.read_text()


def test_its_own_tree_is_not_guarded_from_within(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(SCRIPT), "--pid", str(os.getpid()), "--wait", "1"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "holds the guard itself" in done.stdout


def test_a_log_that_cannot_be_written_is_told_before_it_goes_into_the_background(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    words = [str(SCRIPT), "--pid", str(os.getpid()), "--detach", "--log", f"{tmp_path}/file/x.log"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "a file that this user may write" in done.stderr


def test_with_no_environment_at_all() -> None:
    words = ["env", "-i", "/bin/sh", str(SCRIPT), "--pid", str(2**30), "--wait", "0"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and f"no process {2**30} runs" in done.stderr, done.stderr
