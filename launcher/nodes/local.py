"""The machine the launcher runs on."""

from __future__ import annotations

import os
import platform
import pwd
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher import files, processes
from launcher.errors import LauncherError
from launcher.nodes.base import Done, Facts, named

KEPT = 1 << 20  # bytes of each output that a Done keeps: the end of it


class LocalNode:
    def __init__(self, name: str = "local") -> None:
        self.name = name

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        line: Callable[[str], None] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> Done:
        me = os.getpid()

        def tied() -> None:
            processes.guard(me)

        try:
            # Its own session: Ctrl-C reaches the launcher alone, which ends the command itself.
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if env is None else dict(env),
                cwd=cwd,
                start_new_session=True,
                preexec_fn=tied,
            )
        except OSError as error:
            raise LauncherError(
                f"{argv[0]} could not be started: {error.strerror or error}",
                "a program that runs on this machine",
                f"check that {argv[0]} exists and may be executed",
            ) from error
        try:
            out, err = _drain(child, stdin, timeout, line, tick)
            return Done(tuple(argv), child.wait(), out, err)
        except subprocess.TimeoutExpired:
            raise LauncherError(
                f"{named(argv)} still ran after {timeout:g} s",
                f"an end within {timeout:g} s",
                "see whether the machine is overloaded, then run the same command again",
            ) from None
        finally:
            processes.end_group(child)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def write(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        files.replace(path, data, mode)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def size(self, path: Path) -> int | None:
        return path.stat().st_size if path.is_file() else None

    def copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            shutil.copyfile(source, part)
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def facts(self) -> Facts:
        uid = os.getuid()
        try:
            entry = pwd.getpwuid(uid)
            user, home = entry.pw_name, entry.pw_dir
        except KeyError:  # a container may run under a uid without an account
            user, home = str(uid), "/"
        return Facts(
            hostname=platform.node(),
            user=user,
            uid=uid,
            home=os.environ.get("HOME") or home,
            boot_id=processes.boot_id(),
            machine=platform.machine(),
            processors=len(os.sched_getaffinity(0)),
            memory_available=memory_available(Path("/proc/meminfo").read_text()),
        )


def memory_available(meminfo: str) -> int:
    """Bytes of MemAvailable in the text of /proc/meminfo."""
    for row in meminfo.splitlines():
        key, _, rest = row.partition(":")
        if key == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ValueError("/proc/meminfo has no MemAvailable line")


def _drain(
    child: subprocess.Popen[bytes],
    stdin: bytes,
    timeout: float | None,
    line: Callable[[str], None] | None,
    tick: Callable[[], None] | None,
) -> tuple[bytes, bytes]:
    """Feed stdin and read both outputs to their ends, in this thread.

    One thread, because the kernel ties a child to the thread that made it.
    """
    assert child.stdin and child.stdout and child.stderr
    deadline = None if timeout is None else time.monotonic() + timeout
    kept = {child.stdout: bytearray(), child.stderr: bytearray()}
    rest = {child.stdout: b"", child.stderr: b""}
    last_tick = time.monotonic()
    with selectors.DefaultSelector() as ready:
        for source in kept:
            os.set_blocking(source.fileno(), False)
            ready.register(source, selectors.EVENT_READ)
        if stdin:
            os.set_blocking(child.stdin.fileno(), False)
            ready.register(child.stdin, selectors.EVENT_WRITE)
        else:
            child.stdin.close()
        while ready.get_map():
            for key, _ in ready.select(0.25):
                if key.fileobj is child.stdin:
                    try:
                        stdin = stdin[os.write(key.fd, stdin[:65536]) :]
                    except BrokenPipeError:
                        stdin = b""
                    if not stdin:
                        ready.unregister(child.stdin)
                        child.stdin.close()
                    continue
                source = child.stdout if key.fileobj is child.stdout else child.stderr
                block = os.read(key.fd, 65536)
                if not block:
                    ready.unregister(source)
                kept[source] += block
                del kept[source][:-KEPT]
                if line is not None:
                    *whole, rest[source] = (rest[source] + block).split(b"\n")
                    if not block and rest[source]:
                        whole.append(rest[source])
                    for each in whole:
                        line(each.decode("utf-8", "replace").rstrip("\r"))
            now = time.monotonic()
            if tick is not None and now - last_tick >= 0.5:
                last_tick = now
                tick()
            # A grandchild may hold a pipe open after the command itself is gone.
            if ready.get_map() and child.poll() is not None and not ready.select(0.2):
                break
            if deadline is not None and now > deadline:
                raise subprocess.TimeoutExpired(child.args, timeout or 0.0)
    if deadline is not None:
        child.wait(max(0.0, deadline - time.monotonic()))
    return bytes(kept[child.stdout]), bytes(kept[child.stderr])
