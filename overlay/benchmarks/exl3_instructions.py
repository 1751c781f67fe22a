#!/usr/bin/env python3
"""Instructions that EXL3's decode kernels execute a weight, as Nsight Compute counts them:

    python overlay/benchmarks/exl3_instructions.py [--json PATH]

Instructions of all lanes (warp instructions times 32) by the weights that the call decodes: each
of an expert's once for 8 of its rows. Rotations, sums and everything else of both launches are in
them. Needs a GPU whose counters may be read, and ``ncu``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for place in (ROOT / "overlay", ROOT / "tests", HERE):
    sys.path.insert(1, str(place))

import exl3_shapes as shapes  # noqa: E402

METRIC = "smsp__inst_executed.sum"
KERNELS = "regex:experts_[ab]_kernel|dense_kernel"
#: No more than this many instructions a weight of the experts.
MOST = 6.0
EXPERTS = 96  # of the layer: what a call reads is the same, whatever it chooses from
TOKENS, ROWS, RATES = (1, 2, 4, 8), (1, 4, 8), (6, 4)


def calls() -> list[dict[str, Any]]:
    """Every call: its name, the weights it decodes and how many launches it is. Runs them where
    ``torch`` has a GPU; the same order each time."""
    from gpu import exl3_cases as cases

    found: list[dict[str, Any]] = []
    for k2 in RATES:
        layer = cases.Layer(shapes.HIDDEN, shapes.INTER, EXPERTS, [k2], "cuda")
        for tokens in TOKENS:
            ids, weights = cases.routing(tokens, shapes.TOPK, EXPERTS, "cuda", tokens)
            layer.run(cases.rows(tokens, shapes.HIDDEN, "cuda"), ids, weights)
            decoded = sum(math.ceil(int(n) / 8) for n in ids.unique(return_counts=True)[1])
            count = decoded * 3 * shapes.HIDDEN * shapes.INTER
            name = f"experts K={k2 // 2}, {tokens} tokens"
            found.append({"name": name, "weights": count, "launches": 2})
    for name, sizes in shapes.GROUPS.items():
        matrices = [cases.matrix(*size, i, "cuda") for i, size in enumerate(sizes)]
        own = name in shapes.OWN_INPUTS
        for rows in ROWS:
            xs = [cases.rows(rows, size[0], "cuda") for size in (sizes if own else sizes[:1])]
            cases.group(xs, matrices)
            count = sum(n_in * n_out for n_in, n_out, _ in sizes)
            found.append({"name": f"{name}, {rows} rows", "weights": count, "launches": 1})
    return found


def counted(text: str) -> list[int]:
    """Warp instructions of each launch, from ncu's CSV."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [int(row["Metric Value"].replace(",", "")) for row in csv.DictReader(lines)]


def per_weight(made: Sequence[dict[str, Any]], launches: Sequence[int]) -> list[dict[str, Any]]:
    """``made`` with instructions a weight. Raises ValueError where ncu saw other launches."""
    expected = sum(one["launches"] for one in made)
    if len(launches) != expected:
        raise ValueError(f"ncu counted {len(launches)} launches, expected {expected}")
    left = iter(launches)
    return [
        one | {"each": 32 * sum(next(left) for _ in range(one["launches"])) / one["weights"]}
        for one in made
    ]


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--commit", help="where git cannot say it")
    options.add_argument("--calls", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.calls:
        given.calls.write_text(json.dumps(calls()))
        return 0
    from gpu import run as gpu_run

    began = time.perf_counter()
    listed = Path(given.json or "exl3_instructions.json").with_suffix(".calls")
    inner = [sys.executable, str(Path(__file__).resolve()), "--calls", str(listed)]
    profiler = ["ncu", "--csv", "--metrics", METRIC, "--kernel-name", KERNELS]
    ran = subprocess.run([*profiler, *inner], capture_output=True, text=True, check=False)
    if ran.returncode or '"ID"' not in ran.stdout:
        said = (ran.stdout + ran.stderr)[-600:]
        sys.exit(f"ncu counted nothing (status {ran.returncode}): {said}")
    made = json.loads(listed.read_text())
    listed.unlink()
    result = gpu_run.host(given.commit or gpu_run.commit_here(), "cuda")
    wrong = 0
    for one in per_weight(made, counted(ran.stdout)):
        right = one["each"] <= MOST or not one["name"].startswith("experts")
        wrong += not right
        values = {"instructions_per_weight": round(one["each"], 3), "weights": one["weights"]}
        result.add({"name": one["name"], "ok": right, "seconds": 0.0, "values": values})
        print(f"{one['name']:32} {one['each']:.2f}{'' if right else f'  more than {MOST:g}'}")
    result.seconds = round(time.perf_counter() - began, 1)
    if given.json:
        result.write(given.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
