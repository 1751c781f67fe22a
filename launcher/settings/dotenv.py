"""`.env` read as data: nothing in it is ever executed, expanded or interpolated.

Grammar (a file that means the same to `sh`, less everything `sh` would expand):

    file     lines that end in LF or CRLF; UTF-8, a leading byte order mark is skipped
    line     blank | `#` comment | [`export`] KEY `=` value
    KEY      [A-Za-z_][A-Za-z0-9_]*, blanks around `=` are allowed
    value    'single'   everything up to the next ', as typed; may span lines
             "double"   \\" \\\\ \\$ \\` stand for " \\ $ `, any other backslash is as typed; may
                        span lines
             bare       the rest of the line, as typed, inner blanks and quotes included; a `#`
                        after a blank starts a comment; blanks at the end are dropped
    after a closing quote only blanks and a comment may follow

Inside quotes a line break is always LF, so a CRLF file and its LF copy hold the same values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ASSIGNMENT = re.compile(r"[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=")
_BLANK_OR_COMMENT = re.compile(r"[ \t]*(?:#.*)?")
_BARE_COMMENT = re.compile(r"[ \t]+#.*")
_DOUBLE_ESCAPES = '"\\$`'


@dataclass(frozen=True)
class Entry:
    """One assignment: `line` counts from 1 and is where the key stands."""

    key: str
    value: str
    line: int


@dataclass(frozen=True)
class Problem:
    """Something in the file that cannot be read."""

    line: int
    message: str


class _Unterminated(Exception):
    pass


def parse(text: str) -> tuple[list[Entry], list[Problem]]:
    """All assignments of a file in order, and everything that is wrong with it."""
    source = text.removeprefix("\ufeff").replace("\r\n", "\n")
    entries: list[Entry] = []
    problems: list[Problem] = []
    first_line: dict[str, int] = {}
    position, line = 0, 1
    while position < len(source):
        end = source.find("\n", position)
        end = len(source) if end < 0 else end
        current = source[position:end]
        match = _ASSIGNMENT.match(current)
        next_position, next_line = end + 1, line + 1
        if _BLANK_OR_COMMENT.fullmatch(current):
            pass
        elif match is None:
            problems.append(Problem(line, "is not KEY=value, a comment or blank"))
        else:
            key, start = match.group(1), position + match.end()
            try:
                value, stop = _value(source, start, end)
            except _Unterminated as problem:
                problems.append(Problem(line, f"{key}: {problem}"))
            else:
                end = source.find("\n", stop)
                end = len(source) if end < 0 else end
                next_position = end + 1
                next_line = line + source.count("\n", position, stop) + 1
                if not _BLANK_OR_COMMENT.fullmatch(source, stop, end):
                    problems.append(Problem(line, f"{key}: text after the closing quote"))
                elif "\0" in value:
                    problems.append(Problem(line, f"{key}: holds a NUL character"))
                elif key in first_line:
                    problems.append(
                        Problem(
                            line,
                            f"{key} stands a second time (first on line "
                            f"{first_line[key]}); keep one of the two",
                        )
                    )
                else:
                    first_line[key] = line
                    entries.append(Entry(key, value, line))
        position, line = next_position, next_line
    return entries, problems


def _value(source: str, start: int, end: int) -> tuple[str, int]:
    """The value that starts at `start` on a line that ends at `end`, and where it stops."""
    bare = source[start:end]
    opening = start + len(bare) - len(bare.lstrip(" \t"))
    if source.startswith("'", opening):
        stop = source.find("'", opening + 1)
        if stop < 0:
            raise _Unterminated("the single quote is never closed")
        return source[opening + 1 : stop], stop + 1
    if source.startswith('"', opening):
        return _double_quoted(source, opening + 1)
    return _BARE_COMMENT.sub("", bare, count=1).strip(" \t"), end


def _double_quoted(source: str, position: int) -> tuple[str, int]:
    characters: list[str] = []
    while position < len(source):
        character = source[position]
        if character == '"':
            return "".join(characters), position + 1
        if character == "\\" and source[position + 1 : position + 2] in tuple(_DOUBLE_ESCAPES):
            position += 1
            character = source[position]
        characters.append(character)
        position += 1
    raise _Unterminated("the double quote is never closed")


def quote(value: str) -> str:
    """`value` written so that `parse` and `sh` both read it back (CR LF inside becomes LF)."""
    if value and re.fullmatch(r"[A-Za-z0-9_@%+:,./^=~-]+", value):
        return value
    if not value:
        return ""
    if "'" not in value:
        return f"'{value}'"
    return '"' + re.sub(r'(["\\$`])', r"\\\1", value) + '"'
