"""Writes a rank's packed files: each row's weights and scales side by side, one read a row.

    python -m spark_overlay.engram.pack --source DIR --out DIR --rank R --tp N [--plan | --verify]

About 47 GiB a table. A run that was stopped goes on where it was: every 64 MiB the data is on the
drive before the progress file says so. Neither reads nor writes stay in the page cache, which on a
Spark is the GPU's memory. A file has its name only when it is whole.

``./start.sh pack`` runs it on both nodes. It reads the JSON line of ``--plan`` (`Plan`) and lines
"packed 1.20 of 101.38 GB, 2.10 GB/s, 48 s left"; all else is for people. The exit status is 0 when
all files are whole, 1 after an error (one line on stderr), 143 and 130 after a signal.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.meter import Meter
from spark_overlay.engram.packed import (
    HEADER_BYTES,
    PackedHeader,
    check_header,
    expected_header,
    interleave,
    read_packed,
)
from spark_overlay.engram.source import TableSource, locate_tables, read_layout
from spark_overlay.engram.store import Bytes, EngramReadError
from spark_overlay.engram.writing import (
    SPARE_BYTES,
    Plan,
    Stopped,
    free_bytes,
    stop,
    sync_folder,
)
from spark_overlay.headers import HeaderError

CHUNK_BYTES = 64 << 20
_CRUMB = 8 << 20  # bytes of rows in memory at once

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Task:
    """One table to write: ``path``, with ``.tmp`` and ``.progress`` beside it until it is whole."""

    source: TableSource
    header: PackedHeader
    path: Path

    @property
    def temporary(self) -> Path:
        return self.path.with_name(self.path.name + ".tmp")

    @property
    def progress(self) -> Path:
        return self.path.with_name(self.path.name + ".progress")

    @property
    def title(self) -> str:
        return f"layer {self.header.layer_id}, rank {self.header.rank} of {self.header.tp}"


def plan(source: Path, out: Path, rank: int, tp: int, layers: Sequence[int] = ()) -> list[Task]:
    """The files of this rank. Raises EngramError."""
    layout = read_layout(source)
    tables = locate_tables(source, layout)
    for layer in layers:
        layout.index_of(layer)
    tasks = []
    for layer in layers or layout.layer_ids:
        header = expected_header(tables[layer], layout, rank, tp)
        tasks.append(Task(tables[layer], header, out / header.file_name))
    return tasks


def pack(tasks: Sequence[Task], say: Say = print, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Write the files that are not there yet. Raises EngramError; a later call goes on."""
    left = [task for task in tasks if not _present(task, say)]
    for task in left:
        task.path.parent.mkdir(parents=True, exist_ok=True)
    _check_space(left)
    meter = Meter(say, "packed", sum(task.header.file_bytes for task in left))
    for task in left:
        _write(task, say, chunk_bytes, meter)


def look(tasks: Sequence[Task]) -> Plan:
    """Writes nothing. Raises EngramError for a file that is there and is not of this source."""
    absent = [task for task in tasks if not _present(task, lambda line: None)]
    folder = tasks[0].path.parent
    total = sum(task.header.file_bytes for task in tasks)
    have = sum(_allocated(task.temporary) for task in absent)
    left = max(0, sum(task.header.file_bytes for task in absent) - have)
    names = tuple(task.path.name for task in absent)
    return Plan(
        str(folder), total, left, free_bytes(folder), left + SPARE_BYTES if names else 0, names
    )


def verify(tasks: Sequence[Task], say: Say = print) -> None:
    """Compare every row with the shard. Raises EngramError that names the first wrong row."""
    for task in tasks:
        try:
            found = read_packed(task.path)
        except FileNotFoundError:
            raise EngramError(f"{task.path}: missing; run without --verify first") from None
        check_header(task.path, found.header, task.header, task.source)
    meter = Meter(say, "verified", sum(task.header.file_bytes for task in tasks))
    for task in tasks:
        _compare(task, say, meter)


def _present(task: Task, say: Say) -> bool:
    try:
        found = read_packed(task.path)
    except FileNotFoundError:
        return False
    check_header(task.path, found.header, task.header, task.source)
    say(f"{task.path}: present")
    return True


def _check_space(tasks: Sequence[Task]) -> None:
    if not tasks:
        return
    plan = look(tasks)
    if plan.free < plan.needed:
        raise EngramError(
            f"{plan.folder}: {plan.free / 1e9:.1f} GB free, {plan.needed / 1e9:.1f} GB needed for "
            f"{', '.join(plan.absent)}. Free some, or choose another folder"
        )


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _write(task: Task, say: Say, chunk_bytes: int, meter: Meter) -> None:
    header, row_bytes = task.header, task.header.row_bytes
    each = max(1, chunk_bytes // row_bytes)
    with _opened(task) as out, _shard(task.source) as shard:
        done = _resume(task, out)
        if done:
            say(f"{task.title}: goes on after {done} rows")
        meter.skip(HEADER_BYTES + done * row_bytes)
        synced = HEADER_BYTES + done * row_bytes
        while done < header.hi - header.lo:
            count = min(each, header.hi - header.lo - done)
            try:
                for lo, rows in _rows(task.source, shard, header.lo + done, count):
                    at = HEADER_BYTES + (lo - header.lo) * row_bytes
                    _write_all(out, rows.reshape(-1), at)
                os.fdatasync(out)
                _record(task, done + count)
            except OSError as error:
                _stopped(task, error)
            done += count
            end = HEADER_BYTES + done * row_bytes
            os.posix_fadvise(out, synced, end - synced, os.POSIX_FADV_DONTNEED)
            synced = end
            meter.add(count * row_bytes)
        os.fsync(out)
        os.replace(task.temporary, task.path)
        task.progress.unlink(missing_ok=True)
        sync_folder(task.path.parent)
    say(f"{task.path}: whole")


def _stopped(task: Task, error: OSError) -> NoReturn:
    if isinstance(error, EngramReadError):
        raise error
    mend = "Free some space" if error.errno == errno.ENOSPC else "Look after the drive"
    raise EngramError(
        f"{task.temporary}: cannot be written ({error}). {mend} and run it again: it goes on from "
        "here"
    ) from error


@contextmanager
def _opened(task: Task) -> Iterator[int]:
    """The temporary file, held by this process alone."""
    fd = os.open(task.temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EngramError(
                f"{task.temporary}: another process packs this file; wait for it"
            ) from None
        if not _is_still(fd, task.temporary):  # the process before us just gave it its name
            raise EngramError(f"{task.path}: another process packed it just now")
        yield fd
    finally:
        os.close(fd)


def _is_still(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _resume(task: Task, out: int) -> int:
    """Rows of the temporary file that are on the drive; 0 after writing a fresh header."""
    header = task.header.to_bytes()
    try:
        said = json.loads(task.progress.read_bytes())
        done = int(said["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        done = 0
    whole = HEADER_BYTES + done * task.header.row_bytes
    same = os.pread(out, HEADER_BYTES, 0) == header
    if same and 0 < done <= task.header.hi - task.header.lo and os.fstat(out).st_size >= whole:
        os.ftruncate(out, whole)
        return done
    task.progress.unlink(missing_ok=True)
    os.ftruncate(out, 0)
    _write_all(out, np.frombuffer(header, np.uint8), 0)
    return 0


def _record(task: Task, done: int) -> None:
    fresh = task.progress.with_name(task.progress.name + ".tmp")
    with fresh.open("w") as file:
        json.dump({"rows": done}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, task.progress)


def _compare(task: Task, say: Say, meter: Meter) -> None:
    header, row_bytes = task.header, task.header.row_bytes
    meter.skip(HEADER_BYTES)
    fd = os.open(task.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _shard(task.source) as shard:
            for lo, rows in _rows(task.source, shard, header.lo, header.hi - header.lo):
                at = HEADER_BYTES + (lo - header.lo) * row_bytes
                found = _read(fd, task.path, at, rows.size).reshape(rows.shape)
                wrong = np.flatnonzero((found != rows).any(axis=1))
                if wrong.size:
                    row = int(wrong[0])
                    raise EngramError(
                        f"{task.path}: row {lo + row} at byte {at + row * row_bytes} is not the "
                        f"shard's. Remove it and pack again; look after the drive"
                    )
                meter.add(rows.size)
    finally:
        os.close(fd)
    say(f"{task.path}: equal to {task.source.file}")


def _rows(source: TableSource, shard: int, lo: int, count: int) -> Iterator[tuple[int, Bytes]]:
    """Rows lo..lo+count-1 as a packed file holds them, a few MiB at a time."""
    each = max(1, _CRUMB // (source.dim + source.scale_dim))
    for first in range(lo, lo + count, each):
        n = min(each, lo + count - first)
        at, scale_at = (
            source.weight_begin + first * source.dim,
            source.scale_begin + first * source.scale_dim,
        )
        weights = _read(shard, source.file, at, n * source.dim).reshape(n, -1)
        scales = _read(shard, source.file, scale_at, n * source.scale_dim).reshape(n, -1)
        yield first, interleave(weights, scales)


@contextmanager
def _shard(source: TableSource) -> Iterator[int]:
    fd = os.open(source.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, path: Path, at: int, count: int) -> Bytes:
    buffer = np.empty(count, np.uint8)
    got = 0
    while got < count:
        try:
            more = os.preadv(fd, [buffer[got:].data], at + got)
        except OSError as error:
            raise EngramReadError(
                f"{path}: cannot be read at byte {at + got} ({error}). Look after the drive"
            ) from error
        if more == 0:
            raise EngramReadError(
                f"{path}: ends at byte {at + got}, {count - got} bytes too early. Make or download "
                "it again"
            )
        got += more
    os.posix_fadvise(fd, at, count, os.POSIX_FADV_DONTNEED)
    return buffer


def _write_all(fd: int, data: Bytes, at: int) -> None:
    done = 0
    while done < data.size:
        done += os.pwrite(fd, data[done:].data, at + done)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="spark_overlay.engram.pack",
        description="Write this rank's packed Engram files.",
        allow_abbrev=False,
    )
    parser.add_argument("--source", type=Path, required=True, help="shards, index and config.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True, help="ranks in all")
    parser.add_argument("--layers", type=int, nargs="+", default=(), help="not all of them")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--plan", action="store_true", help="say what is to be done, write none")
    instead.add_argument(
        "--verify", action="store_true", help="compare with the shards, write none"
    )
    asked = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        tasks = plan(asked.source, asked.out, asked.rank, asked.tp, asked.layers)
        if asked.plan:
            say(json.dumps(asdict(look(tasks))))
        else:
            (verify if asked.verify else pack)(tasks, say)
    except (EngramError, HeaderError, OSError) as error:
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
