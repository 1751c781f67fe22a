#!/usr/bin/env python3
"""The indexer's kernels at V4.1's shapes, on the GPU at hand:

    python overlay/benchmarks/indexer.py [--json PATH] [--seconds S] [NAME…]

One row: one layer's indexer for one step: scores, candidate blocks, choice. ``plain`` is a layer
without candidates, ``write`` layer 20, ``limited`` one of 24 to 36.

by       CUDA, where the library chooses, else Triton; ``triton``: by Triton all the same.
us       median of RUNS replays of a CUDA graph that holds calls over several sets of keys, one
         after the other, by the number of calls (SETS_BYTES of keys before one is read again).
floor    the larger of: the bytes of the keys it must read (each request's once; limited: each
         row's blocks) at the copy ceiling, the products at PEAK.
scores   the launch that scores alone, and its share of the floor.
stock    vLLM's DeepGEMM kernels, top-k and candidates on the same inputs in the same run; where
         vLLM is not installed there is none. ``ratio`` its us by ours.
agree    share of a row's choice that stock chose, too (it sums otherwise: near ties).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for place in (ROOT / "overlay", ROOT / "tests"):
    sys.path.insert(1, str(place))

import indexer_inputs as made  # noqa: E402
import timing  # noqa: E402
from indexer_inputs import Inputs, Shape  # noqa: E402

Values = dict[str, Any]
#: FLOP/s of 16-bit tensor cores, dense.
PEAK = {"H200": 780e12, "H100": 780e12, "A100": 312e12, "GB10": 125e12}
KINDS = ("plain", "write", "limited")
K = 1024
DECODE = [
    *(Shape(f"1 x 1, {n}K", 1, 1, n * K) for n in (16, 128, 600)),
    *(Shape(f"1 x 4, {n}K", 1, 4, n * K) for n in (16, 128, 600)),
    Shape("4 x 4, 32K", 4, 4, 32 * K),
    Shape("8 x 1, 32K", 8, 1, 32 * K),
    Shape("1 x 6, 128K", 1, 6, 128 * K),
    Shape("1 x 1, 4K", 1, 1, 4 * K),
    Shape("1 x 4, 32K", 1, 4, 32 * K),
    Shape("4 x 4, 128K", 4, 4, 128 * K),
]
PREFILL = [
    Shape("prefill 2048, 16K", 1, 2048, 16 * K),
    Shape("prefill 2048, 64K", 1, 2048, 64 * K),
]


class Bench:
    def __init__(self) -> None:
        import torch

        from spark_overlay.indexer.kernels.launch import Selection, with_tuning

        self.copy = timing.copy_ceiling()
        device = torch.cuda.get_device_name()
        self.peak = next((peak for name, peak in PEAK.items() if name in device), None)
        self.stock = importlib.util.find_spec("vllm") is not None
        self.workspace = torch.empty(256 << 18, dtype=torch.int32, device="cuda")
        self.layer = Selection(1, made.COUNT, self.workspace)
        self.by_triton = with_tuning(self.layer, library=False)

    def ours(self, one: Inputs, kind: str, layer: Any = None) -> Callable[[], Any]:
        from spark_overlay.indexer.kernels.launch import Candidates

        candidates = None
        if kind != "plain":
            candidates = Candidates(one.chosen, made.SIZE, kind == "write")
        layer = layer or self.layer
        return lambda: layer(one.q, one.weights, one.cache, one.step, one.final, candidates)

    def scores(self, one: Inputs, kind: str) -> Callable[[], Any]:
        """The scoring launch alone."""
        import torch

        from spark_overlay.indexer.kernels import launch, launch_cuda, sizes

        rows, width, fan = one.final.shape[0], one.step.bound, self.layer.tuning.fan
        limited = kind == "limited" and width > made.BLOCKS * made.SIZE
        scored = made.BLOCKS * made.SIZE if limited else width
        used = sizes.plan(scored, fan)
        rows = min(rows, self.workspace.numel() // used.numbers)
        by = self.by_library(one)
        scored = by and launch_cuda.scores_too(one.step, limited, width, self.layer.tuning)
        held = launch.Rows(one.step, 0, rows, width, *self.layer._parts(used, rows), by, scored)
        given = (one.q.view(torch.uint8), one.weights, one.cache, held)
        if limited:
            candidates = launch.Candidates(one.chosen, made.SIZE, False)
            return lambda: self.layer._candidate_scores(*given, candidates, fan)
        return lambda: self.layer._scores(*given, fan)

    def by_library(self, one: Inputs) -> bool:
        from spark_overlay.indexer.kernels import launch_cuda

        fan = self.layer.tuning.fan
        step = one.step
        return launch_cuda.serves(one.q, one.cache, step, step.bound, made.COUNT, fan, None)

    def floor(self, shape: Shape, kind: str) -> tuple[float, str]:
        """us, and what decides it."""
        limited = kind == "limited" and shape.context > made.BLOCKS * made.SIZE
        nbytes = shape.limited_bytes() if limited else shape.key_bytes
        flops = shape.flops
        if limited:
            flops *= made.BLOCKS * made.SIZE / shape.context
            nbytes = min(nbytes, shape.key_bytes)
        found = [(nbytes / self.copy * 1e6, "bytes")]
        if self.peak:
            found.append((flops / self.peak * 1e6, "products"))
        return max(found)

    def row(self, shape: Shape, kind: str, sets: list[Inputs]) -> tuple[bool, Values]:
        import torch

        decode = shape in DECODE
        us = timing.graph_us([self.ours(one, kind) for one in sets])
        floor, of = self.floor(shape, kind)
        values: Values = {
            "us": round(statistics.median(us), 2),
            "by": "CUDA" if self.by_library(one=sets[0]) else "Triton",
            "us_least": round(min(us), 2),
            "us_most": round(max(us), 2),
            "floor_us": round(floor, 2),
            "floor_of": of,
        }
        if kind != "write" and (shape.total * shape.context <= self.workspace.numel() // 2):
            alone = statistics.median(timing.graph_us([self.scores(one, kind) for one in sets]))
            values |= {
                "scores_us": round(alone, 2),
                "scores_share_of_floor": round(floor / alone, 3),
            }
        if kind == "plain" and self.by_library(sets[0]):
            other = timing.graph_us([self.ours(one, kind, self.by_triton) for one in sets])
            values["triton_us"] = round(statistics.median(other), 2)
        sets[0].final.fill_(99)
        self.ours(sets[0], kind)()
        mine = sets[0].final.clone()
        ok = bool((mine >= 0).all() and (mine[:, 1:] > mine[:, :-1]).all())
        if self.stock:
            import indexer_stock

            call = indexer_stock.decode if decode else indexer_stock.prefill
            calls = [call(shape, one, kind) for one in sets]
            stock = statistics.median(timing.graph_us(calls))
            values["stock_us"] = round(stock, 2)
            values["ratio"] = round(stock / values["us"], 3)
            if kind != "write":
                calls[0]()
                torch.cuda.synchronize()
                rows = range(min(16, shape.total))
                same = [torch.isin(sets[0].final[r], mine[r]).float().mean().item() for r in rows]
                values["agree"] = round(statistics.mean(same), 4)
                ok &= values["agree"] > 0.95
            else:  # stock's blocks are in no order: leave ours to the next kind
                for one in sets:
                    self.ours(one, kind)()
        return ok, values


def compile_all(bench: Bench, names: list[str]) -> None:
    """Every call once, so that a run that is timed after this one compiles nothing."""
    import torch

    for shape in [*DECODE, *PREFILL]:
        if not names or any(name in shape.name for name in names):
            (one,) = made.sets_of(shape, 1)
            for kind in KINDS:
                for layer in (bench.layer, bench.by_triton):
                    bench.ours(one, kind, layer)()
    torch.cuda.synchronize()


def rows_of(bench: Bench, names: list[str], until: float) -> Iterator[tuple[str, bool, Values]]:
    for shape in [*DECODE[:8], *PREFILL, *DECODE[8:]]:
        if names and not any(name in shape.name for name in names):
            continue
        sets = made.sets_of(shape, 12 if shape in DECODE else 2)
        for kind in KINDS:
            if kind == "limited" and shape.context <= made.BLOCKS * made.SIZE:
                continue
            if time.monotonic() > until:
                print(f"no time left for {shape.name}, {kind}", flush=True)
                return
            try:
                ok, values = bench.row(shape, kind, sets)
            except Exception as error:
                ok, values = False, {"error": f"{type(error).__name__}: {error}"[:300]}
            yield f"{shape.name}, {kind}", ok, values
        del sets


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("names", nargs="*", help="parts of shapes' names (default: all)")
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--seconds", type=float, default=600.0, help="no row begins later")
    options.add_argument("--compile", action="store_true", help="compile alone, time nothing")
    options.add_argument("--commit", help="where git cannot say it")
    given = options.parse_args()
    from gpu import run as gpu_run

    began = last = time.monotonic()
    bench = Bench()
    if given.compile:
        compile_all(bench, given.names)
        return 0
    result = gpu_run.host(given.commit or gpu_run.commit_here(), "cuda")

    def add(name: str, ok: bool, values: Values) -> None:
        nonlocal last
        now = time.monotonic()
        result.add({"name": name, "ok": ok, "seconds": round(now - last, 2), "values": values})
        result.seconds, last = round(now - began, 1), now
        print(f"{name:28} {'' if ok else 'WRONG '}{json.dumps(values)}", flush=True)
        if given.json:
            result.write(given.json)

    add("copy", True, {"bytes_per_second": round(bench.copy)})
    for name, ok, values in rows_of(bench, given.names, began + given.seconds):
        add(name, ok, values)
    return int(not all(row["ok"] for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
