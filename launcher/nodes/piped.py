"""A program that talks over its stdin and stdout, as a real socket: limits and polling work on it.

ssh's ProxyCommand and `docker system dial-stdio` speak that way.
"""

from __future__ import annotations

import contextlib
import io
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any


class PipedSocket(socket.socket):
    """Ends the program when it is closed. The program's error output is kept for `said`."""

    _child: subprocess.Popen[bytes]
    _errors: Any

    @classmethod
    def start(cls, argv: Sequence[str]) -> PipedSocket:
        """Raises OSError when the program cannot be started."""
        ours, theirs = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the program has failed
        try:
            # Its own session: Ctrl-C ends the launcher's call, and that ends the program.
            child = subprocess.Popen(
                list(argv),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors.fileno(),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            errors.close()
            raise
        finally:
            theirs.close()
        made = cls(fileno=ours.detach())
        made._child, made._errors = child, errors
        return made

    def said(self) -> str:
        """The last of its error output."""
        with contextlib.suppress(ValueError, OSError):
            size = self._errors.seek(0, io.SEEK_END)
            self._errors.seek(max(0, size - 2000))
            return str(self._errors.read().decode("utf-8", "replace")).strip()
        return ""

    def status(self, seconds: float = 1.0) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(seconds)
        return None

    def close(self) -> None:
        super().close()
        # Files made of this socket may still read from it.
        if self.fileno() == -1:
            self._end()

    def _decref_socketios(self) -> None:
        super()._decref_socketios()  # type: ignore[misc]
        if self.fileno() == -1:
            self._end()

    def _end(self) -> None:
        child = getattr(self, "_child", None)
        if child is None or self._errors.closed:
            return
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(1)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._errors.close()
