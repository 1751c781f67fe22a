"""Packed files looked at before vLLM is loaded: a wrong one ends the rank at once, its words last.

Later, in a worker process of vLLM, they would stand above two tracebacks that say nothing of them.
No torch, no vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.packed import attach, file_name
from spark_overlay.engram.source import locate_tables, read_layout
from spark_overlay.headers import HeaderError
from spark_overlay.settings import OverlaySettings


def check(argv: Sequence[str]) -> None:
    """Raises SystemExit where this rank's packed files, by the arguments of ``vllm serve``, are not
    of its source. Of any other layout than one rank a node nothing is known here."""
    config = _option(argv, "--additional-config")
    tp, nodes, rank = (
        _number(argv, name) for name in ("--tensor-parallel-size", "--nnodes", "--node-rank")
    )
    if config is None or tp is None or rank is None or tp != nodes:
        return
    try:
        settings = OverlaySettings.parse(json.loads(config).get("spark_overlay", {}))
        source, folder = settings.engram_dir, settings.engram_packed_dir
    except (ValueError, AttributeError, TypeError):
        return  # vLLM and the plugin say what is wrong with it
    if settings.engram_store != "file" or source is None or folder is None:
        return
    if not any(Path(folder).glob(file_name("*", rank, tp))):
        return
    try:
        layout = read_layout(Path(source))
        for table in locate_tables(Path(source), layout).values():
            attach(Path(folder), table, layout, rank, tp)
    except (EngramError, HeaderError) as error:
        raise SystemExit(str(error)) from error


def _option(argv: Sequence[str], name: str) -> str | None:
    for at, word in enumerate(argv):
        if word == name and at + 1 < len(argv):
            return argv[at + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _number(argv: Sequence[str], name: str) -> int | None:
    text = _option(argv, name) or ""
    return int(text) if text.isdecimal() else None
