"""overlay/benchmarks/attention.py keeps what a peer's process measured, whatever becomes of it."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "overlay" / "benchmarks"))

import attention_beside as beside

BEGIN = f"""
import json, os, sys, time
print("something else")
print({beside.READY!r}, end="", flush=True)
sys.stdin.readline()
def case(*values):
    print(json.dumps(["case", *values]), flush=True)
case("first", "peer", None)
case("first", "peer", {{"us": 1.5}})
"""
FIRST = ("first", "peer", {"us": 1.5})


def found(code: str, tmp_path: Path, *, ready: float = 30, limit: float = 30) -> list[beside.Found]:
    log = tmp_path / "log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        rows = list(beside.watched("kind", process, log, time.monotonic() + ready, limit))
    assert process.poll() is not None
    return rows


def test_what_was_measured(tmp_path: Path) -> None:
    assert found(BEGIN, tmp_path) == [FIRST]


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("time.sleep(60)", "took too long with status -9 at second (peer)"),
        ("sys.exit('no such kernel')", "ended with status 1 at second (peer): no such kernel"),
        ("os.abort()", "ended with status -6 at second (peer)"),
    ],
)
def test_a_process_that_does_not_end_well_costs_its_own_figure(
    then: str, said: str, tmp_path: Path
) -> None:
    code = f"{BEGIN}\ncase('second', 'peer', None)\n{then}"
    first, (name, peer, values) = found(code, tmp_path, limit=2)
    assert first == FIRST and (name, peer) == ("kind", "") and said in values["absent"]


def test_imports_that_never_end(tmp_path: Path) -> None:
    ((name, peer, values),) = found("import time; time.sleep(60)", tmp_path, ready=1)
    assert (name, peer) == ("kind", "") and "took too long" in values["absent"]
