"""A node's Docker daemon, asked so that every call ends in time.

The SDK's timeouts do not hold over ssh: there it reads from a pipe without any. So each call runs
in a thread that is waited for up to a deadline and then left to itself. It ends when its ssh does
(ServerAliveInterval) or when the daemon answers after all; until then only a few more are let wait.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import TypeVar

from launcher.errors import LauncherError
from launcher.libraries.sdk import APIError, docker

Factory = Callable[[], docker.DockerClient]
T = TypeVar("T")

MOST_LEFT = 3  # calls left to themselves, from which on none is made


class Unreachable(Exception):
    """The daemon did not answer, in words; ``mend`` says what to do, where that is known."""

    def __init__(self, found: str, mend: str = "") -> None:
        super().__init__(found)
        self.mend = mend


class Reach:
    """Clients come from ``factory`` and are thrown away after a loss, so that the next is fresh.

    What is asked within the usual ``timeout`` may be asked twice; what changes something takes
    longer and has a fresh client, once.
    """

    def __init__(self, factory: Factory, timeout: float = 10.0) -> None:
        self._factory = factory
        self._timeout = timeout
        self._lock = threading.Lock()
        self._client: docker.DockerClient | None = None
        self._left = 0

    def call(self, what: Callable[[docker.DockerClient], T], timeout: float | None = None) -> T:
        """What ``what`` returns for the client.

        Raises Unreachable when there is no answer within ``timeout`` seconds, and what the daemon
        says (APIError) as it is. ``what`` may be left running in its thread then.
        """
        limit = self._timeout if timeout is None else timeout
        ask = self._with_client if limit <= self._timeout else self._with_patient_client
        with self._lock:
            if self._left >= MOST_LEFT:
                raise Unreachable(f"{self._left} earlier calls to its Docker daemon still wait")
        results: list[T] = []
        errors: list[BaseException] = []
        over = threading.Event()
        abandoned = False

        def work() -> None:
            try:
                results.append(ask(what, limit))
            except BaseException as error:
                errors.append(error)
            finally:
                with self._lock:
                    over.set()
                    if abandoned:
                        self._left -= 1

        threading.Thread(target=work, name="docker call", daemon=True).start()
        try:
            over.wait(limit)
        finally:  # also when Ctrl-C ends the waiting
            with self._lock:
                if not over.is_set():
                    abandoned = True
                    self._left += 1
                    self._client = None
        if abandoned:
            raise Unreachable(f"its Docker daemon gave no answer within {limit:g} s")
        if results:
            return results[0]
        (error,) = errors
        if isinstance(error, APIError):
            raise error
        if isinstance(error, LauncherError):  # the factory's
            raise Unreachable(error.found, error.do_next) from error
        if isinstance(error, Exception):
            self._lose()
            raise Unreachable(f"its Docker daemon cannot be asked: {reason(error)}") from error
        raise error

    def _with_client(self, what: Callable[[docker.DockerClient], T], limit: float) -> T:
        with self._lock:
            client = self._client
        if client is not None:
            try:
                return what(client)
            except APIError:
                raise
            except Exception:  # the connection kept from earlier may be all that is lost
                self._lose(client)
        client = self._factory()
        with self._lock:
            self._client = client
        return what(client)

    def _with_patient_client(self, what: Callable[[docker.DockerClient], T], limit: float) -> T:
        """With a client of its own, whose own limit for a request would come too early else."""
        with contextlib.closing(self._factory()) as client:
            client.api.timeout = math.ceil(limit)
            return what(client)

    def _lose(self, lost: docker.DockerClient | None = None) -> None:
        """Throw the kept client away; if it is another than ``lost`` by now, leave it."""
        with self._lock:
            client = self._client
            if lost is not None and client is not lost:
                return
            self._client = None
        if client is not None:
            with contextlib.suppress(Exception):
                client.close()


def reason(error: BaseException) -> str:
    """The innermost cause that says something, in one line."""
    seen: list[BaseException] = []
    todo: list[BaseException] = [error]
    while todo:
        one = todo.pop(0)
        if one in seen:
            continue
        seen.append(one)
        todo += [each for each in one.args if isinstance(each, BaseException)]
        todo += [each for each in (one.__cause__, one.__context__) if each is not None]
    for one in seen:
        if isinstance(one, OSError) and one.strerror:
            named = f"{one.filename}: " if one.filename else ""
            return f"{named}{one.strerror}"
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
