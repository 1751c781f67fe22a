"""Small HTTP requests to the API of a rank, straight to its address: no proxy is ever asked."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
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
        return self.body[:300].decode("utf-8", "replace")


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

    def stream(self, path: str, body: dict[str, Any], timeout: float) -> Iterator[str]:
        """The payloads of a server-sent stream, ``[DONE]`` included.

        Raises NoAnswer, also for a status other than 200.
        """
        connection, answer = self._open("POST", path, {**body, "stream": True}, timeout)
        try:
            if answer.status != 200:
                raise NoAnswer(f"HTTP {answer.status} on {path}: {answer.read(300)!r}")
            for raw in answer:
                line = raw.decode("utf-8", "replace").strip()
                if line.startswith("data:"):
                    yield line[5:].strip()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"{path}: the stream broke off: {_why(error)}") from error
        finally:
            connection.close()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Answer:
        connection, answer = self._open(method, path, body, timeout)
        try:
            return Answer(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"{path}: {_why(error)}") from error
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=timeout)
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        if self.key and path.startswith("/v1"):
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method, path, data, headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoAnswer(f"{path}: {_why(error)}") from error


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
