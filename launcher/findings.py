"""What a look at the machines found: each with what was needed and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from launcher.errors import LauncherError

Level = Literal["wrong", "warn"]


@dataclass(frozen=True)
class Finding:
    """``wrong`` would stop the boot, ``warn`` is told and stops nothing."""

    found: str
    needed: str
    mend: str
    level: Level = "wrong"
    topic: str = ""  # which rule said so: "link", "memory", …


def warning(found: str, needed: str, mend: str, topic: str = "") -> Finding:
    return Finding(found, needed, mend, "warn", topic)


def stopping(findings: Iterable[Finding]) -> list[Finding]:
    return [each for each in findings if each.level == "wrong"]


def warnings(findings: Iterable[Finding]) -> list[Finding]:
    return [each for each in findings if each.level == "warn"]


def refuse(findings: Iterable[Finding]) -> None:
    """Raise one LauncherError that tells all that would stop the boot; warnings do not count."""
    wrong = stopping(findings)
    if not wrong:
        return
    if len(wrong) == 1:
        raise LauncherError(wrong[0].found, wrong[0].needed, wrong[0].mend)
    told = [f"\n  {n}. {_indented(each.found)}" for n, each in enumerate(wrong, 1)]
    needed = [f"\n  {n}. {_indented(each.needed)}" for n, each in enumerate(wrong, 1)]
    mend = [f"\n  {n}. {_indented(each.mend)}" for n, each in enumerate(wrong, 1)]
    raise LauncherError(
        f"{len(wrong)} things are in the way:{''.join(told)}", "".join(needed), "".join(mend)
    )


def _indented(text: str) -> str:
    """A table within a finding stays under its number."""
    return text.replace("\n", "\n     ")
