"""Many facts in one round trip: one constant script, its sections marked by a word of this call."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import LauncherError
from launcher.facts.base import Fact, Missing
from launcher.nodes.base import Node

SECTION_SECONDS = 5  # a driver or a dead mount may hang; the other facts come nevertheless
LIMIT = 25.0


def script(facts: Sequence[Fact[Any]]) -> str:
    """The text for `sh -c`. Constant: the mark and the paths are arguments.

    Both outputs carry the marks, so that a complaint is told with the fact it belongs to.
    """
    lines = [
        'PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"; LC_ALL=C; export PATH LC_ALL',
        "mark=$1; shift",
        'say() { printf "\\n%s %s %s\\n" "$mark" "$1" "$2"; }',
        'both() { say "$1" "$2"; say "$1" "$2" >&2; }',
    ]
    for fact in facts:
        paths = ' "$@"' if fact.takes_paths else ""
        lines += [
            f"both begin {fact.key}",
            f"timeout -k 1 {SECTION_SECONDS} {shlex.join(fact.argv)}{paths} </dev/null",
            f'both end "$?"  # {fact.key}',
        ]
    return "\n".join(lines) + "\n"


def ask(
    node: Node, facts: Sequence[Fact[Any]], paths: Sequence[str] = (), limit: float = LIMIT
) -> dict[str, Any]:
    """Each fact by its key, or Missing. Raises LauncherError when the node cannot be asked."""
    mark = "@" + secrets.token_hex(8)
    done = node.run(["sh", "-c", script(facts), "sh", mark, *paths], timeout=limit)
    return read(facts, mark, done.text, done.err.decode("utf-8", "replace"))


def read(facts: Sequence[Fact[Any]], mark: str, out: str, err: str) -> dict[str, Any]:
    outputs, complaints = _sections(mark, out), _sections(mark, err)
    return {fact.key: _parsed(fact, outputs, complaints) for fact in facts}


def one(node: Node, fact: Fact[Any], limit: float = 10.0) -> Any:
    """A single fact by itself, or Missing; never raises."""
    try:
        done = node.run(fact.argv, timeout=limit)
        # Both outputs: ping and dd say what matters on either.
        return fact.parse(done.text + "\n" + done.err.decode("utf-8", "replace"))
    except LauncherError as error:
        return Missing(error.found)
    except ValueError as error:
        return Missing(str(error))


def _sections(mark: str, text: str) -> dict[str, tuple[str, int | None]]:
    """Text and exit status of each section; the status is None where it did not come to its end."""
    found: dict[str, tuple[str, int | None]] = {}
    pattern = re.compile(rf"\n{re.escape(mark)} (begin|end) (\S+)\n")
    pieces = pattern.split("\n" + text)
    key = ""
    for at in range(1, len(pieces), 3):
        word, value, after = pieces[at : at + 3]
        if word == "begin":
            key = value
            found[key] = (after, None)
        elif key:
            found[key] = (found[key][0], int(value) if value.isdigit() else None)
    return found


def _parsed(
    fact: Fact[Any],
    outputs: Mapping[str, tuple[str, int | None]],
    complaints: Mapping[str, tuple[str, int | None]],
) -> Any:
    text, status = outputs.get(fact.key, ("", None))
    said = complaints.get(fact.key, ("", None))[0].strip().splitlines()
    if status is None:
        return Missing("the node's answer ended before it")
    if status in (124, 137):
        return Missing(f"no answer within {SECTION_SECONDS} s")
    if status != 0:
        told = said or text.strip().splitlines()
        if status == 127:
            return Missing(_not_found(told[0]) if told else f"{fact.argv[0]} is not installed")
        return Missing(told[0] if told else f"exit status {status}")
    try:
        return fact.parse(text)
    except ValueError as error:
        return Missing(str(error))


def _not_found(said: str) -> str:
    """`sh: 3: nvidia-smi: not found`, `timeout: failed to run command ‘x’: No such file …`."""
    if match := re.search(r"([\w./+-]+): (?:command )?not found", said):
        return f"{match[1]} is not installed"
    if match := re.search(r"failed to run command .([^'’]+)['’]", said):
        return f"{match[1]} is not installed"
    return said
