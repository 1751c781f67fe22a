"""Our ssh keys for one destination: which to try, and why others cannot be used."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cryptography.exceptions import UnsupportedAlgorithm

from launcher.libraries.ssh import paramiko
from launcher.nodes.endpoint import Destination

AGENT_SECONDS = 5
T = TypeVar("T")


@dataclass
class Keys:
    tried: list[tuple[str, paramiko.PKey]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    first: str = ""  # the first private key file that exists


def within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result or exception; TimeoutError when it takes longer (it is left running)."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def gather(to: Destination) -> Keys:
    """Keys of the agent that are among the destination's files, the files, then other agent keys.

    That is ssh's order: a server stops listening after a few that it does not know.
    """
    keys = Keys()
    files: list[tuple[str, paramiko.PKey]] = []
    wanted: set[bytes] = set()
    for name in to.identities:
        path = Path(name)
        public = _public(path)
        if public is not None:
            wanted.add(public)
        if not path.is_file():
            continue
        keys.first = keys.first or name
        try:
            files.append((name, _load(path)))
        except _Unusable as why:
            keys.unused.append(f"{name}: {why}")
    wanted |= {key.asbytes() for _, key in files}
    early: list[tuple[str, paramiko.PKey]] = []
    late: list[tuple[str, paramiko.PKey]] = []
    for key in _agent(to, keys.unused):
        shown = f"{key.comment or 'a key'} of ssh-agent"
        if key.asbytes() in wanted:
            early.append((shown, key))
        elif not to.identities_only:
            late.append((shown, key))
    seen: set[bytes] = set()
    for shown, each in (*early, *files, *late):
        if each.asbytes() not in seen:
            seen.add(each.asbytes())
            kind = each.get_name()
            keys.tried.append((f"{shown} ({kind} {each.fingerprint})", each))
    return keys


class _Unusable(Exception):
    pass


def _load(path: Path) -> paramiko.PKey:
    try:
        status = path.stat()
        if status.st_uid == os.getuid() and status.st_mode & 0o077:
            # ssh itself would ignore it, so that rsync and Docker fail where this one does not.
            raise _Unusable(f"other users may read it, so ssh ignores it; chmod 600 {path}")
        return paramiko.PKey.from_path(path)
    except (TypeError, paramiko.PasswordRequiredException):
        raise _Unusable(f"it needs a passphrase; ssh-add {path}") from None
    except (paramiko.SSHException, UnsupportedAlgorithm, ValueError):
        raise _Unusable("no private key of a kind that can be used here") from None
    except OSError as error:
        raise _Unusable(error.strerror or str(error)) from None


def _public(path: Path) -> bytes | None:
    try:
        words = path.with_name(path.name + ".pub").read_text().split()
        return base64.b64decode(words[1], validate=True)
    except (OSError, ValueError, IndexError):
        return None


def _agent(to: Destination, unused: list[str]) -> tuple[paramiko.AgentKey, ...]:
    place = os.environ.get("SSH_AUTH_SOCK", "")
    if to.agent == "none" or not place:
        return ()
    if to.agent not in ("", "SSH_AUTH_SOCK", "$SSH_AUTH_SOCK", "${SSH_AUTH_SOCK}", place):
        unused.append(f"IdentityAgent {to.agent}: only the agent of SSH_AUTH_SOCK is asked")
        return ()
    try:
        return tuple(within(AGENT_SECONDS, lambda: paramiko.Agent().get_keys()))
    except TimeoutError:
        unused.append(f"ssh-agent at {place}: no answer within {AGENT_SECONDS} s")
    except (paramiko.SSHException, OSError) as error:
        unused.append(f"ssh-agent at {place}: {error}")
    return ()
