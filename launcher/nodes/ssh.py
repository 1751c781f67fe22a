"""The worker: a node behind one ssh connection, made when first needed and again after a loss."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from launcher.commands import remote
from launcher.errors import LauncherError
from launcher.libraries.ssh import paramiko
from launcher.nodes import connection, refusals, resolve
from launcher.nodes.base import Done, Facts, named
from launcher.nodes.connection import Connection, Gone
from launcher.nodes.endpoint import CONNECT_SECONDS, USER_CONFIG, Destination, Endpoint
from launcher.nodes.local import memory_available
from launcher.nodes.refusals import SshError
from launcher.nodes.talk import Talk

DEFAULT_SECONDS = 60.0  # of a command without a limit of its own
LAST_RESORT = 12.0  # after a command's limit its connection is closed, whatever holds it
SESSIONS = 8  # at once; sshd allows 10 in one connection
T = TypeVar("T")

_FACTS = r"""printf '%s\0' "$(uname -n)" "$(id -un 2>/dev/null || id -u)" "$(id -u)" "$HOME" \
"$(cat /proc/sys/kernel/random/boot_id)" "$(uname -m)" "$(nproc)" "$(cat /proc/meminfo)" """

# $1 the file, $2 its last name, $3 the directory it was written in, $4 the target's directory.
_PLACE = """sync -- "$1" && mv -fT -- "$1" "$2" && rmdir -- "$3" && { sync -- "$4" || :; }"""

# The first part of the path that exists.
_FREE = """p=$1
while [ ! -e "$p" ]; do case $p in */*) p=${p%/*}; p=${p:-/};; *) p=.;; esac; done
exec stat -f -c '%a %S' -- "$p" """


class SshNode:
    """Thread-safe. `folder` gets the ssh configuration; `include` is the user's own."""

    def __init__(
        self, name: str, endpoint: Endpoint, folder: Path, include: str = USER_CONFIG
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.folder = folder.absolute()
        self.include = include
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(SESSIONS)
        self._connection: Connection | None = None
        self._destination: Destination | None = None
        self._failed: tuple[float, LauncherError] | None = None

    @property
    def config(self) -> Path:
        """The ssh configuration, for rsync and ssh; written when the node is first used."""
        return self.folder / "config"

    def destination(self) -> Destination:
        """What ssh makes of the endpoint. Contacts nobody. Raises SshError."""
        if self._destination is None:
            self._destination = resolve.destination(self.endpoint, self.folder, self.include)
        return self._destination

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

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
        """As the protocol says, but never without a limit: None is 60 s.

        `timeout` on the worker ends the command even when this process is killed. `argv`, `env`
        and `cwd` are seen in the worker's process list.
        """
        limit = DEFAULT_SECONDS if timeout is None else timeout
        command = remote.command(argv, limit, env, cwd)
        doing = f"while {argv[0]} ran"
        end = time.monotonic() + limit
        with self._slot(end):
            link, channel = self._open(end, doing)
            try:
                with link.limit(max(1.0, end - time.monotonic())):
                    channel.exec_command(command)
                started = time.monotonic()
                talk = Talk(link, channel, stdin, line, tick)
                with link.limit(limit + LAST_RESORT):
                    status = talk.follow(started + limit)
            except Gone as gone:
                raise self._lost(link, gone, doing) from None
            except (paramiko.SSHException, EOFError, OSError) as error:
                if link.alive and isinstance(error, OSError):
                    raise  # of `line` or `tick`
                raise self._lost(link, Gone(link.silent), doing) from None
            finally:
                with contextlib.suppress(Exception):
                    channel.close()
        spent = time.monotonic() - started
        if status is None or (status in (124, 137, -9) and spent >= limit):
            raise LauncherError(
                f"{named(argv)} still ran on {self.name} after {limit:g} s",
                f"an end within {limit:g} s",
                "see whether the worker is overloaded, then run the same command again",
            )
        if talk.before is not None:  # the account's shell, or what stands in for it, ended itself
            said = Done((), status, talk.before, talk.err).last(3)
            raise refusals.no_login(link.to, status, said)
        done = Done(tuple(argv), status, talk.out, talk.err)
        self._started(done)
        return done

    def read(self, path: Path) -> bytes:
        def read(files: paramiko.SFTPClient) -> bytes:
            with files.open(os.fsencode(path), "rb") as source:
                return source.read()

        return self._files(path, f"while {path} was read", read)

    def write(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        def fill(target: paramiko.SFTPFile) -> None:
            target.set_pipelined(True)
            for start in range(0, len(data), 32768):
                target.write(data[start : start + 32768])

        self._replace(path, mode, fill, len(data), 60.0)

    def copy(self, source: Path, target: Path) -> None:
        size = source.stat().st_size

        def fill(part: paramiko.SFTPFile) -> None:
            part.set_pipelined(True)
            with source.open("rb") as content:
                while block := content.read(32768):
                    part.write(block)

        # Silence is noticed by itself; how long a copy takes depends on its size.
        self._replace(target, 0o644, fill, size, None)

    def exists(self, path: Path) -> bool:
        return self._stat(path) is not None

    def size(self, path: Path) -> int | None:
        found = self._stat(path)
        if found is None or not stat.S_ISREG(found.st_mode or 0):
            return None
        return found.st_size

    def remove(self, path: Path) -> None:
        self._must(["rm", "-rf", "--", str(path)], f"removing {path}", 600)

    def free_bytes(self, path: Path) -> int:
        done = self._must(["sh", "-c", _FREE, "sh", str(path)], f"measuring {path}")
        blocks, size = done.text.split()
        return int(blocks) * int(size)

    def facts(self) -> Facts:
        done = self._must(["sh", "-c", _FACTS], "asking for its facts", 20)
        try:
            host, user, uid, home, boot, machine, processors, memory, _ = done.text.split("\0")
            return Facts(
                hostname=host,
                user=user,
                uid=int(uid),
                home=home,
                boot_id=boot,
                machine=machine,
                processors=int(processors),
                memory_available=memory_available(memory),
            )
        except ValueError as error:
            raise self._failure("asking for its facts", f"{error}: {done.last(5)}") from None

    def _connected(self, end: float) -> Connection:
        """The connection. Threads that waited for one that failed are told so, not kept longer."""
        asked = time.monotonic()
        if not self._lock.acquire(timeout=max(0.01, end - asked)):
            raise refusals.timeout(self.destination(), time.monotonic() - asked)
        try:
            if self._connection is not None and self._connection.alive:
                return self._connection
            if self._failed is not None and self._failed[0] >= asked:
                raise self._failed[1]
            seconds = min(CONNECT_SECONDS, max(1.0, end - time.monotonic()))
            try:
                self._connection = connection.connect(self.destination(), seconds)
            except LauncherError as error:
                self._failed = time.monotonic(), error
                raise
            return self._connection
        finally:
            self._lock.release()

    def _open(self, end: float, doing: str) -> tuple[Connection, paramiko.Channel]:
        """A session; a connection that proves dead is made anew once. Nothing has run yet."""
        for last in (False, True):
            link = self._connected(end)
            try:
                return link, link.channel(min(CONNECT_SECONDS, max(1.0, end - time.monotonic())))
            except Gone as gone:
                if last or time.monotonic() > end:
                    raise self._lost(link, gone, doing) from None
        raise AssertionError

    @contextlib.contextmanager
    def _slot(self, end: float) -> Iterator[None]:
        if not self._slots.acquire(timeout=max(0.01, end - time.monotonic())):
            busy = f"{SESSIONS} commands run there, and none has ended in time"
            raise refusals.no_channel(self.destination(), busy)
        try:
            yield
        finally:
            self._slots.release()

    def _lost(self, link: Connection, gone: Gone, doing: str) -> SshError:
        link.close()
        return refusals.silent(link.to, doing) if gone.silent else refusals.lost(link.to, doing)

    def _started(self, done: Done) -> None:
        """Raises LauncherError when the program, or what starts it, is missing."""
        said = done.err.decode("utf-8", "replace").strip()
        if done.status in (125, 126, 127) and said.startswith(("env: ", "timeout: ")):
            if said.startswith("timeout: ") or "option" in said:  # not GNU's
                raise refusals.no_tools(self.destination(), said)
            raise LauncherError(
                f"{done.argv[0]} could not be started on {self.name}: {said}",
                f"a program that runs on {self.name}",
                f"check that {done.argv[0]} exists there and may be executed: "
                f"{self.destination().command('command -v ' + done.argv[0])}",
            )
        if done.status == 127 and "not found" in said and "timeout" in said[:80]:
            raise refusals.no_tools(self.destination(), said)

    def _must(self, argv: Sequence[str], what: str, timeout: float | None = None) -> Done:
        done = self.run(argv, timeout=timeout)
        if done.status:
            raise self._failure(what, done.last(5))
        return done

    def _failure(self, what: str, why: str) -> LauncherError:
        to = self.destination()
        return LauncherError(
            f"{what} on {self.name} failed: {why}",
            f"space, and the rights of {to.user} to do it",
            f"look there: {to.command()}, then id; df -h; ls -ld of the directory",
        )

    def _files(
        self,
        path: Path,
        doing: str,
        action: Callable[[paramiko.SFTPClient], T],
        seconds: float | None = 60.0,
    ) -> T:
        """Work on files. It is done again, once, on a new connection; so it must bear that.

        Raises OSError as for a file of this machine, with the path; LauncherError for ssh.
        """
        end = time.monotonic() + (seconds or DEFAULT_SECONDS)
        with self._slot(end):
            for last in (False, True):
                link, channel = self._open(end, doing)
                ready = False
                try:
                    limit = contextlib.nullcontext() if seconds is None else link.limit(seconds)
                    with limit, contextlib.closing(channel):
                        channel.invoke_subsystem("sftp")
                        files = paramiko.SFTPClient(channel)
                        ready = True
                        return action(files)
                except (paramiko.SSHException, EOFError, OSError) as error:
                    if link.alive and not ready:
                        raise refusals.no_sftp(link.to, str(error)) from None
                    if link.alive and isinstance(error, OSError):
                        raise _named(error, f"{self.name}:{path}") from None
                    if last or link.silent:
                        raise self._lost(link, Gone(link.silent), doing) from None
                    link.close()
        raise AssertionError

    def _stat(self, path: Path) -> paramiko.SFTPAttributes | None:
        def look(files: paramiko.SFTPClient) -> paramiko.SFTPAttributes | None:
            try:
                return files.stat(os.fsencode(path))
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    return None
                raise

        return self._files(path, f"while {path} was looked for", look)

    def _replace(
        self,
        path: Path,
        mode: int,
        fill: Callable[[paramiko.SFTPFile], None],
        size: int,
        seconds: float | None,
    ) -> None:
        def upload(files: paramiko.SFTPClient) -> tuple[str, str]:
            _directories(files, path.parent)
            # sftp opens a file with the server's mode; in a closed directory nobody else sees it.
            room = path.parent / f".{path.name[:80]}.{secrets.token_hex(6)}.part"
            part = room / "content"
            files.mkdir(os.fsencode(room), 0o700)
            try:
                with files.open(os.fsencode(part), "wxb") as target:
                    target.chmod(mode)
                    fill(target)
                found = files.stat(os.fsencode(part)).st_size
                if found != size:
                    raise OSError(errno.EIO, f"{found} of {size} bytes arrived")
            except BaseException:
                with contextlib.suppress(OSError):
                    files.remove(os.fsencode(part))
                with contextlib.suppress(OSError):
                    files.rmdir(os.fsencode(room))
                raise
            return str(part), str(room)

        what = f"writing {path}"
        try:
            part, room = self._files(path, f"while {path} was written", upload, seconds)
        except OSError as error:
            raise self._failure(what, error.strerror or str(error)) from None
        try:
            place = ["sh", "-c", _PLACE, "sh", part, str(path), room, str(path.parent)]
            self._must(place, what, 600)
        except LauncherError:
            with contextlib.suppress(LauncherError):
                self.remove(Path(room))
            raise


def _directories(files: paramiko.SFTPClient, path: Path) -> None:
    missing = []
    while True:
        try:
            files.stat(os.fsencode(path))
            break
        except FileNotFoundError:
            missing.append(path)
            if path.parent == path:
                raise
            path = path.parent
    for each in reversed(missing):
        try:
            files.mkdir(os.fsencode(each), 0o755)
        except OSError:
            files.stat(os.fsencode(each))  # another was faster, else this is the error


def _named(error: OSError, where: str) -> OSError:
    if error.errno is None:  # sftp says no more than "Failure"
        return OSError(errno.EIO, f"{error} (sftp)", where)
    return OSError(error.errno, error.strerror or os.strerror(error.errno), where)
