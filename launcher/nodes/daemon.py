"""Clients of the Docker daemons: this machine's, and the worker's over the system's ssh.

The SDK's own ssh mode reads from a pipe, on which its time limits do not work, finds `ssh` and its
configuration by PATH, and lets ssh print to the terminal. So the connection below it is ours: the
same command on a socket, with our configuration.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
import urllib3

from launcher.errors import LauncherError
from launcher.libraries.sdk import (
    DEFAULT_DOCKER_API_VERSION,
    APIError,
    BaseHTTPAdapter,
    DockerException,
    docker,
    version_lt,
)
from launcher.nodes import refusals, resolve
from launcher.nodes.endpoint import ALIAS, USER_CONFIG, Endpoint
from launcher.nodes.piped import PipedSocket

SECONDS = 10.0
_DIAL = "docker system dial-stdio"
_PREFIX = "http+docker://ssh"  # what the SDK makes of ssh://, for which it would want paramiko


def daemon(
    endpoint: Endpoint | None,
    folder: Path = Path(),
    *,
    timeout: float = SECONDS,
    include: str = USER_CONFIG,
) -> docker.DockerClient:
    """A client that has spoken to the daemon: of this machine, or of the worker at `endpoint`.

    `folder` gets the ssh configuration (as for SshNode). Each request may take `timeout` seconds;
    following a log has no limit but ssh's own, which leaves a silent worker after 20 s.
    Raises LauncherError.
    """
    folder = folder.absolute()
    try:
        if endpoint is None:
            return docker.from_env(version="auto", timeout=_whole(timeout))
        resolve.destination(endpoint, folder, include)
        adapter = _Adapter((*endpoint.ssh(folder / "config"), _DIAL), timeout)
        client = _client(adapter, DEFAULT_DOCKER_API_VERSION, timeout)
        version = str(client.version(api_version=False)["ApiVersion"])
        if version_lt(version, DEFAULT_DOCKER_API_VERSION):
            client = _client(adapter, version, timeout)  # over the same connection
        return client
    except (DockerException, requests.RequestException, OSError) as error:
        raise unusable(endpoint, folder, error) from None


def unusable(endpoint: Endpoint | None, folder: Path, error: Exception) -> LauncherError:
    """What an error of the SDK means for the daemon, with the command that mends it."""
    where, on = ("this machine", "") if endpoint is None else ("the worker", "on the worker: ")
    text = _said(error)
    low = text.lower()
    found = f"the Docker daemon of {where} cannot be used: {text}"
    needed = f"a Docker daemon on {where} that this account may use"
    if "permission denied" in low and "publickey" not in low:
        mend = f"{on}sudo usermod -aG docker $USER, then log in anew"
    elif "command not found" in low or "docker: not found" in low:
        mend = f"{on}sudo apt install docker.io (or Docker's own packages)"
    elif endpoint is not None and ("host key" in low or "publickey" in low or "ssh:" in low):
        ssh = list(endpoint.ssh(folder / "config"))
        mend = f"this must print a version: {' '.join(ssh)} docker version"
    elif "timed out" in low:
        mend = f"{on}sudo systemctl status docker; docker info must answer"
    else:
        mend = f"{on}sudo systemctl enable --now docker; docker info must answer"
    return LauncherError(found, needed, mend)


def _said(error: BaseException) -> str:
    """The innermost words: the SDK wraps the cause three times."""
    seen: BaseException | None = error
    words = str(error)
    while seen is not None:
        if isinstance(seen, (SshEnded, APIError)):
            return str(seen)
        if isinstance(seen, (TimeoutError, urllib3.exceptions.ReadTimeoutError)):
            return "timed out: no answer to a request"
        inner = [each for each in seen.args if isinstance(each, BaseException)]
        reason = getattr(seen, "reason", None)
        if isinstance(reason, BaseException):
            inner.append(reason)
        seen = inner[0] if inner else seen.__cause__ or seen.__context__
    return words


class SshEnded(ConnectionError):
    """ssh, or docker on the worker, ended without an answer; the text is what it said."""


class _Wire(PipedSocket):
    """The daemon behind `docker system dial-stdio`."""

    _heard = False

    def recv_into(self, *arguments: Any, **named: Any) -> int:
        try:
            got = super().recv_into(*arguments, **named)
        except ConnectionResetError:  # it has ended without reading the request
            got = 0
        if got == 0 and not self._heard:
            status = self.status()
            raise SshEnded(self.said() or f"ssh ended with status {status} and said nothing")
        self._heard = True
        return got

    def makefile(self, *arguments: Any, **named: Any) -> Any:
        # One byte of read-ahead: the SDK reads streams of `exec` from the socket beside the file.
        file = io.BufferedReader(self._raw(), 1)
        file.channel = self  # type: ignore[attr-defined] # where the SDK looks for it
        return file

    def _raw(self) -> io.RawIOBase:
        raw = super().makefile("rb", buffering=0)
        assert isinstance(raw, io.RawIOBase)
        return raw


class _Connection(urllib3.connection.HTTPConnection):
    def __init__(self, argv: tuple[str, ...], **named: Any) -> None:
        super().__init__("localhost", **named)
        self._argv = argv

    def connect(self) -> None:
        try:
            self.sock = _Wire.start(self._argv)
        except FileNotFoundError:
            raise refusals.no_ssh(self._argv[0]) from None
        self.sock.settimeout(SECONDS)


class _Pool(urllib3.connectionpool.HTTPConnectionPool):
    def __init__(self, argv: tuple[str, ...], timeout: float) -> None:
        super().__init__("localhost", timeout=timeout, maxsize=8)
        self._argv = argv

    def _new_conn(self) -> Any:
        return _Connection(self._argv, timeout=self.timeout.connect_timeout)


class _Adapter(BaseHTTPAdapter):
    def __init__(self, argv: tuple[str, ...], timeout: float) -> None:
        self._pool = _Pool(argv, timeout)
        super().__init__()

    def get_connection(self, url: Any, proxies: Mapping[str, str] | None = None) -> Any:
        return self._pool

    def request_url(self, request: requests.PreparedRequest, proxies: Any) -> str:
        return request.path_url  # ALL_PROXY is no matter of ours

    def close(self) -> None:
        self._pool.close()
        super().close()


def _client(adapter: _Adapter, version: str, timeout: float) -> docker.DockerClient:
    """With a version given the SDK contacts nobody before our connection is in place."""
    client = docker.DockerClient(f"http://{ALIAS}:1", version=version, timeout=_whole(timeout))
    client.api.base_url = _PREFIX
    client.api.mount(_PREFIX, adapter)
    return client


def _whole(seconds: float) -> int:
    return max(1, round(seconds))
