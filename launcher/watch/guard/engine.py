"""Three questions to a Docker daemon over its socket, by the standard library alone.

Starting ``docker`` takes tens of MiB just when there are none; this is in memory already. Requests
name no API version: any daemon answers them.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

SOCKET = "/var/run/docker.sock"
TIMEOUT = 5.0  # seconds


class DockerFault(Exception):
    """The daemon did not do what it was asked; the message says why, ``needed`` what mends it."""

    def __init__(self, told: str, needed: str = "") -> None:
        super().__init__(told)
        self.needed = needed


def socket_of(environ: Mapping[str, str]) -> str:
    """The daemon's socket on this node. Raises DockerFault for one elsewhere."""
    asked = environ.get("DOCKER_HOST", "")
    if not asked:
        rootless = os.path.join(environ.get("XDG_RUNTIME_DIR", ""), "docker.sock")
        if (
            not os.path.exists(SOCKET)
            and environ.get("XDG_RUNTIME_DIR")
            and os.path.exists(rootless)
        ):
            return rootless
        return SOCKET
    if not asked.startswith("unix://"):
        raise DockerFault(f"DOCKER_HOST is {asked}; the guard needs this node's own, unix:///…")
    return asked.removeprefix("unix://")


class Engine:
    def __init__(self, path: str = SOCKET, timeout: float = TIMEOUT) -> None:
        self.path, self.timeout = path, timeout

    def inspect(self, name: str) -> dict[str, Any] | None:
        """What is known of a container by name or id; None when there is none."""
        status, body = self._ask("GET", f"/containers/{quote(name, safe='')}/json")
        if status == 404:
            return None
        found = json.loads(body) if status == 200 else None
        if not isinstance(found, dict):
            raise DockerFault(f"inspecting {name}: HTTP {status}: {body[:200]!r}")
        return found

    def kill(self, name: str, signal: str) -> bool:
        """Send a signal to its first process; False when it does not run."""
        path = f"/containers/{quote(name, safe='')}/kill?signal={signal}"
        status, body = self._ask("POST", path)
        if status in (404, 409):
            return False
        if status != 204:
            raise DockerFault(f"{signal} to {name}: HTTP {status}: {body[:200]!r}")
        return True

    def _ask(self, method: str, path: str) -> tuple[int, bytes]:
        connection = _Unix(self.path, self.timeout)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            may = isinstance(error, PermissionError)
            raise DockerFault(
                f"the Docker daemon at {self.path} does not answer: {why}",
                "a user in the group docker, or root" if may else
                "a daemon that runs on this node (systemctl status docker), DOCKER_HOST if its "
                "socket is elsewhere, or --pid for a server without a container",
            ) from error  # fmt: skip
        finally:
            connection.close()


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("docker", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
