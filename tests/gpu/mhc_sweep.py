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
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from gpu import mhc_cases as cases  # noqa: E402
from spark_overlay.mhc import plan  # noqa: E402
from spark_overlay.mhc.kernels import launch  # noqa: E402
from spark_overlay.mhc.plan import OneLaunch, TwoLaunches  # noqa: E402

H = 5120
SMALL = (1, 12, 32, 4, 16, 64, 256)
ONE = [
    *(OneLaunch(rows, 24, 80, 32, 4, 3) for rows in (4, 8, 16, 32)),
    *(OneLaunch(rows, 24, 40, 32, 4, 5) for rows in (8, 16, 32)),
    OneLaunch(16, 24, 40, 64, 4, 3),
    *(OneLaunch(rows, 12, 40, 32, 4, 5) for rows in (8, 16, 32)),
    *(OneLaunch(rows, 12, 80, 32, 4, 3) for rows in (8, 16)),
    OneLaunch(8, 24, 80, 32, 4, 3, stages=3),
    OneLaunch(8, 24, 160, 16, 4, 3),
    plan.TILES_6_8_128,
]
LARGE = (2048,)
TWO = [
    *(TwoLaunches(16, splits, 64, 4, stages) for splits in (2, 4, 5) for stages in (2, 3)),
    TwoLaunches(16, 4, 64, 8, 2),
    TwoLaunches(32, 5, 32, 4, 2),
]
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


def timed(calls: list[Callable[[], Any]], runs: int = 3) -> float:
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


@triton.jit
def nothing(out):
    tl.store(out + tl.program_id(0), 0)


def floor() -> float:
    """A launch that does nothing, in a graph."""
    out = torch.empty(100, dtype=torch.int32, device="cuda")
    return timed([lambda: nothing[(100,)](out)] * 48)


def works(tokens: int) -> list[Any]:
    """Inputs of calls in turn: 48 weights (94 MB), rows as often as memory makes sensible."""
    sets = 48 if tokens <= 256 else 8
    first = cases.draw(2, H, 1).to("cuda")
    for name in ("x", "residual", "post", "comb", "pre"):
        value = getattr(first, name)
        setattr(first, name, torch.rand((tokens, *value.shape[1:]), device="cuda").to(value.dtype))
    made = []
    for _ in range(sets):
        one = cases.Case(**vars(first))
        one.fn = torch.randn(24, 4 * H, device="cuda") * H**-0.5
        if tokens <= 64 or len(made) < 3:
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
                if left() < 3 or "error" in row or "name" not in row:
                    continue
                if isinstance(one, OneLaunch) and tokens > 8 * one.rows:
                    continue
                try:
                    us = timed([lambda w=w, g=one: launch.run(w, cases.NUMBERS, g) for w in inputs])
                    row.setdefault("us", {})[str(tokens)] = round(us, 2)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
            save()

    compare([*ONE, *TWO])
    rows["floor"] = {"us": {"0": round(floor(), 2)}}
    print("a launch of nothing", rows["floor"]["us"]["0"], flush=True)
    measure([*TWO], LARGE)
    measure([*ONE], SMALL)
    errors = [row for row in rows.values() if "error" in row]
    for row in errors[:4]:
        print(row["name"], row["error"][:150])
    worst = {}
    for row in rows.values():
        for tokens in ("13", "33", "70"):
            for name, value in row.get(tokens, {}).items():
                worst[name] = max(worst.get(name, 0.0), value if value == value else 9.9)
    print("worst", {name: f"{value:.1e}" for name, value in worst.items()}, f"{len(errors)} errors")
    for tokens in (*sorted(SMALL), 2048):
        best = sorted(
            (row["us"][str(tokens)], name)
            for name, row in rows.items()
            if str(tokens) in row.get("us", {})
        )
        print(tokens, " ".join(f"{name}={us}" for us, name in best[:5]), "… worst", best[-1:])
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(sys.argv[2:])
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]))
