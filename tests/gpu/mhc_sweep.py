"""Which geometries of mHC's kernels are right and how long each takes: ``mhc_sweep.py OUT LIMIT``.

Workers compile and compare first, all cores at once (``--compare``: that alone, beside other work);
then everything is timed alone. JSON into OUT/mhc_sweep.json after each step; a short table last.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT / "overlay", ROOT / "tests"):
    sys.path.insert(1, str(place))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from gpu import mhc_cases as cases  # noqa: E402
from spark_overlay.mhc.kernels import launch  # noqa: E402
from spark_overlay.mhc.plan import OneLaunch, TwoLaunches  # noqa: E402

H = 5120
SMALL = (1, 16, 4, 32, 8)
_SHAPES = [
    OneLaunch(8, 24, 80, 32, 4, 3),
    OneLaunch(16, 24, 40, 64, 4, 3),
    OneLaunch(8, 24, 40, 64, 4, 3),
    OneLaunch(8, 24, 40, 32, 4, 5),
    OneLaunch(16, 24, 80, 32, 4, 3),
    OneLaunch(4, 24, 80, 32, 4, 3),
]
#: Each as it is, with an early start, with fewer divisions, with both.
ONE = [
    *(replace(one, early=early) for early in (0, 1) for one in _SHAPES),
    *(replace(one, early=early, exact=6) for early in (0, 1) for one in _SHAPES[:3]),
]
LARGE = (2048,)
TWO = [TwoLaunches(16, 2, 64, 4, 3)]
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
            if isinstance(one, OneLaunch):  # 1 and multiples of 16 are kernels of their own
                for tokens in (t for t in SMALL if t <= 8 * one.rows):
                    timed([lambda w=w, g=one: launch.run(w, cases.NUMBERS, g) for w in works(tokens, 2)])
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


def works(tokens: int, sets: int = 0) -> list[Any]:
    """Inputs of calls in turn: 48 weights (94 MB), rows as often as memory makes sensible."""
    sets = sets or (48 if tokens <= 256 else 8)
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


def main(out: Path, limit: float, only_compare: bool) -> None:
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

    def outputs(inputs: list[Any]) -> list[Any]:
        return [(w.post_out.clone(), w.comb_out.clone(), w.input_out.clone()) for w in inputs]

    def measure(geometries: list[Geometry], counts: tuple[int, ...]) -> None:
        for tokens in counts:
            inputs = works(tokens)
            plain: dict[str, list[Any]] = {}
            for one in geometries:
                row = rows.get(named(one), {})
                if left() < 3 or "error" in row or "name" not in row:
                    continue
                if isinstance(one, OneLaunch) and tokens > 8 * one.rows:
                    continue
                try:
                    t0 = time.monotonic()
                    launch.run(inputs[0], cases.NUMBERS, one)
                    torch.cuda.synchronize()
                    print(named(one), tokens, f"first {time.monotonic() - t0:.2f}", flush=True)
                    us = timed([lambda w=w, g=one: launch.run(w, cases.NUMBERS, g) for w in inputs])
                    row.setdefault("us", {})[str(tokens)] = round(us, 2)
                    if isinstance(one, OneLaunch):
                        # Started early or not, one after the other: the same bits.
                        found = outputs(inputs)
                        right = plain.setdefault(named(replace(one, early=0)), found)
                        pairs = (
                            p
                            for a, b in zip(found, right, strict=True)
                            for p in zip(a, b, strict=True)
                        )
                        if not all(torch.equal(a, b) for a, b in pairs):
                            row["error"] = f"{tokens} rows: early, other results"
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
            save()

    if (out / "mhc_sweep.json").exists():
        rows |= json.loads((out / "mhc_sweep.json").read_text())
    else:
        compare([*ONE, *TWO])
    if only_compare:
        return
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
    for tokens in (*sorted(SMALL), *LARGE):
        best = sorted(
            (row["us"][str(tokens)], name)
            for name, row in rows.items()
            if str(tokens) in row.get("us", {})
        )
        print(tokens, " ".join(f"{name}={us}" for us, name in best[:6]), "… worst", best[-1:])
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(sys.argv[2:])
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]), "--compare" in sys.argv)
