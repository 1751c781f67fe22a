"""The worker's ssh destination: one place for host, user, port, key and known_hosts. Pure.

Commands (paramiko), rsync and the Docker SDK all follow one generated OpenSSH configuration, and
the host keeps the name that was typed, so the user's own `Host` blocks apply to it as they would
to a plain `ssh`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UsageError
from launcher.settings.values import Settings

ALIAS = "dsv41-worker"  # the worker's name in the Docker SDK's URL; nothing resolves it
USER_CONFIG = "~/.ssh/config"
SYSTEM_CONFIG = "/etc/ssh/ssh_config"  # `ssh -F` alone would leave it out
CONNECT_SECONDS = 10

# Nobody is asked, no key is accepted, nothing is shared or forwarded, and a silent peer is left.
_FIXED = (
    "BatchMode yes",
    "StrictHostKeyChecking yes",
    "UpdateHostKeys no",
    f"ConnectTimeout {CONNECT_SECONDS}",
    "ConnectionAttempts 1",
    "ServerAliveInterval 5",
    "ServerAliveCountMax 3",
    "ControlMaster no",
    "ControlPath none",
    "ClearAllForwardings yes",
    "ForwardAgent no",
    "ForwardX11 no",
    "RequestTTY no",
    "RemoteCommand none",
    "PermitLocalCommand no",
    "EscapeChar none",
    "LogLevel ERROR",
)
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")
_USER = re.compile(r"[\w.+][\w.+@-]*")


@dataclass(frozen=True)
class Endpoint:
    """`host` is a name, an address, or an alias of the user's ssh configuration."""

    host: str
    user: str = ""
    port: int | None = None
    key: str = ""
    known_hosts: str = ""

    def __post_init__(self) -> None:
        """Raises UsageError on what an ssh configuration cannot say or would read otherwise."""
        if not _HOST.fullmatch(self.host):
            raise _unusable("host", self.host, "a host name, an address or an alias of ssh")
        if self.user and not _USER.fullmatch(self.user):
            raise _unusable("user", self.user, "an account's name")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise _unusable("port", str(self.port), "a number from 1 to 65535")
        for what, path in (("key", self.key), ("known_hosts", self.known_hosts)):
            odd = any(ord(each) < 32 or ord(each) == 127 for each in path) or "${" in path
            if odd or (path and not Path(path).is_absolute()):
                raise _unusable(what, path, "an absolute path without control characters or ${")

    def config(self, include: str = USER_CONFIG) -> str:
        """The OpenSSH configuration. `include`: the user's own, "" for no other file at all."""
        lines = [f"Host {self.host}"]
        if self.user:
            lines.append(f"User {self.user}")
        if self.port is not None:
            lines.append(f"Port {self.port}")
        if self.key:
            lines += [f"IdentityFile {_path(self.key)}", "IdentitiesOnly yes"]
        if self.known_hosts:
            lines.append(f"UserKnownHostsFile {_path(self.known_hosts)}")
        text = "# Written by ./start.sh at every start; change .env or ~/.ssh/config instead.\n"
        text += "\n    ".join([*lines, *_FIXED]) + "\n"
        if include:
            # An Include inside a Host block would hold for that host alone, not for a jump host.
            text += f"Host *\nInclude {_quoted(include)}\nInclude {SYSTEM_CONFIG}\n"
        return text

    def ssh(self, config: Path) -> tuple[str, ...]:
        """`ssh` up to the host. What follows is read by a shell there: quote it by shlex.join."""
        return ("ssh", "-F", str(config), self.host)

    @classmethod
    def of(cls, settings: Settings) -> Endpoint:
        """WORKER_SSH (user@host, or an alias), else WORKER_USER@WORKER_IP."""
        user, _, host = settings.text("WORKER_SSH").rpartition("@")
        port = settings.maybe_int("WORKER_SSH_PORT")
        keys = ("WORKER_SSH_KEY", "WORKER_KNOWN_HOSTS")
        key, known = (str(settings.path(name)) if settings.text(name) else "" for name in keys)
        return cls(
            host or settings.text("WORKER_IP"),
            user or settings.text("WORKER_USER"),
            port,
            key,
            known,
        )


@dataclass(frozen=True)
class Destination:
    """What `ssh -G` made of an endpoint: the truth for the client that is not OpenSSH."""

    typed: str  # the host as typed
    config: Path
    host: str
    user: str
    port: int
    identities: tuple[str, ...] = ()
    identities_only: bool = False
    agent: str = ""  # IdentityAgent; empty: SSH_AUTH_SOCK
    known_hosts: tuple[str, ...] = ()
    key_alias: str = ""
    proxy: str = ""  # a shell command

    def __str__(self) -> str:
        return f"{self.user}@{self.host}" + (f" port {self.port}" if self.port != 22 else "")

    @property
    def known_as(self) -> str:
        """The host's name in known_hosts."""
        if self.key_alias:
            return self.key_alias
        return self.host.lower() if self.port == 22 else f"[{self.host.lower()}]:{self.port}"

    def command(self, *words: str, options: Sequence[str] = ()) -> str:
        """An ssh command that a person can copy into a shell."""
        return shlex.join(["ssh", "-F", str(self.config), *options, self.typed, *words])

    @property
    def plain(self) -> str:
        """Options of programs like ssh-copy-id, which know no configuration of ours."""
        words = ["-p", str(self.port)] if self.port != 22 else []
        return shlex.join([*words, f"{self.user}@{self.host}"])


def resolved(
    text: str, endpoint: Endpoint, config: Path, home: str, account: str, there: frozenset[str]
) -> Destination:
    """A Destination from the output of `ssh -G`.

    `home`, `account`: of the user here. `there`: which of the output's values are existing files,
    because ssh prints a list of paths, and a path with spaces, alike.
    Raises ValueError when the output lacks host, user or port.
    """
    rows: dict[str, list[str]] = {}
    for row in text.splitlines():
        key, _, value = row.partition(" ")
        rows.setdefault(key.lower(), []).append(value)
    try:
        host, user, port = rows["hostname"][0], rows["user"][0], int(rows["port"][0])
    except KeyError as error:
        raise ValueError(f"ssh -G printed no {error.args[0]}") from None
    tokens = {
        "%": "%", "d": home, "h": host, "n": endpoint.host, "p": str(port), "r": user,
        "u": account,
    }  # fmt: skip

    def paths(key: str) -> list[str]:
        listed: list[str] = []
        for value in rows.get(key, []):
            listed += [value] if value in there else value.split(" ")
        return [expand(each, tokens) for each in listed if each and each.lower() != "none"]

    known = [endpoint.known_hosts] if endpoint.known_hosts else paths("userknownhostsfile")
    identities = [expand(each, tokens) for each in rows.get("identityfile", []) if each != "none"]
    return Destination(
        typed=endpoint.host,
        config=config,
        host=host,
        user=user,
        port=port,
        identities=(endpoint.key,) if endpoint.key else tuple(dict.fromkeys(identities)),
        identities_only=rows.get("identitiesonly", ["no"])[0] == "yes",
        agent=rows.get("identityagent", [""])[0],
        known_hosts=tuple(dict.fromkeys([*known, *paths("globalknownhostsfile")])),
        key_alias=rows.get("hostkeyalias", [""])[0],
        proxy=_proxy(rows, config, tokens),
    )


def expand(value: str, tokens: Mapping[str, str]) -> str:
    """ssh's %-tokens and a leading ~ replaced; tokens that are not in `tokens` stay."""
    value = re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), value)
    return tokens["d"] + value[1:] if value == "~" or value.startswith("~/") else value


def _proxy(rows: Mapping[str, list[str]], config: Path, tokens: Mapping[str, str]) -> str:
    command = rows.get("proxycommand", ["none"])[0]
    if command.lower() != "none":
        return re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), command)
    jump = rows.get("proxyjump", ["none"])[0]
    if jump.lower() == "none":
        return ""
    before, _, last = jump.rpartition(",")
    through = ["-J", before] if before else []
    target = last if last.startswith("ssh://") else f"ssh://{last}"
    aim = f"[{tokens['h']}]:{tokens['p']}"
    return shlex.join(["ssh", "-F", str(config), *through, "-W", aim, target])


def _path(path: str) -> str:
    return _quoted(path.replace("%", "%%"))


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unusable(what: str, value: str, needed: str) -> UsageError:
    names = {
        "host": "WORKER_SSH or WORKER_IP",
        "user": "WORKER_SSH or WORKER_USER",
        "port": "WORKER_SSH_PORT",
        "key": "WORKER_SSH_KEY",
        "known_hosts": "WORKER_KNOWN_HOSTS",
    }
    return UsageError(
        f"{value!r} as the {what} of the worker's ssh destination",
        needed,
        f"correct {names[what]} in .env; ./start.sh config --explain shows where it is set",
    )
