"""The judges of Engram: parts that need no engine, and engines compared digest by digest."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu import engines

Values = dict[str, Any]
Judge = Callable[[Any], tuple[bool, Values]]
PHASES = ("alone", "cached", "batch", "again")
LIMIT = 240  # seconds for the parts of one kind


def parts(kind: str) -> Judge:
    """``engram.py KIND`` in a process of its own: what ends it, such as a row that cannot be, must
    not end the others. Parts that were done by then count as they are."""

    def judge(bench: Any) -> tuple[bool, Values]:
        out, log = bench.scratch / f"engram-{kind}.json", bench.scratch / f"engram-{kind}.log"
        out.unlink(missing_ok=True)
        argv = [sys.executable, str(Path(__file__).with_name("engram.py")), kind]
        # On a disk: the models' place may be memory, where reads are never direct.
        tables = tempfile.mkdtemp(prefix="spark-engram-")
        argv += ["--out", str(out), "--scratch", tables, "--device", bench.device]
        with log.open("wb") as file:
            try:
                status: int | str = subprocess.run(
                    argv, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"not done after {LIMIT} s"
        values: Values = json.loads(out.read_text()) if out.is_file() else {}
        wrong = [name for name, part in values.items() if not part["ok"]]
        values |= {"parts": len(values), "wrong": wrong}
        if status != 0:
            end = log.read_text(errors="replace").splitlines()[-40:]
            print("\n".join(end), flush=True)
            values |= {"ended_with": status, "log": end[-12:]}
        return status == 0 and not wrong and values["parts"] > 0, values

    return judge


def same_layers(mode: str) -> Judge:
    """Stock tables in pinned memory against ours in files: every digest of every step equal."""
    stock, ours = f"engram-stock-{mode}", f"engram-file-{mode}"

    def judge(bench: Any) -> tuple[bool, Values]:
        first, second = bench.answers[stock], bench.answers[ours]
        names = first["taps"][0]
        values: Values = {"taps": len(names), "tables": [first["engram"][0], second["engram"][0]]}
        unequal, rows, seen = {}, 0, set()
        for phase in PHASES:
            one, other = (tape(bench, name, phase) for name in (stock, ours))
            found = differences(one, other, names)
            if found:
                unequal[phase] = found
            rows += int(one["counts"].max(1).values.sum())
            seen |= set(one["digests"][..., names.index("1.rows")].flatten().tolist())
        values |= {
            "steps": {phase: first[f"{phase}-steps"][0] for phase in PHASES},
            "rows": rows,
            "different_table_rows": len(seen),
            "unequal": unequal,
            "replies_equal": all(first[phase] == second[phase] for phase in PHASES),
            "cached_tokens": [reply["cached"] for reply in first["cached"]],
            "stock_is_the_same_twice": not differences(
                tape(bench, stock, "alone"), tape(bench, stock, "again"), names
            ),
            **engine_seconds(bench, stock, ours),
        }
        right = not unequal and values["replies_equal"]
        # What must have computed, or the comparison says nothing.
        right = right and len(seen) > rows // 2
        table = second["engram"][0][0]
        right = right and table["engram"].endswith(".SparkEngram") and table["lookups"] > 0
        if bench.device != "cpu":
            pinned = first["engram"][0][0]
            right = right and any(values["cached_tokens"])
            right = right and pinned["engram"].startswith("vllm.") and pinned["pinned_bytes"] > 0
            right = right and table["prefetched"] and table["store"].endswith(".NativeRowStore")
        return right, values

    return judge


def engine_seconds(bench: Any, *names: str) -> Values:
    return {
        "engine_seconds": {
            name: {k: round(v, 1) for k, v in bench.answers[name]["seconds"].items() if k != "_"}
            for name in names
        }
    }


def tape(bench: Any, engine: str, phase: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(bench.scratch / f"{engine}.safetensors.{phase}")
    return found


def differences(one: dict[str, Any], other: dict[str, Any], names: list[str]) -> Values:
    """By tap: rows that differ, and the first step and row that does. Empty if all are equal."""
    if one["counts"].shape != other["counts"].shape or (one["counts"] != other["counts"]).any():
        return {"steps": [one["counts"].tolist(), other["counts"].tolist()]}
    differ = one["digests"] != other["digests"]
    return {
        name: {
            "rows": int(differ[..., tap].sum()),
            "first": differ[..., tap].nonzero()[0].tolist(),
        }
        for tap, name in enumerate(names)
        if differ[..., tap].any()
    }


MODES = {
    "eager": "eager, chunks, prefix hits",
    "graphs": "whole decode steps in one CUDA graph, decoder replay on",
    "pieces": "CUDA graphs in pieces, decoder replay on",
}
assert all(f"engram-file-{mode}" in engines.ENGINES for mode in MODES)
