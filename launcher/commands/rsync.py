"""The argv of rsync to and from the worker, over the same ssh destination as all else. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.nodes.endpoint import Endpoint

# Fast first: AES in the processor; the last is for servers that have none of these.
CIPHERS = (
    "aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr",
    "chacha20-poly1305@openssh.com",
)  # fmt: skip
#: ssh's options for gigabytes; they stand before the host.
FAST = ("-c", ",".join(CIPHERS), "-o", "Compression=no")


def push(
    endpoint: Endpoint,
    config: Path,
    sources: Sequence[str],
    target: str,
    *options: str,
    fast: bool = False,
) -> tuple[str, ...]:
    """Files of this machine to `target` on the worker. ``fast``: with FAST's ciphers.

    Paths mean what rsync makes of them (a trailing slash counts) and arrive unchanged: `-s` keeps
    the worker's shell away from them.
    """
    words = _rsync(config, options, fast)
    return (*words, *map(_local, sources), _remote(endpoint, target))


def pull(
    endpoint: Endpoint, config: Path, sources: Sequence[str], target: str, *options: str
) -> tuple[str, ...]:
    """Files of the worker to `target` on this machine."""
    remote = [_remote(endpoint, source) for source in sources]
    return (*_rsync(config, options), *remote, _local(target))


def shell(config: Path, fast: bool = False) -> str:
    """The value of `-e`. rsync splits it itself: a quote inside quotes is doubled, not escaped."""
    quoted = str(config).replace("'", "''")
    return " ".join([f"ssh -F '{quoted}'", *(FAST if fast else ())])


def _rsync(config: Path, options: Sequence[str], fast: bool = False) -> tuple[str, ...]:
    return ("rsync", "-s", "-e", shell(config, fast), *options, "--")


def _local(path: str) -> str:
    # A colon before the first slash would make it a host.
    return path if path.startswith("/") else f"./{path}"


def _remote(endpoint: Endpoint, path: str) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    # An empty path or a leading colon would mean something else to rsync.
    return f"{host}:{path if path.startswith('/') else './' + path}"


SILENCE = 30  # seconds without a byte after which rsync gives up
#: rsync's ends by the way: a socket, the protocol's stream, a signal, a time limit, ssh itself.
BROKEN = (10, 12, 20, 30, 35, 255)


def bulk(
    endpoint: Endpoint,
    config: Path,
    folder: str,
    names: Sequence[str],
    target: str,
    *,
    again: bool = False,
) -> tuple[str, ...]:
    """Files of ``folder`` into the directory ``target``, links followed.

    What a broken transfer left is checked and added to; the file has its name all the while, so
    whether it is whole is to be asked after. ``again``: every byte is compared, whatever size and
    time say.
    """
    how = ("--ignore-times", "--inplace") if again else ("--append-verify",)
    transport = shell(config, fast=True)
    return (
        "rsync", "-s", "-e", transport, "--times", "--perms", "--chmod=F644", "--copy-links",
        "--partial", *how, f"--timeout={SILENCE}", "--outbuf=N", "--info=progress2",
        "--no-inc-recursive", "--", *(f"{folder.rstrip('/')}/{name}" for name in names),
        _remote(endpoint, target.rstrip("/") + "/"),
    )  # fmt: skip
