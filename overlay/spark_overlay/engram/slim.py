"""A directory with only the Engram tables: an index of them, config.json, their shards by link.

    python -m spark_overlay.engram.slim --native DIR --out DIR [--symlink]

The shards are 190 GiB: they are linked, never copied. A hard link needs one file system; with
``--symlink`` links by path are made, which a container follows only if it sees the target too.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.names import is_table_tensor
from spark_overlay.engram.source import locate_tables, read_layout
from spark_overlay.headers import INDEX_NAME, HeaderError, read_index

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Link:
    """How one shard came into the directory: "hard link", "symlink" or "as it was"."""

    name: str
    kind: str
    target: Path


def make_slim(native: Path, out: Path, *, symlink: bool = False) -> list[Link]:
    """Make or complete the directory ``out``. What is there and right stays.

    Raises EngramError (HeaderError for damaged files of ``native``), with no shard copied.
    """
    layout = read_layout(native)
    index = _tables_of(native)
    locate_tables(native, layout)
    if out.resolve() == native.resolve():
        raise EngramError(f"{out}: is the native directory itself; use it as it is")
    out.mkdir(parents=True, exist_ok=True)
    links = [_link(native / name, out / name, symlink) for name in sorted(set(index.values()))]
    slim = {
        "metadata": {
            "total_size": sum(link.target.stat().st_size for link in links),
            "spark_overlay": "Engram tables only",
        },
        "weight_map": dict(sorted(index.items())),
    }
    _replace(out / INDEX_NAME, json.dumps(slim, indent=1).encode() + b"\n")
    _replace(out / CONFIG, (native / CONFIG).read_bytes())
    locate_tables(out, layout)
    return links


def _tables_of(native: Path) -> dict[str, str]:
    index: dict[str, Any] = read_index(native) or {}
    tables = {name: file for name, file in index.items() if is_table_tensor(name)}
    if not tables:
        raise EngramError(
            f"{native / INDEX_NAME}: {'names no Engram table' if index else 'missing'}. Use the "
            "native checkpoint's index; an EXL3 tree holds no tables"
        )
    return tables


def _link(shard: Path, place: Path, symlink: bool) -> Link:
    try:
        real = shard.resolve(strict=True)  # a cache of downloads links to its blobs
    except OSError as error:
        raise EngramError(f"{shard}: leads nowhere ({error}). Download it again") from None
    if os.path.lexists(place):
        if place.exists() and place.samefile(real):
            return Link(place.name, "as it was", real)
        raise EngramError(
            f"{place}: is another file than {real}. Remove it if nothing else needs it, then make "
            "the directory again"
        )
    if symlink:
        place.symlink_to(real)
        return Link(place.name, "symlink", real)
    try:
        os.link(real, place)
    except OSError as error:
        way = (
            f"Give a directory on the file system of {real}, use {shard.parent} itself, or make "
            f"links by path (--symlink), where a container must see {real.parent} too"
        )
        if error.errno == errno.EXDEV:
            raise EngramError(
                f"{place}: {real} is on another file system, and a table is never copied. {way}"
            ) from None
        raise EngramError(f"{place}: cannot link {real} ({error.strerror}). {way}") from None
    return Link(place.name, "hard link", real)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="spark_overlay.engram.slim",
        description="A directory with the Engram tables only.",
        allow_abbrev=False,
    )
    parser.add_argument("--native", type=Path, required=True, help="the native checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--symlink", action="store_true", help="link by path, across file systems")
    asked = parser.parse_args(argv)
    try:
        links = make_slim(asked.native, asked.out, symlink=asked.symlink)
    except (EngramError, HeaderError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for link in links:
        print(f"{asked.out / link.name}: {link.kind} of {link.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
