#!/usr/bin/env python3
"""Rows of Engram from the drive, beside what fio gets from it, in one run on one file:

    python overlay/benchmarks/engram.py --folder DIR [--gib 4] [--json PATH] [--quick]

The file is read past the page cache (O_DIRECT); ours and fio's turns alternate. DIR must be on the
drive that is meant; the file is removed again. --file measures one that is there (packed rows).

raw      uniformly random row ids, BATCH at a time. iops are reads of ours a second, ratio is to
         fio's randread of 4 KiB at the same depth, cpu is in processors. A row of a packed file is
         one read, in a shard two; scales of this small file share pages more often than those of
         the real one.
paced    processor time at PACED rows a second.
memory   what the process grows by, from before a store is opened to its largest, buffers apart.
n-grams  of a stream's tokens, the share that is the first of its kind in its CHUNK (``in chunk``)
         and in the whole stream (``ever``: what a cache without end still reads), and what follows
         from it. A token has 24 rows of each rank: of rank 0 two layers' 8 heads of 2-grams and 4
         of 3-grams, of rank 1 4 heads of 3-grams and 8 of 4-grams. A row is read once for each
         n-gram that is new, so with shares d2, d3, d4

             rank 0 reads 2 (8 d2 + 4 d3) rows a token, rank 1 reads 2 (4 d3 + 8 d4),

         and random tokens, whose n-grams are all new, 24 on both. ``gain`` = 24 / reads of each
         rank; the pair waits for rank 1. ``even``: were the heads of all orders shared evenly,
         which vLLM's split of a table into two runs of rows does not do.
         2 times random is thus d3 + 2 d4 <= 1.5 on rank 1. In 16 chunks code has 0.64 + 2 x 0.74 =
         2.12 and prose 0.78 + 2 x 0.87 = 2.53: 1.41 and 1.19 times random are what such texts give,
         and reading less would be reading wrong rows. Even with every row kept that was ever read
         rank 1 has 1.60 and 1.43.
stream   tokens through the published layout's hash, CHUNK at a time: ``distinct`` rows a token of a
         rank, both layers; ``reads`` a token, with a cache of so many MiB a layer (DSV41_CACHE_GIB
         is a node's, of both layers) or none; ``fed`` tokens a second = best iops / reads;
         ``served`` what the lookups of both layers took in fact. Ids are taken modulo the file's
         rows. ``to random``: against random tokens without a cache. ``pair``: the slower rank.
load     of the machine before and after, in processes that want to run: others' too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "overlay"))

import engram_inputs as inputs
import numpy as np
from gpu import results

from spark_overlay.engram import native
from spark_overlay.engram.layout import EngramLayout
from spark_overlay.engram.native import Backend, NativeOptions, NativeRowStore
from spark_overlay.engram.packed import HEADER_BYTES, PackedFile, PackedHeader
from spark_overlay.engram.source import TableSource

ROOT = Path(__file__).resolve().parents[2]
DIM, ROW = 256, 264
BATCH = 24_576  # a layer's ids of a chunk of 2048 tokens, one rank of two
PACED = 60_000  # rows a second
TP = 2
RATIO, CORES, MEMORY_MIB, GAIN = 0.85, 1.0, 64, 2.0  # the bars
SHARD_BEGIN = 1016  # aligned to 8, as safetensors files are

Values = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    file: Path
    library: Path
    seconds: float
    turns: int

    @property
    def packed_rows(self) -> int:
        return (self.file.stat().st_size - HEADER_BYTES) // ROW

    def open(self, kind: str, backend: Backend, depth: int, cache_bytes: int = 0) -> NativeRowStore:
        """The file as packed rows, or as a shard's two regions."""
        options = NativeOptions(depth=depth, backend=backend, cache_bytes=cache_bytes)
        if kind == "packed":
            rows = self.packed_rows
            source = TableSource(1, self.file, rows, DIM, 0, 0)
            header = PackedHeader(1, 0, TP, DIM, 0, rows, rows, bytes(32), bytes(32))
            packed = PackedFile(self.file, header)
            return NativeRowStore(source, 0, rows, packed, options, self.library)
        rows = (self.file.stat().st_size - SHARD_BEGIN) // ROW
        source = TableSource(1, self.file, rows, DIM, SHARD_BEGIN, SHARD_BEGIN + rows * DIM)
        return NativeRowStore(source, 0, rows, None, options, self.library)


class Looker:
    """Lookups into buffers that are made once."""

    def __init__(self, store: NativeRowStore, most: int = BATCH) -> None:
        self.store = store
        self.weights, self.scales = np.ones((most, DIM), np.uint8), np.ones((most, 8), np.uint8)

    def __call__(self, ids: inputs.Ids) -> None:
        self.store.lookup_into(ids, self.weights[: len(ids)], self.scales[: len(ids)])


def right(looker: Looker, ids: inputs.Ids) -> bool:
    """Whether rows are those that plain reads give."""
    looker(ids)
    source = looker.store.source
    weights, scales, strides = source.weight_begin, source.scale_begin, (DIM, 8)
    if looker.store.packed:
        weights, scales, strides = HEADER_BYTES, HEADER_BYTES + DIM, (ROW, ROW)
    fd = os.open(source.file, os.O_RDONLY)
    try:
        return all(
            os.pread(fd, DIM, weights + row * strides[0]) == looker.weights[i].tobytes()
            and os.pread(fd, 8, scales + row * strides[1]) == looker.scales[i].tobytes()
            for i, row in list(enumerate(ids.tolist()))[::37]
        )
    finally:
        os.close(fd)


def measured(looker: Looker, batches: Iterator[inputs.Ids], seconds: float) -> Values:
    """Reads and rows a second, processors, over whole batches."""
    before, wall, cpu = looker.store.stats(), time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        looker(next(batches))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = looker.store.stats()
    return {
        "iops": (after.reads - before.reads) / wall,
        "rows": (after.rows - before.rows) / wall,
        "cpu": cpu / wall,
    }


def random_batches(rows: int, size: int) -> Iterator[inputs.Ids]:
    """A few batches over and over: making ids must not count as reading."""
    rng = np.random.default_rng(2)
    made = [rng.integers(0, rows, size) for _ in range(16)]
    while True:
        yield from made


def fio(file: Path, depth: int, seconds: float) -> float | None:
    """Reads a second, or None without fio."""
    if shutil.which("fio") is None:
        return None
    for engine in ("io_uring", "libaio"):
        argv = [
            "fio", "--name=randread", f"--filename={file}", "--readonly", "--rw=randread",
            "--bs=4k", "--direct=1", f"--ioengine={engine}", f"--iodepth={depth}", "--time_based",
            f"--runtime={max(1, round(seconds))}", "--norandommap", "--randrepeat=0",
            "--output-format=json",
        ]  # fmt: skip
        ran = subprocess.run(argv, capture_output=True, text=True)
        if ran.returncode == 0:
            job = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0]
            return float(job["read"]["iops"])
    raise SystemExit(f"fio failed: {ran.stderr[-2000:]}")


def raw_rows(
    bench: Bench, depth: int, backends: list[Backend]
) -> Iterator[tuple[str, bool, Values]]:
    """fio and every way of ours in turns."""
    ways = [(kind, backend) for backend in backends for kind in ("packed", "shard")]
    theirs: list[float] = []
    ours: dict[tuple[str, Backend], list[Values]] = {way: [] for way in ways}
    fine = dict.fromkeys(ways, True)
    for _ in range(bench.turns):
        if (found := fio(bench.file, depth, bench.seconds)) is not None:
            theirs.append(found)
        for kind, backend in ways:
            with bench.open(kind, backend, depth) as store:
                looker = Looker(store)
                batches = random_batches(store.source.rows, BATCH)
                fine[kind, backend] &= right(looker, next(batches))
                ours[kind, backend].append(measured(looker, batches, bench.seconds))
    if theirs:
        yield f"fio, depth {depth}", True, {"iops": figure(theirs)}
    for kind, backend in ways:
        runs = ours[kind, backend]
        values: Values = {name: figure([run[name] for run in runs]) for name in runs[0]}
        if theirs:
            pairs = zip(runs, theirs, strict=True)  # of the same turn: others use the drive too
            values["ratio"] = round(statistics.median(run["iops"] / of for run, of in pairs), 3)
            best = max(run["iops"] for run in runs) / max(theirs)
            values["best to best"] = round(best, 3)
        values["cpu at 60k rows/s"] = round(
            statistics.median(run["cpu"] / run["rows"] * PACED for run in runs), 3
        )
        good = fine[kind, backend] and (kind == "shard" or values.get("ratio", 1.0) >= RATIO)
        yield f"raw {kind}, {backend}, depth {depth}", good, values


def paced_row(bench: Bench, backend: Backend, depth: int) -> tuple[str, bool, Values]:
    """PACED rows a second in steps of a tenth of a second, as far as the drive gives them."""
    with bench.open("packed", backend, depth) as store:
        step = PACED // 10
        looker, batches = Looker(store), random_batches(store.source.rows, step)
        looker(next(batches))
        began, cpu, steps = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < 2 * bench.seconds:
            looker(next(batches))
            steps += 1
            time.sleep(max(0.0, began + steps / 10 - time.perf_counter()))
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    values = {"rows": round(steps * step / wall), "cpu": round(cpu / wall, 3)}
    return f"paced, {backend}, depth {depth}", values["cpu"] < CORES, values


def memory_row(bench: Bench, backend: Backend, depth: int) -> tuple[str, bool, Values]:
    most = np.ones((BATCH, DIM), np.uint8), np.ones((BATCH, 8), np.uint8)
    batches = random_batches(bench.packed_rows, BATCH)
    next(batches)
    ctypes.CDLL(None).malloc_trim(0)  # what is free already must not hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far counts no more
    before = _status("VmRSS")
    with bench.open("packed", backend, depth) as store:
        until = time.perf_counter() + bench.seconds
        while time.perf_counter() < until:
            store.lookup_into(next(batches), *most)
        grown = (_status("VmHWM") - before) / 1024
    return f"memory, {backend}, depth {depth}", grown < MEMORY_MIB, {"MiB": round(grown, 1)}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def stream_rows(
    bench: Bench, asked: argparse.Namespace, depth: int, iops: float
) -> Iterator[tuple[str, bool, Values]]:
    """Distinct rows a token and tokens a second of each stream, by rank and cache."""
    own, count = inputs.layout(), asked.chunks * inputs.CHUNK
    limit = own.compressed_vocab_size
    texts = {"random": inputs.random_tokens(count, limit)}
    for name, text in (("code", inputs.code), ("prose", inputs.prose)):
        tokens = inputs.pieces(text(5 * count), asked.tokenizer)[:count]
        texts[name] = inputs.compressed(tokens, limit)
    for name, ids in texts.items():
        yield f"n-grams {name}", True, ngram_values(own, ids)
    slower: dict[tuple[str, int], list[float]] = {}
    for rank in range(TP):
        plain: Values = {}
        for name, ids in texts.items():
            steps = list(inputs.chunks(own, ids, rank, TP))
            distinct = sum(len(np.unique(part)) for step in steps for part in step)
            for mib in (0, *(asked.caches if name != "random" else ())):
                values = served(bench, depth, steps, mib)
                if mib == 0:
                    values["distinct"] = round(distinct / len(steps) / inputs.CHUNK, 2)
                values["fed"] = round(iops / values["reads"])
                slower.setdefault((name, mib), []).append(values["fed"])
                plain = plain or values
                gains = {key: round(values[key] / plain[key], 2) for key in ("fed", "served")}
                good = name == "random" or gains["fed"] >= GAIN
                values |= {"to random": gains, "tokens": len(steps) * inputs.CHUNK}
                yield f"stream {name}, rank {rank} of {TP}, cache {mib}", good, values
    plainly = min(slower["random", 0])
    for (name, mib), fed in slower.items():
        gain = round(min(fed) / plainly, 2)
        good = name == "random" or gain >= GAIN
        values = {"fed": min(fed), "to random": {"fed": gain}}
        yield f"stream {name}, pair, cache {mib}", good, values


def ngram_values(own: EngramLayout, ids: inputs.Ids) -> Values:
    """What the text itself allows, by rank: see ``n-grams`` above."""
    orders = range(2, own.max_ngram + 1)
    both = {n: inputs.fresh(ids, n) for n in orders}
    found: Values = {"tokens": len(ids)}
    for at, kept in enumerate(("in chunk", "ever")):
        shares = {n: both[n][at] for n in orders}
        gains = {}
        for rank in range(TP):
            mine = range(*own.rank_range(own.layer_ids[0], rank, TP).columns)
            reads = sum(shares[2 + column // own.heads] for column in mine)
            gains[f"rank {rank}"] = round(len(mine) / reads, 2)
        gains["even"] = round(len(shares) / sum(shares.values()), 2)
        rounded = {f"{n}-grams": round(share, 3) for n, share in shares.items()}
        found[kept] = rounded | {"gain": gains}
    return found


def served(bench: Bench, depth: int, steps: list[list[inputs.Ids]], mib: int) -> Values:
    """Both layers' lookups of every chunk, one after the other, from two stores on the file."""
    rows = bench.packed_rows
    placed = [[part % rows for part in step] for step in steps]
    with contextlib.ExitStack() as stack:
        opened = [bench.open("packed", "auto", depth, mib << 20) for _ in steps[0]]
        lookers = [Looker(stack.enter_context(store)) for store in opened]
        wall, cpu = time.perf_counter(), time.process_time()
        for step in placed:
            for looker, part in zip(lookers, step, strict=True):
                looker(part)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        reads = sum(looker.store.stats().reads for looker in lookers)
    tokens = len(steps) * inputs.CHUNK
    return {
        "reads": round(reads / tokens, 2),
        "served": round(tokens / wall),
        "cpu": round(cpu / wall, 2),
    }


def figure(values: list[float]) -> Values:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def make_file(path: Path, size: int) -> None:
    rng, step = np.random.default_rng(3), 16 << 20
    with path.open("wb") as file:
        for at in range(0, size, step):
            file.write(rng.bytes(min(step, size - at)))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def host(library: Path) -> results.Result:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    device = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    versions |= {"numpy": np.__version__, "vllm": "none"}  # it takes no part
    if found := shutil.which("fio"):
        asked = subprocess.run([found, "--version"], capture_output=True, text=True)
        versions["fio"] = asked.stdout.strip().removeprefix("fio-")
    argv = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(argv, capture_output=True, text=True).stdout.strip() or "unknown"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return results.Result(now, device, "none", versions, commit)


def all_rows(bench: Bench, asked: argparse.Namespace) -> Iterator[tuple[str, bool, Values]]:
    before = os.getloadavg()
    with bench.open("packed", "auto", 1) as store:
        allowed = store.backend
    yield "drive", ", direct" in allowed, drive(bench.file) | {"reads": allowed}
    backends: list[Backend] = ["uring", "pool"] if allowed.startswith("io_uring") else ["pool"]
    for backend in backends:  # first: nothing has grown yet
        yield memory_row(bench, backend, max(asked.depths))
    iops = 0.0
    for depth in asked.depths:
        for name, good, values in raw_rows(bench, depth, backends):
            yield name, good, values
            if name.startswith(f"raw packed, {backends[0]},"):
                iops = values["iops"]["max"]
    for backend in backends:
        yield paced_row(bench, backend, asked.depths[-1])
    yield from stream_rows(bench, asked, asked.depths[-1], iops)
    loads = {"before": before, "after": os.getloadavg()}
    yield "load", True, {when: [round(one, 2) for one in load] for when, load in loads.items()}


def drive(file: Path) -> Values:
    device = os.stat(file).st_dev
    link = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    name = link.resolve().name if link.exists() else "unknown"
    return {"device": name, "file GiB": round(file.stat().st_size / 2**30, 2)}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = options.add_argument
    add("--folder", type=Path, default=Path(), help="where the file is made")
    add("--gib", type=float, default=4.0, help="its size")
    add("--file", type=Path, help="one that is there: read, and left as it is")
    add("--json", type=Path, help="where the result goes")
    add("--depths", type=int, nargs="+", default=[32, 128], help="reads in flight")
    add("--caches", type=int, nargs="*", default=[32, 512], help="MiB a layer")
    add("--chunks", type=int, default=32, help="of each stream")
    add("--tokenizer", type=Path, help="a tokenizer.json; needs the package tokenizers")
    add("--library", type=Path, default=native.LIBRARY)
    add("--quick", action="store_true", help="whether it works at all; the figures mean nothing")
    asked = options.parse_args()
    if asked.quick:
        asked.gib, asked.chunks, asked.depths, asked.caches = 1 / 64, 2, asked.depths[-1:], [1]
    result, began = host(asked.library), time.perf_counter()
    made = asked.folder / f"engram-benchmark-{os.getpid()}.bin"
    try:
        if asked.file is None:
            make_file(made, HEADER_BYTES + int(asked.gib * 2**30) // ROW * ROW)
        seconds, turns = (0.1, 1) if asked.quick else (3.0, 5)
        bench = Bench(asked.file or made, asked.library, seconds, turns)
        at = time.perf_counter()
        for name, good, values in all_rows(bench, asked):
            print(f"{'   ' if good else 'NOT'} {name}: {json.dumps(values)}", flush=True)
            took = round(time.perf_counter() - at, 1)
            result.add({"name": name, "ok": good, "seconds": took, "values": values})
            at = time.perf_counter()
            result.seconds = round(at - began, 1)
            if asked.json:
                result.write(asked.json)
    finally:
        made.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
