"""One program's output into a file or another program, with progress and an end that is told."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launcher import processes
from launcher.errors import LauncherError

BEAT = 0.5  # seconds between two looks
BLOCK = 1 << 20


@dataclass(frozen=True)
class Ended:
    """Statuses in the order of the programs, and the last that each said on stderr."""

    statuses: tuple[int, ...]
    said: tuple[str, ...]

    @property
    def well(self) -> bool:
        return not any(self.statuses)


def into_file(argv: Sequence[str], path: Path, tick: Callable[[int], None]) -> Ended:
    """Run ``argv`` with its output in ``path``; ``tick`` gets the bytes that are there."""
    with path.open("wb") as out, tempfile.TemporaryFile() as errors:
        child = _start(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = child.wait(BEAT)
                    break
                tick(os.fstat(out.fileno()).st_size)
        finally:
            processes.end_group(child)
        return Ended((status,), (_said(errors),))


def follow(argv: Sequence[str], line: Callable[[str], None]) -> Ended:
    """Run ``argv``; ``line`` gets what it says, also where lines are rewritten in place."""
    with tempfile.TemporaryFile() as errors:
        child = _start(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        try:
            assert child.stdout
            rest = b""
            while block := os.read(child.stdout.fileno(), 1 << 16):
                *whole, rest = re.split(rb"[\r\n]+", rest + block)
                for each in whole:
                    line(each.decode("utf-8", "replace"))
            status = child.wait()
        finally:
            processes.end_group(child)
        return Ended((status,), (_said(errors),))


def through(source: Sequence[str], sink: Sequence[str], tick: Callable[[int], None]) -> Ended:
    """Run both, the one's output as the other's input; ``tick`` gets the bytes that went over."""
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
        reader = _start(source, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=one)
        try:
            writer = _start(sink, stdin=subprocess.PIPE, stdout=other, stderr=other)
        except BaseException:
            processes.end_group(reader)
            raise
        try:
            assert reader.stdout and writer.stdin
            moved = 0
            try:
                while block := reader.stdout.read(BLOCK):
                    writer.stdin.write(block)
                    moved += len(block)
                    tick(moved)
                broken = False
            except BrokenPipeError:
                broken = True
            with contextlib.suppress(BrokenPipeError):
                writer.stdin.close()
            second = writer.wait()
            if broken:
                processes.end_group(reader)
            first = reader.wait()
        finally:
            processes.end_group(reader)
            processes.end_group(writer)
        # What went through a broken pipe ended badly, whatever the sink says.
        return Ended((first, second or int(broken)), (_said(one), _said(other)))


def _start(argv: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    me = os.getpid()

    def tied() -> None:
        processes.guard(me)

    try:
        # Its own session: Ctrl-C reaches the launcher alone, which ends it.
        return subprocess.Popen(list(argv), start_new_session=True, preexec_fn=tied, **streams)
    except OSError as error:
        raise LauncherError(
            f"{argv[0]} could not be started: {error.strerror or error}",
            "a program that runs on this machine",
            f"check that {argv[0]} exists and may be executed",
        ) from error


def _said(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 2000))
    return " ".join(errors.read().decode("utf-8", "replace").split())
