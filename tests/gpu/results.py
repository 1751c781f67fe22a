"""The JSON that every check and benchmark writes. Pure; the schema is in README.md beside this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
TOP = {
    "schema": int,
    "date": str,
    "device": str,
    "driver": str,
    "versions": dict,
    "commit": str,
    "seconds": (int, float),
    "rows": list,
}
ROW = {"name": str, "ok": bool, "seconds": (int, float), "values": dict}


class ResultError(ValueError):
    """A file that is no result, or not one of this schema."""


@dataclass
class Result:
    """What one host measured. ``rows`` by name, in the order they were made."""

    date: str
    device: str
    driver: str
    versions: Mapping[str, str]
    commit: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row; one of the same name is replaced."""
        check(ROW, row, f"row {row.get('name')!r}")
        self.rows = [old for old in self.rows if old["name"] != row["name"]] + [row]

    def done(self) -> set[str]:
        """Names of the rows that stand, right or wrong."""
        return {row["name"] for row in self.rows}

    def same_host(self, other: Result) -> bool:
        """Whether rows of both may stand in one file."""
        return (self.device, self.driver, self.versions, self.commit) == (
            other.device,
            other.driver,
            other.versions,
            other.commit,
        )

    def write(self, path: Path) -> None:
        """Put the file in place whole."""
        value = {"schema": SCHEMA, **self.__dict__}
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(value, indent=1) + "\n")
        partial.rename(path)


def read(path: Path) -> Result:
    """Raises ResultError for a file of another schema or with something missing."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ResultError(f"{path} is no JSON ({error}): delete it, or give another path") from None
    if not isinstance(value, dict):
        raise ResultError(f"{path} holds no object: delete it, or give another path")
    check(TOP, value, str(path))
    if value["schema"] != SCHEMA:
        raise ResultError(f"{path} has schema {value['schema']}, this reads {SCHEMA}")
    for row in value["rows"]:
        check(ROW, row, f"{path}, row {row.get('name')!r}")
    return Result(**{name: value[name] for name in TOP if name != "schema"})


def check(schema: Mapping[str, Any], value: Mapping[str, Any], where: str) -> None:
    """Raise ResultError naming the first key that is missing or of another type."""
    for name, kind in schema.items():
        if name not in value or not isinstance(value[name], kind):
            found = type(value[name]).__name__ if name in value else "nothing"
            raise ResultError(f"{where}: {name} needs {kind}, found {found}")
