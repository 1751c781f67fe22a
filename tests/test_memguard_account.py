"""The memory guard: who took the memory, between two looks; this machine's own processes."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import os
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

from guarded_node import FLOOR, sample

from launcher.watch.guard import proc, shm
from launcher.watch.guard.core import GIB, Guard, Policy, Process, between, size
from launcher.watch.guard.target import Tree

# ---- attribution ----


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
