"""Writes a rank's prepared file: its share of the checkpoint, cut, to be read straight.

    python -m spark_overlay.loading.prepare --source MODEL --out DIR --rank R --tp N
                                            [--plan | --verify]

Some 99 GiB a rank of the published pack. Neither reads nor writes stay in the page cache. The file
has its name only when it is whole; one that was stopped is begun anew.

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
from spark_overlay.engram.pack import SPARE_BYTES, Plan, Stopped, free_bytes, stop, sync_folder
from spark_overlay.headers import CheckpointHeaders, HeaderError
from spark_overlay.loading import prepared
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


def look(job: Task) -> Plan:
    """What there is to do. Raises PreparedError for a file that is there and of another origin."""
    present = prepared.find(job.path.parent, job.origin) is not None
    left = 0 if present else job.size
    needed = 0 if present else left + SPARE_BYTES
    folder = job.path.parent
    absent = () if present else (job.path.name,)
    free = free_bytes(folder) + (job.temporary.stat().st_size if job.temporary.exists() else 0)
    return Plan(str(folder), job.size, left, free, needed, absent)


def prepare(job: Task, say: Say = print, block: int = BLOCK) -> None:
    """Write the file if it is not there. Raises PreparedError, LoadError."""
    plan = look(job)
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
            os.ftruncate(out, 0)
            os.posix_fallocate(out, 0, job.size)
            _write(out, job.front, 0)
            since = 0
            for at, data in _cut(job, block):
                _write(out, data, at)
                meter.add(len(data))
                since += len(data)
                if since >= SYNC:
                    _settle(out)
                    since = 0
            meter.skip(len(job.front))
            _settle(out)
            os.fsync(out)
            os.replace(job.temporary, job.path)
            sync_folder(job.path.parent)
        except OSError as error:
            mend = "Free some space" if error.errno == errno.ENOSPC else "Look after the drive"
            raise PreparedError(
                f"{job.temporary}: cannot be written ({error}). {mend} and run it again"
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
        for at, data in _cut(job, block):
            if os.pread(file.fileno(), len(data), at) != data:
                name = names[max(start for start in job.starts if start <= at)]
                raise PreparedError(
                    f"{job.path}: {name} is not the checkpoint's (at byte {at}). Remove it and "
                    "make it again; look after the drive"
                )
            os.posix_fadvise(file.fileno(), 0, at, os.POSIX_FADV_DONTNEED)
            meter.add(len(data))
    say(f"{job.path}: equal to {job.model}")


def _cut(job: Task, size: int) -> Iterator[tuple[int, bytearray]]:
    """Where in the prepared file each piece of what is read belongs, and the piece."""
    _, slots = ring(SLOTS, size)
    plan: list[Block] = list(blocks(job.wanted(), size))
    with closing(Reader(plan, slots, threads=THREADS, told=lambda text: None)) as reader:
        for block, slot in reader:
            held = slots[slot][: block.length]
            for one in block.tensors:
                for target, data in prepared.gathered(one, block.begin, held):
                    yield one.into + target, data
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
        print(f"stopped by {stopped}; the next run begins anew", file=sys.stderr)
        return 128 + stopped.number
    return 0


if __name__ == "__main__":
    for _number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_number, stop)
    sys.exit(main())
