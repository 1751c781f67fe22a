"""What ssh makes of an endpoint: its own answer is asked for, and nobody is contacted."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

from launcher import files
from launcher.nodes import refusals
from launcher.nodes.endpoint import Destination, Endpoint, resolved


def destination(endpoint: Endpoint, folder: Path, include: str) -> Destination:
    """Writes `folder`/config and asks ssh what it means."""
    config = folder / "config"
    text = endpoint.config(include)
    if not config.is_file() or config.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.replace(config, text.encode(), 0o600)
    argv = ["ssh", "-F", str(config), "-G", endpoint.host]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise refusals.no_ssh("ssh") from None
    except subprocess.TimeoutExpired:
        # A `Match exec` or KnownHostsCommand of the user's own.
        command = " ".join(argv)
        raise refusals.configuration(endpoint.host, "no end within 20 s", command) from None
    out = done.stdout.decode("utf-8", "surrogateescape")
    try:
        if done.returncode:
            raise ValueError(done.stderr.decode("utf-8", "replace").strip())
        name, home = account()
        values = (row.partition(" ")[2] for row in out.splitlines())
        there = frozenset(value for value in values if Path(value).is_absolute())
        there = frozenset(value for value in there if Path(value).is_file())
        return resolved(out, endpoint, config, home, name, there)
    except ValueError as error:
        raise refusals.configuration(endpoint.host, str(error), " ".join(argv)) from None


def account() -> tuple[str, str]:
    """Name and home of this user; ssh, too, takes both from the account and not from HOME."""
    try:
        entry = pwd.getpwuid(os.getuid())
        return entry.pw_name, entry.pw_dir
    except KeyError:
        return str(os.getuid()), os.environ.get("HOME", "/")
