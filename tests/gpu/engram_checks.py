"""The judges of Engram: parts that need no engine, and both layers within one engine."""

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
PHASES = ("alone", "cached", "batch")
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
    """Stock's pinned table and ours in files, in the same steps: rows and outputs bit-equal."""
    engine = f"engram-twin-{mode}"

    def judge(bench: Any) -> tuple[bool, Values]:
        found = bench.answers[engine]
        tables = found["engram"][0]
        values: Values = {
            "tables": tables,
            "by_phase": {phase: found[f"{phase}-twins"][0] for phase in PHASES},
            "cached_tokens": [reply["cached"] for reply in found["cached"]],
            **engine_seconds(bench, engine),
        }
        right = all(each["lookups"] > 0 and each["parameters"] == 0 for each in tables)
        if bench.device == "cpu":
            return right, values  # the overlay alone: stock's layer runs on GPUs only
        seen = [counts for counts in values["by_phase"].values() for counts in counts]
        right = right and len(seen) == len(PHASES) * len(tables) and any(values["cached_tokens"])
        right = right and all(each["store"].endswith(".NativeRowStore") for each in tables)
        right = right and all(each["prefetched"] and each["pinned_bytes"] > 0 for each in tables)
        for counts in seen:
            right = right and counts["rows_unequal"] == counts["outputs_unequal"] == 0
            # Or the comparison says nothing.
            right = right and counts["control"] > counts["tokens"] // 2 > 0
        return right, values

    return judge


def engine_seconds(bench: Any, *names: str) -> Values:
    return {
        "engine_seconds": {
            name: {k: round(v, 1) for k, v in bench.answers[name]["seconds"].items() if k != "_"}
            for name in names
        }
    }


MODES = {
    "eager": "eager, chunks, prefix hits",
    "graphs": "whole decode steps in one CUDA graph, decoder replay on",
    "pieces": "CUDA graphs in pieces, decoder replay on",
}
assert all(f"engram-twin-{mode}" in engines.ENGINES for mode in MODES)
