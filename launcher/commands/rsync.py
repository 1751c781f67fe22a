"""The argv of rsync to and from the worker, over the same ssh destination as all else. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.nodes.endpoint import Endpoint


def push(
    endpoint: Endpoint, config: Path, sources: Sequence[str], target: str, *options: str
) -> tuple[str, ...]:
    """Files of this machine to `target` on the worker.

    Paths mean what rsync makes of them (a trailing slash counts) and arrive unchanged: `-s` keeps
    the worker's shell away from them.
    """
    return (*_rsync(config, options), *map(_local, sources), _remote(endpoint, target))


def pull(
    endpoint: Endpoint, config: Path, sources: Sequence[str], target: str, *options: str
) -> tuple[str, ...]:
    """Files of the worker to `target` on this machine."""
    remote = [_remote(endpoint, source) for source in sources]
    return (*_rsync(config, options), *remote, _local(target))


def shell(config: Path) -> str:
    """The value of `-e`. rsync splits it itself: a quote inside quotes is doubled, not escaped."""
    quoted = str(config).replace("'", "''")
    return f"ssh -F '{quoted}'"


def _rsync(config: Path, options: Sequence[str]) -> tuple[str, ...]:
    return ("rsync", "-s", "-e", shell(config), *options, "--")


def _local(path: str) -> str:
    # A colon before the first slash would make it a host.
    return path if path.startswith("/") else f"./{path}"


def _remote(endpoint: Endpoint, path: str) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    # An empty path or a leading colon would mean something else to rsync.
    return f"{host}:{path if path.startswith('/') else './' + path}"
