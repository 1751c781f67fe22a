"""Small HTTP requests to an API, straight to its address: no proxy is ever asked."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


class NoAnswer(Exception):
    """The API did not answer as HTTP within the time given."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        """None when the body is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def excerpt(self) -> str:
        """Its beginning, on one line and without control characters."""
        text = self.body[:300].decode("utf-8", "replace")
        return "".join(char if char.isprintable() else " " for char in text)


@dataclass(frozen=True)
class Event:
    """One server-sent event; without an ``event:`` line its name is empty."""

    name: str
    data: str


@dataclass(frozen=True)
class Api:
    """Where the API is; ``key`` goes out as a bearer token on /v1 only."""

    host: str
    port: int
    key: str = ""

    @property
    def address(self) -> str:
        """The address to connect to: a wildcard to listen on is none."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        name = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{name}:{self.port}"

    def get(self, path: str, timeout: float) -> Answer:
        return self._ask("GET", path, None, timeout)

    def post(self, path: str, body: dict[str, Any], timeout: float) -> Answer:
        return self._ask("POST", path, body, timeout)

    def events(self, path: str, body: dict[str, Any], timeout: float) -> Iterator[Event]:
        """The events of a server-sent stream; ``body`` is to ask for one.

        Raises NoAnswer, also for a status other than 200 and when the stream breaks off.
        """
        with _Exchange(self, "POST", path, body, timeout) as exchange:
            if exchange.status != 200:
                told = Answer(exchange.status, b"".join(exchange.pieces())).excerpt()
                raise NoAnswer(f"HTTP {exchange.status} on {path}: {told}")
            yield from _events(exchange.pieces())

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Answer:
        with _Exchange(self, method, path, body, timeout) as exchange:
            return Answer(exchange.status, b"".join(exchange.pieces()))


class _Exchange:
    """One request and its answer. ``timeout`` is for all of it: a server that sends a little now
    and then is not waited for without end."""

    def __init__(
        self, api: Api, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> None:
        self._path = path
        self._deadline = time.monotonic() + timeout
        self._connection = http.client.HTTPConnection(api.address, api.port, timeout=timeout)
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        if api.key and path.startswith("/v1"):
            headers["Authorization"] = f"Bearer {api.key}"
        try:
            self._connection.request(method, path, data, headers)
            self._socket: socket.socket = self._connection.sock  # the connection may let go of it
            self._answer = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise NoAnswer(f"{path}: {_why(error)}") from error
        self.status = self._answer.status

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._connection.close()

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes in. Raises NoAnswer when it breaks off or the time is over."""
        try:
            while not self._answer.isclosed():
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._socket.settimeout(left)
                piece = self._answer.read1()
                if not piece:
                    if self._answer.length:  # read1 itself is silent about it
                        raise http.client.IncompleteRead(b"", self._answer.length)
                    return
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"{self._path}: the answer broke off: {_why(error)}") from error


def _events(pieces: Iterable[bytes]) -> Iterator[Event]:
    """An event is its lines up to an empty one; without that it was not sent to its end."""
    name, data = "", list[str]()
    for line in _lines(pieces):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif not line:
            if data:
                yield Event(name, "\n".join(data))
            name, data = "", []


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    held = b""
    for piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode("utf-8", "replace")


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
