"""The `[mem]` lines: what is read, when it is told, and when memory is given back."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_cache import resident

from launcher.runtimes.loglines import progress
from spark_overlay.memory import pagecache
from spark_overlay.memory.gauge import Gauge
from spark_overlay.memory.prefill import Progress, Release, Scheduled, every, rule
from spark_overlay.memory.readings import GIB, Reading, meminfo, read, told
from spark_overlay.settings import OverlaySettings

SPARK = """MemTotal:       127598284 kB
MemFree:         2097152 kB
MemAvailable:    4194304 kB
Buffers:         1048576 kB
Cached:          3145728 kB
Shmem:           2097152 kB
HugePages_Total:       0
"""


def proc(folder: Path, text: str = SPARK, pages: int = 1 << 18) -> Path:
    (folder / "self").mkdir(parents=True, exist_ok=True)
    (folder / "meminfo").write_text(text)
    (folder / "self" / "statm").write_text(f"9999999 {pages} 5 1 0 7 0\n")
    return folder


def test_a_reading_is_proc_s_and_the_allocator_s(tmp_path: Path) -> None:
    found = read(lambda: (3 * GIB, 2 * GIB), proc(tmp_path))
    page = os.sysconf("SC_PAGE_SIZE")
    assert found == Reading(4 * GIB, 2 * GIB, 2 * GIB, page << 18, (3 * GIB, 2 * GIB))
    assert read(proc=tmp_path).cuda is None
    # Files in tmpfs alone are no page cache, and never less than none.
    assert (
        read(proc=proc(tmp_path, SPARK.replace("2097152 kB\nHuge", "9097152 kB\nHuge"))).cached == 0
    )


def test_this_machine_can_be_read() -> None:
    found = read()
    assert found.available > 0 and found.rss > 1 << 20


@pytest.mark.parametrize("line", ["MemAvailable", "MemFree"])
def test_another_meminfo_is_refused_by_the_line_it_lacks(line: str) -> None:
    text = "".join(row for row in SPARK.splitlines(True) if not row.startswith(line))
    with pytest.raises(ValueError, match=line):
        meminfo(text)


def test_a_line_names_everything_and_the_gpu_only_where_there_is_one() -> None:
    one = Reading(4 * GIB, 2 * GIB, GIB, GIB // 2, (99 * GIB, 98 * GIB))
    assert told(one, 3 * GIB) == (
        "4.00 GiB available (lowest 3.00), 2.00 free, 1.00 page cache; this process 0.50 RSS, "
        "CUDA 99.00 reserved, 98.00 allocated"
    )
    assert "CUDA" not in told(Reading(1, 1, 1, 1), 1)


def readings(*available: float) -> Iterator[Reading]:
    for each in available:
        yield Reading(int(each * GIB), 0, 0, 0)


def test_the_lowest_of_all_looks_is_kept() -> None:
    source, lines = readings(9, 4, 6), list[str]()
    gauge = Gauge(lambda: next(source), lines.append)
    assert gauge.lowest is None
    gauge.mark("weights loading")
    gauge.seen()  # without a line
    gauge.mark("weights loaded")
    assert lines[0].startswith("[mem] weights loading: 9.00 GiB available (lowest 9.00)")
    assert lines[1].startswith("[mem] weights loaded: 6.00 GiB available (lowest 4.00)")
    assert gauge.lowest == 4 * GIB


def test_a_long_phase_ticks_and_its_ticks_are_no_progress() -> None:
    lines, ticked = list[str](), threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        if len(lines) >= 3:
            ticked.set()

    gauge = Gauge(lambda: Reading(GIB, 0, 0, 0), write)
    with gauge.during("weights loading", tick=0.01):
        assert ticked.wait(10)
    count = len(lines)
    assert lines[0].startswith("[mem] weights loading: ") and progress(lines[0])
    assert all(line.startswith("[mem] still weights loading, ") for line in lines[1:])
    # As vLLM's logger writes them.
    assert not any(progress(f"(Worker_TP1 pid=1) INFO 11-30 01:00:00 [gauge.py:40] {line}")
                   for line in lines[1:])  # fmt: skip
    assert threading.active_count() == 1 or not any(
        thread.name == "mem-gauge" for thread in threading.enumerate()
    )
    assert len(lines) == count


def test_a_phase_that_fails_ends_its_ticks() -> None:
    gauge = Gauge(lambda: Reading(GIB, 0, 0, 0), lambda line: None)
    with pytest.raises(RuntimeError), gauge.during("weights loading", tick=60):
        raise RuntimeError
    assert not any(thread.name == "mem-gauge" for thread in threading.enumerate())


# ---- release ----


class Allocator:
    """A node with so much available, which a release adds to."""

    def __init__(self, available: float) -> None:
        self.available = int(available * GIB)
        self.calls = 0
        self.lines: list[str] = []

    def release(self) -> None:
        self.calls += 1
        self.available += GIB

    def of(self, tokens: int = 8192, below: float = 2.5, at_end: bool = False) -> Release:
        return Release(
            rule(tokens, below, at_end), lambda: self.available, self.release, self.lines.append
        )


def chunk(before: int, tokens: int = 1024, prompt: int = 600_000) -> Scheduled:
    return Scheduled("r", before, tokens, prompt)


def test_memory_is_released_only_when_it_is_short() -> None:
    node = Allocator(2.0)
    release = node.of()
    assert release.after([chunk(300_000)])
    assert node.calls == 1
    assert "2.00 -> 3.00 GiB available" in node.lines[0] and "301024 tokens" in node.lines[0]
    assert not release.after([chunk(301_024)])  # 3 GiB are there now
    assert node.calls == release.count == 1


def test_short_prompts_and_decoding_release_nothing() -> None:
    node = Allocator(0.5)
    release = node.of()
    assert not release.after([chunk(0), chunk(6144)])
    assert not release.after([chunk(600_000, 4)])  # three drafted tokens and one
    assert not release.after([])
    assert release.after([chunk(7168)])  # exactly 8192


def test_zero_means_always_and_the_end_once() -> None:
    node = Allocator(50)
    assert node.of(below=0).after([chunk(300_000)])
    assert not node.of().after([chunk(599_000, 1000)])
    ending = node.of(at_end=True)
    assert not ending.after([chunk(300_000)])
    assert ending.after([chunk(599_000, 1000)])
    assert node.of(at_end=True).after([chunk(599_990, 10)])  # a small last chunk is an end, too
    assert not node.of(at_end=True).after([chunk(600_000, 6)])


# ---- progress of a prompt ----


class Told:
    def __init__(self, step: int) -> None:
        self.now, self.lines = 0.0, list[str]()
        self.of = Progress(step, self.lines.append, lambda: self.now)

    def run(self, *steps: list[Scheduled], seconds: float = 2.0) -> None:
        for step in steps:
            self.now += seconds
            self.of.after(step)


def test_a_prompt_is_told_every_so_many_tokens_with_its_speed() -> None:
    told = Told(2048)
    told.run(
        *[[chunk(start, 1024, 5000)] for start in range(0, 4096, 1024)], [chunk(4096, 904, 5000)]
    )
    assert told.lines == [
        "prefill 2048 of 5000 tokens, 512.0 tok/s",
        "prefill 4096 of 5000 tokens, 512.0 tok/s",
        "prefill 5000 of 5000 tokens, 452.0 tok/s",
    ]


def test_a_prompt_s_last_chunk_may_be_small_and_decoding_is_silent() -> None:
    told = Told(1024)
    told.run([chunk(0, 1024, 1030)], [chunk(1024, 6, 1030)])
    told.run([chunk(1030, 4, 1030)], [chunk(1034, 4, 1030)])
    assert [line.split(" tokens")[0] for line in told.lines] == [
        "prefill 1024 of 1030", "prefill 1030 of 1030"
    ]  # fmt: skip


def test_a_prompt_that_begins_again_is_told_again() -> None:
    """vLLM preempts a prompt when the pool is full, and computes it anew."""
    told = Told(1024)
    told.run(*[[chunk(start, 1024, 9000)] for start in (0, 1024, 2048)])
    told.run([chunk(0, 1024, 9000)], [chunk(1024, 1024, 9000)])
    assert [line.split(" of")[0] for line in told.lines] == [
        f"prefill {tokens}" for tokens in (1024, 2048, 3072, 1024, 2048)
    ]
    assert all(line.endswith("512.0 tok/s") for line in told.lines)


def test_what_the_prefix_cache_had_is_not_counted_as_speed() -> None:
    told = Told(1024)
    told.run([chunk(90_112, 1024, 92_000)])
    assert told.lines == ["prefill 91136 of 92000 tokens, 512.0 tok/s"]


def test_two_prompts_are_told_apart_and_one_that_left_is_forgotten() -> None:
    told = Told(1024)
    other = Scheduled("s", 0, 512, 9000)
    told.run([chunk(0, 512, 9000), other])
    assert told.lines == []
    told.of.after([], gone=["r"])
    told.run([Scheduled("s", 512, 512, 9000)])
    assert told.lines == ["prefill 1024 of 9000 tokens, 256.0 tok/s"]


def test_how_often_a_prompt_is_told() -> None:
    assert every(600_000, 1024) == 8192
    assert every(4096, 128) == 128
    assert every(4096, 16) == 64
    assert every(1, 1) == 1


# ---- page cache ----


def test_a_file_is_dropped_when_the_reader_has_gone_on() -> None:
    files = {"a": Path("1"), "b": Path("1"), "c": Path("2"), "d": Path("1")}
    said: list[str] = []

    def weights() -> Iterator[tuple[str, int]]:
        for name in "abcxd":  # x is in no file that is known
            said.append(f"read {name}")
            yield name, 0

    found = [
        name for name, _ in pagecache.behind(weights(), files, lambda p: said.append(f"drop {p}"))
    ]
    assert "".join(found) == "abcxd"
    assert said == ["read a", "read b", "read c", "drop 1", "read x", "drop 2", "read d", "drop 1"]


def test_dropped_pages_are_gone(tmp_path: Path) -> None:
    """On the machine's own page cache, counted by mincore."""
    path = tmp_path / "model-00001-of-00001.safetensors"
    path.write_bytes(os.urandom(8 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())  # a dirty page cannot be dropped
    path.read_bytes()
    if resident(path) == 0:
        pytest.fail("this file system keeps no page cache: the test needs a TMPDIR on a disk")
    assert pagecache.drop_all(tmp_path) == 1
    assert resident(path) == 0


def test_a_file_that_is_gone_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not pagecache.drop(tmp_path / "none")
    assert "No such file" in caplog.text


# ---- what the overlay is told ----


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("memory_drop_page_cache", 1, "true or false"),
        ("memory_release_at_end", "no", "true or false"),
        ("memory_release_tokens", 0, "a whole number of at least 1"),
        ("memory_release_below_gib", -1, "a number of at least 0"),
        ("memory_release_below_gib", float("nan"), "a number of at least 0"),
        ("indexer_prefill_factor", 0, "a whole number of at least 1"),
        ("indexer_prefill_factor", 1.5, "a whole number"),
    ],
)
def test_a_setting_that_cannot_be_is_named(key: str, value: object, needed: str) -> None:
    with pytest.raises(ValueError, match=rf"spark_overlay\.{key}: found .*; needed {needed}"):
        OverlaySettings.parse({key: value})
    assert OverlaySettings.parse({}).indexer_prefill_factor is None
