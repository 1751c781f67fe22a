"""A command that runs on the worker: its input fed, its outputs read, its end awaited."""

from __future__ import annotations

import contextlib
import re
import selectors
import time
from collections.abc import Callable

from launcher.commands import remote
from launcher.libraries.ssh import paramiko
from launcher.nodes.connection import Connection, Gone
from launcher.nodes.local import KEPT

_BEGIN = re.compile(rb"^" + remote.MARK.encode() + rb"(\d+)\r?\n", re.MULTILINE)


class Talk:
    """A running command: feeds its input, reads both outputs to their ends, in this thread."""

    def __init__(
        self,
        link: Connection,
        channel: paramiko.Channel,
        stdin: bytes,
        line: Callable[[str], None] | None,
        tick: Callable[[], None] | None,
    ) -> None:
        self._link = link
        self._channel = channel
        self._stdin = memoryview(stdin)
        self._feeding = True
        self._line = line
        self._tick = tick
        self._kept = (bytearray(), bytearray())
        self._rest = [b"", b""]
        self.before: bytes | None = b""  # what an account's shell says; None once it has begun
        self._pid = 0

    @property
    def out(self) -> bytes:
        return bytes(self._kept[0])

    @property
    def err(self) -> bytes:
        return bytes(self._kept[1])

    def follow(self, end: float) -> int | None:
        """The exit status, negative for a signal; None past `end`. Raises Gone."""
        channel = self._channel
        channel.setblocking(False)
        done = False
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(channel.fileno(), selectors.EVENT_READ)
                self._send()
                status = self._until(end, ready)
            done = status is not None
            return status
        finally:
            if not done and self._pid and self._link.alive:
                self._link.end(self._pid)

    def _until(self, end: float, ready: selectors.BaseSelector) -> int | None:
        channel = self._channel
        last_tick = time.monotonic()
        left: float | None = None  # since when the command is gone and its outputs are silent
        probed = False
        while True:
            if channel.eof_received:
                channel.status_event.wait(0.05)  # the descriptor stays readable from now on
            else:
                ready.select(0.02 if self._stdin else 0.25)
            # In this order: what came before the end has been fed before it is seen here.
            gone = channel.closed or channel.exit_status_ready()
            ended = channel.closed or (gone and channel.eof_received)
            moved = self._take()
            self._send()
            now = time.monotonic()
            if self._tick is not None and now - last_tick >= 0.5:
                last_tick = now
                self._tick()
            # A grandchild may hold the outputs open after the command itself is gone.
            left = None if moved or not gone else left or now
            if ended or (left is not None and now - left > 0.2):
                self._flush()
                return self._status()
            if now > end + (remote.KILL_AFTER + 2 if probed else 0.5):
                if probed:
                    return None
                probed = True  # `timeout` has ended it by now, if there is anybody to tell us
                if not self._link.answers(1.0):
                    self._link.close(silent=True)
                    raise Gone(True)

    def _status(self) -> int:
        by = getattr(self._channel, "ended_by", None)
        if by is not None:
            return -int(by)
        if self._channel.exit_status == -1:
            raise Gone(self._link.silent)
        return int(self._channel.exit_status)

    def _send(self) -> None:
        channel = self._channel
        if not self._feeding:
            return
        try:
            while self._stdin and channel.send_ready():
                sent = channel.send(bytes(self._stdin[:32768]))
                self._stdin = self._stdin[sent:]
        except TimeoutError:
            return
        except OSError:  # the command does not read it
            self._stdin = self._stdin[:0]
        if not self._stdin:
            self._feeding = False
            with contextlib.suppress(OSError, EOFError):
                channel.shutdown_write()

    def _take(self) -> bool:
        channel, moved = self._channel, False
        for n, (any_ready, take) in enumerate(
            (
                (channel.recv_ready, channel.recv),
                (channel.recv_stderr_ready, channel.recv_stderr),
            )
        ):
            while any_ready():
                block = take(65536)
                if not block:
                    break
                moved = True
                if n == 0 and self.before is not None:
                    block = self._begin(block)
                self._kept[n].extend(block)
                del self._kept[n][:-KEPT]
                if self._line is not None:
                    *whole, self._rest[n] = (self._rest[n] + block).split(b"\n")
                    for each in whole:
                        self._line(each.decode("utf-8", "replace").rstrip("\r"))
        return moved

    def _begin(self, block: bytes) -> bytes:
        """The output after the line that tells the command's pid."""
        assert self.before is not None
        self.before += block
        found = _BEGIN.search(self.before)
        if found is None:
            return b""
        self._pid = int(found[1])
        rest, self.before = self.before[found.end() :], None
        return rest

    def _flush(self) -> None:
        for rest in self._rest:
            if rest and self._line is not None:
                self._line(rest.decode("utf-8", "replace").rstrip("\r"))
