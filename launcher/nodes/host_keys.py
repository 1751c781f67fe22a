"""The worker's host key against OpenSSH's known_hosts, as OpenSSH itself reads them."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.nodes import refusals
from launcher.nodes.endpoint import Destination
from launcher.nodes.refusals import HostKey, SshError

_FOUND = re.compile(r"# Host .* found: line (\d+) ?(CA|REVOKED)?\s*")


@dataclass(frozen=True)
class Known:
    file: str
    line: int
    marker: str  # "", "CA" or "REVOKED"
    kind: str
    blob: str  # base64


def parse(text: str, file: str) -> list[Known]:
    """Keys in the output of `ssh-keygen -F`."""
    known = []
    place: tuple[int, str] | None = None
    for row in text.splitlines():
        if found := _FOUND.fullmatch(row):
            place = int(found[1]), found[2] or ""
        elif place is not None:
            words = row.split()
            words = words[1:] if words and words[0].startswith("@") else words
            if len(words) >= 3:
                known.append(Known(file, *place, words[1], words[2]))
            place = None
    return known


def known(name: str, files: Iterable[str]) -> list[Known]:
    """What the files say of a host; ssh-keygen knows hashed names, patterns and markers."""
    listed = []
    for file in files:
        if not Path(file).is_file():
            continue
        asked = ["ssh-keygen", "-F", name, "-f", file]
        try:
            done = subprocess.run(asked, capture_output=True, timeout=10, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            raise refusals.no_ssh("ssh-keygen") from None
        listed += parse(done.stdout.decode("utf-8", "replace"), file)
    return listed


def for_destination(to: Destination) -> list[Known]:
    """As ssh does: beside `[host]:port` the bare host counts, but only to accept its key."""
    return known(to.known_as, to.known_hosts)


def fingerprint(blob: bytes) -> str:
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def judge(to: Destination, kind: str, blob: bytes, entries: Sequence[Known]) -> SshError | None:
    """None when the key is known. `entries`: those of the host's name in known_hosts."""
    shown = HostKey(kind, fingerprint(blob))
    text = base64.b64encode(blob).decode()
    plain = [each for each in entries if not each.marker]
    for each in entries:
        if each.marker == "REVOKED" and each.blob == text:
            return refusals.revoked_key(to, shown, each.file, each.line)
    if any(each.kind == kind and each.blob == text for each in plain):
        return None
    for each in plain:
        if each.kind == kind:
            return refusals.changed_key(to, shown, _of(each.blob), each.file, each.line)
    if plain:
        kinds = list(dict.fromkeys(each.kind for each in plain))
        place = f"{plain[0].file} line {plain[0].line}"
        return refusals.other_key_type(to, shown, kinds, place)
    note = ""
    if any(each.marker == "CA" for each in entries):
        note = " (a certificate authority is known for it, which this launcher cannot use)"
    return refusals.unknown_key(to, shown, to.known_hosts, note)


def check(to: Destination, kind: str, blob: bytes, entries: Sequence[Known]) -> None:
    """Raises SshError unless the key is known for the destination."""
    problem = judge(to, kind, blob, entries)
    if problem is None:
        return
    if not entries and not to.key_alias and to.port != 22:
        bare = known(to.host.lower(), to.known_hosts)
        if judge(to, kind, blob, bare) is None:
            return
    raise problem


def _of(blob: str) -> str:
    try:
        return fingerprint(base64.b64decode(blob, validate=True))
    except ValueError:
        return "a damaged key"
