"""Which geometries of mHC's kernels are right and how long each takes: ``mhc_sweep.py OUT LIMIT``.

Workers compile and compare first, all cores at once; then everything is timed alone. JSON into
OUT/mhc_sweep.json after each step; a short table last.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT / "overlay", ROOT / "tests"):
    sys.path.insert(1, str(place))

import torch  # noqa: E402

from gpu import mhc_cases as cases  # noqa: E402
from spark_overlay.mhc import plan  # noqa: E402
from spark_overlay.mhc.kernels import launch  # noqa: E402
from spark_overlay.mhc.plan import OneLaunch, TwoLaunches  # noqa: E402

H = 5120
SMALL = (1, 4, 6, 12, 16, 32, 64)
ONE = [
    OneLaunch(rows, 24, splits, block, warps)
    for rows in (4, 8, 16)
    for splits, block in ((80, 64), (160, 32), (40, 128), (40, 64))
    for warps in (4, 8)
    if block * warps < 1024
]
ONE += [
    OneLaunch(2, 24, 160, 32, 4, dot=False),
    OneLaunch(4, 24, 320, 16, 4, dot=False),
    OneLaunch(4, 24, 80, 64, 4, limbs=3),
    OneLaunch(32, 24, 80, 64, 4),
    plan.TILES_6_8_128,
]
LARGE = (64, 256, 2048)
TWO = [
    TwoLaunches(rows, splits, block, warps, stages)
    for rows, block, warps in ((32, 32, 4), (16, 64, 4), (16, 32, 4), (32, 64, 8), (32, 32, 8))
    for stages in (1, 2, 3)
    for splits in (4, 10)
]
TWO += [TwoLaunches(32, 2, 32, 4, 2), TwoLaunches(16, 2, 32, 4, 2), TwoLaunches(16, 16, 32, 4, 2)]
Geometry = OneLaunch | TwoLaunches


def named(one: Geometry) -> str:
    kind = "one" if isinstance(one, OneLaunch) else "two"
    return kind + ":" + ",".join(str(int(v)) for v in asdict(one).values())


def work(names: list[str]) -> None:
    """A worker: compile, compare, print a line of JSON each."""
    wanted = {named(one): one for one in [*ONE, *TWO]}
    right: dict[int, Any] = {}
    for name in names:
        one = wanted[name]
        line: dict[str, Any] = {"name": name}
        try:
            for tokens in (13, 33) if isinstance(one, OneLaunch) else (70,):
                case = cases.draw(tokens, H, tokens)
                if tokens not in right:
                    right[tokens] = cases.oracle(case)
                found = cases.computed(case.to("cuda"), one)
                line[str(tokens)] = cases.off(found, right[tokens])
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(line), flush=True)


def timed(calls: list[Callable[[], Any]], runs: int = 5) -> float:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(found)


def works(tokens: int) -> list[Any]:
    """Inputs of calls in turn: 48 weights (94 MB), rows as often as memory makes sensible."""
    sets = 48 if tokens <= 256 else 8
    first = cases.draw(tokens, H, 1).to("cuda")
    made = []
    for _ in range(sets):
        one = cases.Case(**vars(first))
        one.fn = torch.randn(24, 4 * H, device="cuda") * H**-0.5
        if len(made) < 48 and tokens <= 64 or len(made) < 3:
            one.residual = torch.randn_like(first.residual)
            one.x = torch.randn_like(first.x)
        made.append(cases.poisoned(one))
    return made


def main(out: Path, limit: float) -> None:
    began = time.monotonic()
    rows: dict[str, Any] = {}

    def left() -> float:
        return limit - (time.monotonic() - began)

    def save() -> None:
        (out / "mhc_sweep.json").write_text(json.dumps(rows, indent=0))

    def compare(geometries: list[Geometry]) -> None:
        jobs = min(len(geometries), max(1, (os.cpu_count() or 2) - 1))
        parts = [[named(one) for one in geometries[i::jobs]] for i in range(jobs)]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--work", *part], stdout=subprocess.PIPE, text=True
            )
            for part in parts
        ]
        for one in running:
            try:
                said, _ = one.communicate(timeout=max(5.0, left() - 10))
            except subprocess.TimeoutExpired:
                one.kill()
                said, _ = one.communicate()
            for line in said.splitlines():
                found = json.loads(line)
                rows[found["name"]] = found
        save()
        print(f"{len(geometries)} compared after {time.monotonic() - began:.0f} s", flush=True)

    def measure(geometries: list[Geometry], counts: tuple[int, ...]) -> None:
        for tokens in counts:
            inputs = works(tokens)
            for one in geometries:
                row = rows.get(named(one), {})
                if left() < 4 or "error" in row or "name" not in row:
                    continue
                if isinstance(one, OneLaunch) and tokens > 16 * one.rows:
                    continue
                try:
                    us = timed([lambda w=w, g=one: launch.run(w, cases.NUMBERS, g) for w in inputs])
                    row.setdefault("us", {})[str(tokens)] = round(us, 2)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
            save()

    compare([*ONE])
    measure([*ONE], SMALL)
    compare([*TWO])
    measure([*TWO], LARGE)
    errors = [row for row in rows.values() if "error" in row]
    for row in errors[:4]:
        print(row["name"], row["error"][:150])
    worst = {}
    for row in rows.values():
        for tokens in ("13", "33", "70"):
            for name, value in row.get(tokens, {}).items():
                worst[name] = max(worst.get(name, 0.0), value if value == value else 9.9)
    print("worst", {name: f"{value:.1e}" for name, value in worst.items()}, f"{len(errors)} errors")
    for tokens in (*SMALL, 256, 2048):
        best = sorted(
            (row["us"][str(tokens)], name)
            for name, row in rows.items()
            if str(tokens) in row.get("us", {})
        )
        print(tokens, " ".join(f"{name}={us}" for us, name in best[:4]), "… worst", best[-1:])
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(sys.argv[2:])
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]))
