"""Writes a rank's prepared file: its share of the checkpoint, cut, to be read straight.

    python -m spark_overlay.loading.prepare --source MODEL --out DIR --rank R --tp N
                                            [--plan | --verify]

Some 99 GB a rank of the published pack. Neither reads nor writes stay in the page cache. The file
has its name only when it is whole; one that was stopped goes on where it was (``journal``): every
256 MiB the data is on the drive before the progress file says so.

``./start.sh prepare`` runs it on both nodes and reads what it says as it reads the Engram packer's
(spark_overlay.engram.pack).
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from spark_overlay.engram.meter import Meter
from spark_overlay.engram.writing import (
    SPARE_BYTES,
    Plan,
    Stopped,
    free_bytes,
    stop,
    sync_folder,
)
from spark_overlay.headers import CheckpointHeaders, HeaderError
from spark_overlay.loading import prepared
from spark_overlay.loading.journal import Journal, plan_hash
from spark_overlay.loading.plan import BLOCK, Block, Wanted, blocks
from spark_overlay.loading.prepared import Kept, Origin, PreparedError
from spark_overlay.loading.reader import LoadError, Reader, ring

SYNC = 256 << 20
THREADS, SLOTS = 4, 6

Say = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """The file to write, ``path``, with ``.tmp`` beside it until it is whole."""

    model: Path
    path: Path
    origin: Origin
    parts: list[Kept]
    front: bytes
    starts: list[int]

    @property
    def temporary(self) -> Path:
        return self.path.with_name(self.path.name + ".tmp")

    @property
    def size(self) -> int:
        return prepared.size(self.parts, self.front)

    def blocks(self, size: int) -> list[Block]:
        """What is read, in the order of the checkpoint's files, ``size`` bytes at most each."""
        return list(blocks(self.wanted(), size))

    def journal(self, plan: Sequence[Block]) -> Journal:
        return Journal(self.temporary, self.size, plan_hash(self.front, plan))

    def wanted(self) -> list[Wanted]:
        """What is read; ``into`` is where in the file it begins."""
        pairs = zip(self.parts, self.starts, strict=True)
        return [Wanted(one.name, one.header, one.cut, start) for one, start in pairs]


def task(model: Path, out: Path, rank: int, ranks: int) -> Task:
    """Raises PreparedError, HeaderError or Exl3FormatError for a checkpoint that cannot be cut."""
    of = prepared.origin(model, rank, ranks)
    try:
        config = json.loads((model / "config.json").read_text())
        groups = int(config.get("text_config", config)["o_groups"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreparedError(
            f"{model / 'config.json'}: o_groups cannot be read ({error!r}). Download it again"
        ) from None
    tensors = CheckpointHeaders.scan(model, whole=True).tensors
    parts = prepared.kept(tensors, rank, ranks, groups)
    front, starts = prepared.layout(parts, of)
    return Task(model, out / of.file_name, of, parts, front, starts)


def look(job: Task, block: int = BLOCK) -> Plan:
    """What there is to do. Raises PreparedError for a file that is there and of another origin."""
    present = prepared.find(job.path.parent, job.origin) is not None
    left = 0 if present else job.size
    if left and job.temporary.exists():
        left -= job.journal(job.blocks(block)).read()[1]
    needed = 0 if present else job.size + SPARE_BYTES  # what the temporary file has is free to it
    folder = job.path.parent
    absent = () if present else (job.path.name,)
    free = free_bytes(folder) + (job.temporary.stat().st_size if job.temporary.exists() else 0)
    return Plan(str(folder), job.size, left, free, needed, absent)


def prepare(job: Task, say: Say = print, block: int = BLOCK) -> None:
    """Write the file if it is not there. Raises PreparedError, LoadError; a later call goes on."""
    plan = look(job, block)
    if not plan.absent:
        say(f"{job.path}: present")
        return
    if plan.free < plan.needed:
        raise PreparedError(
            f"{plan.folder}: {plan.free / 1e9:.1f} GB free, {plan.needed / 1e9:.1f} GB needed for "
            f"{job.path.name}. Free some, or choose another folder"
        )
    job.path.parent.mkdir(parents=True, exist_ok=True)
    meter = Meter(say, "packed", job.size)
    with _opened(job) as out:
        try:
            read = job.blocks(block)
            journal = job.journal(read)
            first, done = journal.read()
            if first:
                say(f"{job.path.name}: goes on after {done / 1e9:.2f} GB")
            else:
                journal.remove()
                os.ftruncate(out, 0)
                os.posix_fallocate(out, 0, job.size)
            meter.skip(done + len(job.front))
            _write(out, job.front, 0)
            since, current = 0, first
            for number, at, data in _cut(read, block, first):
                if since >= SYNC and number > current:  # the blocks before this one are written
                    _settle(out)
                    journal.write(number, done)
                    since = 0
                current = number
                _write(out, data, at)
                meter.add(len(data))
                done += len(data)
                since += len(data)
            _settle(out)
            os.fsync(out)
            os.replace(job.temporary, job.path)
            sync_folder(job.path.parent)
            journal.remove()
        except OSError as error:
            mend = "Free some space" if error.errno == errno.ENOSPC else "Look after the drive"
            raise PreparedError(
                f"{job.temporary}: cannot be written ({error}). {mend} and run it again: it goes "
                "on from here"
            ) from error
    say(f"{job.path}: whole")


def verify(job: Task, say: Say = print, block: int = BLOCK) -> None:
    """Compare every byte with the checkpoint's. Raises PreparedError naming the first tensor that
    differs."""
    found = prepared.find(job.path.parent, job.origin)
    if found is None:
        raise PreparedError(f"{job.path}: missing; run without --verify first")
    if {name: one.shape for name, one in found.items()} != {p.name: p.shape for p in job.parts}:
        raise PreparedError(
            f"{job.path}: holds other tensors than the checkpoint. Remove it and make it again"
        )
    meter = Meter(say, "verified", job.size)
    names = dict(zip(job.starts, (one.name for one in job.parts), strict=True))
    with job.path.open("rb", buffering=0) as file:
        if file.read(len(job.front)) != job.front:
            raise PreparedError(f"{job.path}: its header is not the checkpoint's. Make it again")
        meter.skip(len(job.front))
        for _, at, data in _cut(job.blocks(block), block):
            if os.pread(file.fileno(), len(data), at) != data:
                name = names[max(start for start in job.starts if start <= at)]
                raise PreparedError(
                    f"{job.path}: {name} is not the checkpoint's (at byte {at}). Remove it and "
                    "make it again; look after the drive"
                )
            os.posix_fadvise(file.fileno(), 0, at, os.POSIX_FADV_DONTNEED)
            meter.add(len(data))
    say(f"{job.path}: equal to {job.model}")


def _cut(plan: Sequence[Block], size: int, first: int = 0) -> Iterator[tuple[int, int, bytearray]]:
    """Of block ``first`` and those after it, piece by piece: the block's number, where in the
    prepared file the piece belongs, and the piece."""
    _, slots = ring(SLOTS, size)
    with closing(Reader(plan[first:], slots, threads=THREADS, told=lambda text: None)) as reader:
        for number, (block, slot) in enumerate(reader, first):
            held = slots[slot][: block.length]
            for one in block.tensors:
                for target, data in prepared.gathered(one, block.begin, held):
                    yield number, one.into + target, data
            reader.release(slot)


def _settle(out: int) -> None:
    os.fdatasync(out)
    os.posix_fadvise(out, 0, 0, os.POSIX_FADV_DONTNEED)


def _write(out: int, data: bytes | bytearray, at: int) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(out, view[done:], at + done)


@contextmanager
def _opened(job: Task) -> Iterator[int]:
    """The temporary file, held by this process alone."""
    fd = os.open(job.temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PreparedError(
                f"{job.temporary}: another process writes this file; wait for it"
            ) from None
        yield fd
    finally:
        os.close(fd)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="spark_overlay.loading.prepare",
        description="Write this rank's prepared weights.",
        allow_abbrev=False,
    )
    parser.add_argument("--source", type=Path, required=True, help="the checkpoint's directory")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True, help="ranks in all")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--plan", action="store_true", help="say what is to be done, write none")
    instead.add_argument("--verify", action="store_true", help="compare, write none")
    asked = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        job = task(asked.source, asked.out, asked.rank, asked.tp)
        if asked.plan:
            say(json.dumps(asdict(look(job))))
        else:
            (verify if asked.verify else prepare)(job, say)
    except (PreparedError, HeaderError, LoadError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"stopped by {stopped}; the next run goes on from here", file=sys.stderr)
        return 128 + stopped.number
    return 0


if __name__ == "__main__":
    for _number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_number, stop)
    sys.exit(main())
