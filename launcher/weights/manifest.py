"""Which files make up the weights: name, size and checksum of each. Pure.

One manifest drives the download, the share with the worker, the preflight and the worker's check.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from launcher import files
from launcher.errors import LauncherError

Role = Literal["model", "engram"]
ROLES: tuple[Role, ...] = get_args(Role)
FILE = "manifest.json"  # in the head's CACHE_ROOT
KIND, VERSION = "dsv41 weights", 1

# A plain name in one directory: it never leaves it, and is no pattern to rsync, NFS or the hub.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,254}")
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)


def plain(name: str) -> bool:
    """Whether a file of this name may stand in a manifest."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Entry:
    """One file: its size in bytes and its checksum.

    ``sha256`` is of the content; ``git`` is the id of its git blob, which the hub gives for small
    files instead. Both empty: only the size is known. Raises ValueError for what is neither.
    """

    name: str
    size: int
    sha256: str = ""
    git: str = ""

    def __post_init__(self) -> None:
        if not plain(self.name):
            raise ValueError(f"{self.name!r} is no plain file name")
        if self.size < 0:
            raise ValueError(f"{self.name}: {self.size} bytes")
        if self.sha256 and not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"{self.name}: {self.sha256!r} is no sha256")
        if self.git and not _GIT.fullmatch(self.git):
            raise ValueError(f"{self.name}: {self.git!r} is no git id")

    @property
    def digest(self) -> str:
        """``sha256:…`` or ``git:…``; empty where only the size is known."""
        if self.sha256:
            return f"sha256:{self.sha256}"
        return f"git:{self.git}" if self.git else ""


@dataclass(frozen=True)
class Part:
    """The files of one directory, sorted by name. ``revision``: the hub's commit; empty: made from
    a tree. Raises ValueError for what can be no such part."""

    role: Role
    repo: str
    revision: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"{self.role!r} is not one of {', '.join(ROLES)}")
        if self.repo and not _REPO.fullmatch(self.repo):
            raise ValueError(f"{self.repo!r} is no repository")
        if self.revision and not _GIT.fullmatch(self.revision):
            raise ValueError(f"{self.revision!r} is no commit")
        if not self.entries:
            raise ValueError(f"{self.role}: no files")
        in_order = tuple(sorted(self.entries, key=lambda entry: entry.name))
        object.__setattr__(self, "entries", in_order)
        names = [entry.name for entry in self.entries]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{self.role}: {name} twice")

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)


@dataclass(frozen=True)
class Manifest:
    """Both parts, or the one that is known, the model first."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        roles = [part.role for part in self.parts]
        if not roles or roles != [role for role in ROLES if role in roles]:
            raise ValueError(f"parts {', '.join(roles) or 'none'}: model, then engram, each once")

    def part(self, role: Role) -> Part:
        """Raises LauncherError where the manifest does not have it."""
        for part in self.parts:
            if part.role == role:
                return part
        raise LauncherError(
            f"the manifest has no files of the {role}", "both parts", "./start.sh download"
        )

    def has(self, role: Role) -> bool:
        return any(part.role == role for part in self.parts)

    def with_part(self, part: Part) -> Manifest:
        """The same with this part in the place of its role's."""
        found = {each.role: each for each in (*self.parts, part)}
        return Manifest(tuple(found[role] for role in ROLES if role in found))

    def key(self) -> str:
        """One hash over everything in it, for fingerprints."""
        text = json.dumps(self._value(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps({**self._value(), "key": self.key()}, indent=1, sort_keys=True) + "\n"

    def _value(self) -> dict[str, Any]:
        parts = {
            part.role: {
                "repo": part.repo,
                "revision": part.revision,
                "files": [_as_json(entry) for entry in part.entries],
            }
            for part in self.parts
        }
        return {"kind": KIND, "version": VERSION, "parts": parts}

    @classmethod
    def from_json(cls, text: str | bytes, where: str = FILE) -> Manifest:
        """The manifest that `to_json` wrote. Raises LauncherError that names ``where`` for anything
        else, a manifest changed by hand included."""
        try:
            value = json.loads(text)
            if not isinstance(value, dict) or value.get("kind") != KIND:
                raise ValueError("it is no manifest of weights")
            if type(value.get("version")) is not int or value["version"] != VERSION:
                raise ValueError(f"its version is {value.get('version')!r}, not {VERSION}")
            parts = _object(value.get("parts"), "parts")
            if unknown := set(parts) - set(ROLES):
                raise ValueError(f"part {sorted(unknown)[0]!r} is unknown")
            made = cls(tuple(_part(role, parts[role]) for role in ROLES if role in parts))
            if value.get("key") != made.key():
                raise ValueError("its key is not that of its content: it was changed by hand")
        except (ValueError, RecursionError) as error:
            raise LauncherError(
                f"{where} cannot be used: {error}",
                "the manifest as ./start.sh download wrote it",
                f"remove {where}, then ./start.sh download: whole files are not fetched again",
            ) from error
        return made


def load(path: Path) -> Manifest | None:
    """The manifest in ``path``, None without one. Raises LauncherError for a broken one."""
    try:
        return Manifest.from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None


def save(path: Path, manifest: Manifest) -> None:
    """Replace ``path`` whole or not at all; an equal one is left alone. Raises OSError."""
    data = manifest.to_json().encode()
    try:
        if path.read_bytes() == data:
            return
    except FileNotFoundError:
        pass
    files.replace(path, data)


def _as_json(entry: Entry) -> dict[str, Any]:
    value: dict[str, Any] = {"name": entry.name, "size": entry.size}
    for key, digest in (("sha256", entry.sha256), ("git", entry.git)):
        if digest:
            value[key] = digest
    return value


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: an object was expected, found {type(value).__name__}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what}: text was expected, found {type(value).__name__}")
    return value


def _part(role: str, value: Any) -> Part:
    found = _object(value, role)
    listed = found.get("files")
    if not isinstance(listed, list):
        raise ValueError(f"{role}: no list of files")
    entries = []
    for each in listed:
        row = _object(each, f"{role}: a file")
        size = row.get("size")
        name = _text(row.get("name"), f"{role}: a file's name")
        if type(size) is not int:
            raise ValueError(f"{name}: size {size!r} is no number of bytes")
        sums = (_text(row.get(key, ""), f"{name}: {key}") for key in ("sha256", "git"))
        entries.append(Entry(name, size, *sums))
    return Part(
        cast(Role, role),
        _text(found.get("repo"), f"{role}: repo"),
        _text(found.get("revision"), f"{role}: revision"),
        tuple(entries),
    )
