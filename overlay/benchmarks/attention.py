#!/usr/bin/env python3
"""Sparse attention's kernels at V4.1's shapes on one of two ranks (32 heads), on the GPU at hand:

    python overlay/benchmarks/attention.py [--json PATH] [--chart PNG] [--quick] [PART…]

us       median of replays of a CUDA graph that holds calls over several sets of caches and indices
         (decode and gather: more of them than the L2 cache holds), by the number of calls.
floor    bytes that must be moved at the copy ceiling of the same run, or multiplications at 780
         TFLOP/s (a figure of the H200; left out elsewhere), the larger; ``share`` floor by us.
off      largest error against float64; ``bar`` twice what rounding the exact result to bf16 makes.
peers    vLLM 0.33.0's own kernels in the same run where it is installed, each kind in a process of
         its own that may take --limit seconds: ``flashmla`` (SM90; its prefill with 32 heads,
         ``flashmla64`` padded to 64), ``triton``; gather ``bounded`` by max_gather_len or
         ``unbounded``; combine fill and kernel. ``ratio`` theirs by ours.
earlier  the same on an H200 in an earlier run (attention_earlier.json); ``seed``: what DeepInfer-
         SM80 says of itself, and against what.

--launches measures other launches than the table's instead (attention_launches.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for place in (ROOT / "overlay", ROOT / "tests", HERE):
    sys.path.insert(1, str(place))

import attention_beside as beside  # noqa: E402
import attention_launches as launches  # noqa: E402
import attention_rows as rows  # noqa: E402
import timing  # noqa: E402

Values = dict[str, Any]
EARLIER = json.loads((HERE / "attention_earlier.json").read_text())
NAMES = {kind: peers for kind, (peers, _) in beside.KINDS.items()}


class Bench:
    """Ceilings of this run, and what a case's time says by them."""

    def __init__(self, quick: bool) -> None:
        import torch

        self.quick = quick
        self.copy = timing.copy_ceiling()
        name = torch.cuda.get_device_name()
        self.flops = 780e12 if name == "NVIDIA H200" else None
        self.earlier: Values = EARLIER["us"] if name == EARLIER["device"] else {}

    def ours(self, case: rows.Case) -> tuple[bool, Values]:
        calls, ok, looked = case.ours()
        us = rows.median_us(calls, self.quick)
        floor = case.nbytes / self.copy * 1e6
        if self.flops:
            floor = max(floor, case.flops / self.flops * 1e6)
        found: Values = {
            "us": round(us, 2),
            "megabytes": round(case.nbytes / 1e6, 3),
            "gigabytes_per_second": round(case.nbytes / us / 1e3, 1),
            "floor_us": round(floor, 2),
            "share_of_floor": round(floor / us, 3),
        }
        if case.flops:
            found["teraflops"] = round(case.flops / us / 1e6, 1)
        for peer, before in self.earlier.get(case.name, {}).items():
            found[f"earlier_{peer}"] = {"us": before, "ratio": round(before / us, 3)}
        if case.name in EARLIER["seed"]:
            found["seed"] = EARLIER["seed"][case.name]
        return ok, found | looked


def bars(found_rows: Sequence[Values]) -> Values:
    """What the project asked of each, by this run's peers where there are any, else by earlier."""
    by_name = {row["name"]: row["values"] for row in found_rows}
    found: Values = {}

    def ratio(name: str, peer: str) -> float | None:
        values = by_name.get(name, {})
        for key in (peer, f"earlier_{peer}"):
            if "ratio" in values.get(key, {}):
                return float(values[key]["ratio"])
        return None

    for tokens, bar in ((1, 1.0), (2, 1.0), (4, 1.0), (24, 1 / 1.3)):
        found[f"decode {tokens}: FlashMLA's time by ours (bar {bar:.2f})"] = ratio(
            f"decode, {tokens} tokens", "flashmla"
        )
    found["prefill 2048: us (bar 500)"] = by_name.get("prefill, 2048 tokens", {}).get("us")
    for rows_there in (16384, 49152):
        name = f"gather, {rows_there} rows"
        found[f"{name}: bounded's time by ours (bar 2.5)"] = ratio(name, "bounded")
        found[f"{name}: share of copy (bar 0.6)"] = by_name.get(name, {}).get("share_of_floor")
    for tokens in (1536, 8192):
        name = f"combine ratio 1, {tokens} tokens"
        found[f"{name}: vLLM's time by ours (bar 1.5)"] = ratio(name, "triton")
    return found


def draw(found_rows: Sequence[Values], copy: float, device: str, out: Path) -> None:
    import charts

    series: dict[str, list[tuple[float, float]]] = {}
    for row in found_rows:
        values = row["values"]
        if "megabytes" not in values:
            continue
        kind, size = row["name"].split(",")[0], values["megabytes"]
        series.setdefault(kind, []).append((size, values["gigabytes_per_second"]))
        for peer in ("flashmla", "flashmla64", "triton", "bounded"):
            if "us" in values.get(peer, {}):
                speed = size * 1e3 / values[peer]["us"]
                series.setdefault(f"{kind}, vLLM's {peer}", []).append((size, speed))
    charts.roofline(
        series,
        {"copy": copy / 1e9},
        f"Sparse attention on {device}",
        out,
        xlabel="bytes a call must move, MB",
        ylabel="those bytes by time, GB/s",
    )


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("parts", nargs="*", help=f"of {', '.join(rows.PARTS)} (default: all)")
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--chart", type=Path, help="where the chart goes (PNG)")
    options.add_argument("--quick", action="store_true", help="three replays each")
    options.add_argument("--limit", type=float, default=60, help="seconds of a kind of peer")
    options.add_argument("--launches", action="store_true", help="other launches than the table's")
    options.add_argument("--commit", help="where git cannot say it")
    given = options.parse_args()
    unknown = sorted(set(given.parts) - set(rows.PARTS))
    if unknown:
        options.error(f"no part is named {', '.join(unknown)}; there are {', '.join(rows.PARTS)}")
    from gpu import run as gpu_run

    began = last = time.perf_counter()
    parts = given.parts or list(rows.PARTS)
    peers = None if given.launches else beside.Peers(parts, given.quick, given.limit)
    bench = Bench(given.quick)
    result = gpu_run.host(given.commit or gpu_run.commit_here(), "cuda")

    def add(name: str, ok: bool, values: Values) -> None:
        nonlocal last
        now = time.perf_counter()
        result.add({"name": name, "ok": ok, "seconds": round(now - last, 2), "values": values})
        result.seconds, last = round(now - began, 1), now
        print(f"{name:28} {'' if ok else 'WRONG '}{json.dumps(values)}", flush=True)
        if given.json:
            result.write(given.json)

    add("copy", True, {"bytes_per_second": round(bench.copy)})
    if peers is None:
        for name, ok, values in launches.measured(parts, given.quick):
            add(name, ok, values)
    else:
        for part in parts:
            for case in rows.PARTS[part]():
                add(case.name, *bench.ours(case))
                if part == "decode":
                    values = result.rows[-1]["values"]
                    tokens = int(case.name.split()[1])
                    values["us_turned_back"] = round(rows.turned_us(tokens, given.quick), 2)
        own = {row["name"]: row for row in result.rows}
        if peers.absent:
            add("peers", True, {"absent": peers.absent})
        for name, peer, theirs in peers.found():
            row = own.get(name)
            if row is None:  # what became of a kind's process
                add(f"peers, {name}", True, theirs)
                continue
            if "us" in theirs:
                theirs["ratio"] = round(theirs["us"] / row["values"]["us"], 3)
            print(f"{name}, {peer}: {json.dumps(theirs)}", flush=True)
            row["values"][peer] = theirs
            if given.json:
                result.write(given.json)
    add("bars", True, bars(result.rows))
    if given.chart:
        draw(result.rows, bench.copy, result.device, given.chart)
    return int(not all(row["ok"] for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
