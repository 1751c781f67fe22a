"""The launch table that ``./start.sh tune`` wrote on a node."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.base import HOME, shell


@dataclass(frozen=True)
class TunedTable:
    """``digest`` is the sha256 of its file; empty: there is none."""

    digest: str = ""


@dataclass(frozen=True)
class TunedFact:
    """Of the fourth path, which is the file's. One that cannot be read is not one that is absent:
    then the command fails."""

    key: str = "tuned"
    argv: tuple[str, ...] = shell(
        'p=$4; [ -n "$p" ] || exit 0; ' + HOME + '; [ -e "$q" ] || exit 0; sha256sum < "$q"'
    )
    takes_paths: bool = True

    def parse(self, text: str) -> TunedTable:
        return TunedTable(text.split()[0] if text.split() else "")
