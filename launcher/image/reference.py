"""A name of an image as Docker reads it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

HUB = "registry-1.docker.io"
_REPOSITORY = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """``host`` of the registry's API, ``repository`` there, ``tag`` or "sha256:…"."""

    host: str
    repository: str
    tag: str


def reference(name: str) -> Reference | None:
    """None for what Docker would not take as a name."""
    rest, at, digest = name.partition("@")
    first, slash, other = rest.partition("/")
    # A first part is a host when it looks like one: Docker's own rule.
    if slash and ("." in first or ":" in first or first == "localhost"):
        host, rest = first, other
        if host in ("docker.io", "index.docker.io"):
            host = HUB
    else:
        host = HUB
    repository, _, tag = rest.partition(":")
    if host == HUB and "/" not in repository:
        repository = f"library/{repository}"
    tag = digest if at else tag or "latest"
    right = _DIGEST.fullmatch(tag) if at else _TAG.fullmatch(tag)
    if not right or not _REPOSITORY.fullmatch(repository):
        return None
    return Reference(host, repository, tag)
