#!/usr/bin/env python3
"""Loading a rank's share of a checkpoint, beside what fio reads from the same drive:

    python overlay/benchmarks/load.py --folder DIR [--device cuda] [--limit 170] [--json PATH]

A set of shards of the published experts' sizes is made in DIR (on the drive that is meant) and
removed again. Needs torch, not vLLM: matrices are allocated, read, cut and placed by the same code
that loads the model. In each turn fio reads the files from end to end, past the page cache, by two
settings, and each of our ways loads once; who is first changes from turn to turn. Each of ours is a
process of its own, in a cgroup with 1.5 times the rank's share where one can be made, and checks
every byte that it placed against the file (``--check-once``: in the first turn).

fio       GB/s of its better setting, each turn. Without fio ``raw``: our reader alone, twice.
load      ``read`` GB/s of what was read of the drive, ``kept`` of what stays on the rank; ``of the
          baseline``: read over the median of fio's turns. ``cpu`` seconds, user and system, of the
          loading alone. ``anon`` MiB: the largest that the process's anonymous memory was,
          interpreter and torch included; ``bound``: the share (on a CPU) + the staging memory + 200
          MiB; ``before`` of it was there before the loading (CUDA's context is large). ``cached``
          MiB: the most of the shards that lay in the page cache.
prepared  the same of a prepared file of this rank, read straight.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests/gpu"))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "overlay"))

import load_rank
import load_set
import results

from spark_overlay.headers import TensorHeader
from spark_overlay.loading import cuts, prepare
from spark_overlay.loading.plan import BLOCK, Wanted, blocks
from spark_overlay.loading.reader import Reader, ring

ROOT = Path(__file__).resolve().parents[2]
Values = dict[str, Any]
MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
#: What is asked of a rank: least part of fio's speed, and memory beyond share and staging.
ENOUGH, ALLOWANCE = 0.85, 200 * MIB
WAYS = ("direct", "buffered", "prepared")
#: fio's settings: bytes of a read and reads in flight.
FIO = (("1M", 32), ("8M", 8))
#: Seconds before each of fio's reads, in which ours would start their interpreter: a shared drive
#: gives more after a pause.
REST = 2.0


def raw(files: list[Path]) -> float:
    """GB/s of the same files read from end to end by our reader into memory that no one looks at;
    for machines without fio."""
    whole = []
    for file in files:
        header = TensorHeader("U8", (file.stat().st_size,), 0, file.stat().st_size, file)
        whole.append(Wanted(file.name, header, cuts.whole(header)))
    _, slots = ring(8, BLOCK)
    reader = Reader(list(blocks(whole)), slots, threads=8)
    began, count = time.perf_counter(), 0
    for block, slot in reader:
        count += block.needed
        reader.release(slot)
    return count / 1e9 / (time.perf_counter() - began)


def works(tool: str) -> bool:
    return (
        shutil.which(tool) is not None
        and not subprocess.run([tool, "--version"], capture_output=True).returncode
    )


def hurry(nice: int) -> None:
    """Of this process and, where the kernel shares by sessions, of a session of its own."""
    if not nice:
        return
    os.setsid()
    os.nice(nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def fio(files: list[Path], size: str, depth: int, nice: int) -> float:
    """GB/s of the files read once, from end to end: ``depth`` reads of ``size`` at a time."""
    argv = [
        "fio", "--name=read", f"--filename={':'.join(map(str, files))}", "--readonly",
        "--thread", "--rw=read", f"--bs={size}", "--direct=1", "--ioengine=libaio",
        f"--iodepth={depth}", "--file_service_type=sequential", "--output-format=json",
    ]  # fmt: skip
    ran = subprocess.run(argv, capture_output=True, text=True, preexec_fn=lambda: hurry(nice))
    if ran.returncode:
        raise SystemExit(f"fio failed: {ran.stderr[-2000:]}")
    read = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0]["read"]
    return float(read["bw_bytes"] / 1e9)


class Group:
    """A cgroup with a memory limit, version 1 or 2; ``path`` is None where none can be made."""

    def __init__(self, limit: int) -> None:
        first = CGROUPS / "memory"
        where, name = (
            (first, "memory.limit_in_bytes") if first.is_dir() else (CGROUPS, "memory.max")
        )
        self.path: Path | None = where / f"spark-load-{os.getpid()}"
        self.said = f"{limit // MIB} MiB"
        try:
            self.path.mkdir()
            (self.path / name).write_text(str(limit))
        except OSError as error:
            self.said = f"none: {error.strerror} ({self.path})"
            self.close()

    def enter(self) -> None:
        """Put this process in; for a child before it runs anything."""
        if self.path is not None:
            (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        if self.path is not None and self.path.is_dir():
            self.path.rmdir()
        self.path = None


def one_load(asked: argparse.Namespace, folder: Path, share: int, *more: str) -> Values:
    """What one rank in a process of its own says."""
    group = Group(max(share * 3 // 2, share + 2 * ALLOWANCE))  # the latter for small sets
    argv = [sys.executable, str(Path(load_rank.__file__)), "--folder", str(folder)]
    argv += ["--device", asked.device, *more]

    def before() -> None:
        group.enter()
        hurry(asked.nice)

    try:
        ran = subprocess.run(argv, capture_output=True, text=True, preexec_fn=before)
    finally:
        group.close()
    if ran.returncode:
        raise SystemExit(f"the rank ended with {ran.returncode}: {ran.stderr[-3000:]}")
    found: Values = json.loads(ran.stdout.splitlines()[-1])
    return found | {"cgroup": group.said}


def ways_of(asked: argparse.Namespace, folder: Path) -> list[tuple[str, list[str]]]:
    """Names of the rows, and what of load_rank's options each is."""
    ways: list[tuple[str, list[str]]] = []
    if "direct" in asked.ways:
        ways.append(("load, direct", []))
    if "buffered" in asked.ways:
        ways.append(("load, buffered", ["--buffered"]))
    if "prepared" in asked.ways:
        own = folder / "own"
        prepare.prepare(prepare.task(folder, own, load_set.RANK, load_set.RANKS), lambda line: None)
        ways.append(("load, prepared", ["--prepared", str(own)]))
    if asked.sweep:
        ways += [
            (f"load, direct, {threads} of {size} MiB", ["--threads", threads, "--block", size])
            for threads, size in (("1", "8"), ("2", "8"), ("4", "8"), ("8", "4"), ("12", "4"))
        ]
    return ways


def rows(
    asked: argparse.Namespace, folder: Path, left: Callable[[], float]
) -> Iterator[tuple[str, bool, Values]]:
    """All rows, after each turn anew; no turn begins that ``left`` has not the seconds for."""
    files = sorted(folder.glob("*.safetensors"))
    share, ways = load_set.share_bytes(folder), ways_of(asked, folder)
    ours: dict[str, list[Values]] = {name: [] for name, _ in ways}
    baseline, settings = ("fio", FIO) if works("fio") else ("raw, no fio here", ((), ()))
    theirs: list[list[float]] = [[] for _ in settings]

    def they(which: int) -> str:
        time.sleep(REST)
        found = fio(files, *settings[which], asked.nice) if settings[which] else raw(files)
        theirs[which].append(found)
        return f"{baseline} {settings[which]} {found:.3f} GB/s"

    def we(name: str, more: list[str]) -> str:
        unchecked = ["--unchecked"] if ours[name] and asked.check_once else []
        found = one_load(asked, folder, share, *more, *unchecked)
        ours[name].append(found)
        speed = found["read"] / found["seconds"] / 1e9
        return f"{name} {speed:.3f} GB/s, {found['seconds']:.2f} s, CPU {found['cpu']:.2f} s"

    jobs: list[Callable[[], str]] = [partial(they, which) for which in range(len(settings))]
    jobs += [partial(we, name, more) for name, more in ways]
    longest = 0.0
    for turn in range(asked.turns):
        if turn and left() < 1.1 * longest:
            print(f"    no time for turn {turn}: {left():.0f} s left", flush=True)
            return
        began = time.perf_counter()
        first = turn % len(jobs)
        for job in jobs[first:] + jobs[:first]:
            print(f"    turn {turn}: {job()}", flush=True)
        longest = max(longest, time.perf_counter() - began)
        best = [max(of_turn) for of_turn in zip(*theirs, strict=True)]
        yield baseline, True, {"GB/s": spread(best), "turns": len(best)}
        for name, every in ours.items():
            yield name, *judged(every, statistics.median(best), share, asked.device)


def judged(found: list[Values], best: float, share: int, device: str) -> tuple[bool, Values]:
    read = [one["read"] / one["seconds"] / 1e9 for one in found]
    resident = share if device == "cpu" else 0
    bound = (resident + found[0]["staging"] + ALLOWANCE) / MIB
    anon = max(one["anon"] for one in found) / MIB
    before = max(one["before"] for one in found) / MIB
    cached = max(one["cached"] for one in found) / MIB
    values: Values = {
        "read GB/s": spread(read),
        "kept GB/s": spread([one["kept"] / one["seconds"] / 1e9 for one in found]),
        "cpu s": spread([one["cpu"] for one in found]),
        "seconds": spread([one["seconds"] for one in found]),
        "GB read": round(found[0]["read"] / 1e9, 2),
        "GB kept": round(found[0]["kept"] / 1e9, 2),
        "anon MiB": round(anon),
        "before MiB": round(before),
        "bound MiB": round(bound),
        "cached MiB": round(cached, 1),
        "cgroup": found[0]["cgroup"],
        "pinned": found[0]["pinned"],
    }
    used = anon if device == "cpu" else anon - before
    good = all(one["right"] for one in found) and used <= bound
    good = good and cached <= found[0]["staging"] / MIB
    part = statistics.median(read) / best
    values["of the baseline"] = round(part, 3)
    return good and part >= ENOUGH, values


def spread(values: list[float]) -> Values:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def host(device: str) -> results.Result:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    where, driver = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores", "none"
    if device != "cpu":
        where = f"{torch.cuda.get_device_name()}, {where}"
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True).stdout.split("\n")[0]
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    versions |= {"torch": str(torch.__version__), "vllm": "none"}  # it takes no part
    argv = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(argv, capture_output=True, text=True).stdout.strip() or "unknown"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return results.Result(now, where, driver or "unknown", versions, commit)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = options.add_argument
    add("--folder", type=Path, required=True, help="where the shards are made")
    add("--gib", type=float, default=4.0, help="their size")
    add("--device", default="cpu", help="cpu or cuda")
    add("--turns", type=int, default=5, help="of fio and of each way")
    add("--nice", type=int, default=0, help="of fio and ours, on a machine with other work")
    add("--ways", nargs="+", choices=WAYS, default=WAYS, help="which of ours (default: all)")
    add(
        "--limit", type=float, default=math.inf, help="seconds; no turn begins that would end later"
    )
    add("--commit", help="where git cannot say it")
    add("--check-once", action="store_true", help="compare the first turn's bytes only")
    add("--sweep", action="store_true", help="numbers of threads and sizes of blocks, too")
    add("--json", type=Path, help="where the result goes")
    asked = options.parse_args()
    began = time.perf_counter()
    result = host(asked.device)
    result.commit = asked.commit or result.commit
    folder = asked.folder / f"load-benchmark-{os.getpid()}"
    before = os.getloadavg()
    try:
        load_set.make(folder, int(asked.gib * 2**30))
        print(f"    made after {time.perf_counter() - began:.0f} s", flush=True)
        at = time.perf_counter()
        for name, good, values in rows(
            asked, folder, lambda: asked.limit - (time.perf_counter() - began)
        ):
            print(f"{'   ' if good else 'NOT'} {name}: {json.dumps(values)}", flush=True)
            took = round(time.perf_counter() - at, 1)
            result.add({"name": name, "ok": good, "seconds": took, "values": values})
            loads = {"before": before, "after": os.getloadavg()}
            values = {when: [round(one, 2) for one in load] for when, load in loads.items()}
            row = {"name": "load of the machine", "ok": True, "seconds": 0.0, "values": values}
            result.add(row)
            result.seconds = round(time.perf_counter() - began, 1)
            if asked.json:
                result.write(asked.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
