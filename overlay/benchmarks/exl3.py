#!/usr/bin/env python3
"""EXL3's kernels at V4.1's shapes on one of two ranks, on the GPU at hand:

    python overlay/benchmarks/exl3.py [--peer WHEEL] [--json PATH] [--chart PNG] [--quick] [NAME…]
    python overlay/benchmarks/exl3.py --prefill   many rows: exl3_prefill.py says what
    python overlay/benchmarks/exl3.py --model     a GB10's step by arithmetic; needs no GPU

us       median of RUNS replays of a CUDA graph that holds calls over many sets of weights, one
         after the other, by the number of calls: device time with a graph's gaps. Sets are so many
         that the L2 cache holds none of them (SETS_BYTES); experts are drawn anew for each call
         from a whole layer of 384.
GB/s     packed weights by us; ``floor`` is their bytes at the copy ceiling, ``share`` floor by us.
copy     bytes read and written a second by a copy of 2 GiB: the ceiling, in the same run.
off      relative RMS error of one call's fp32 output against float64, but for head and layer;
         ``ok`` is that it is small.
peer     exllamav3 1.6.5 in the same run, on the same tensors, measured alike: ``peer_us`` of its
         fastest fp16 way for that shape (``peer_way``: gemm, a call a matrix; mgemm, one call for
         all), ``peer_int8_us`` with int8 activations where it has them, ``peer_off`` as off (of its
         fp16 outputs); ``ratio`` peer_us by us. Its wheel: --peer or EXLLAMAV3 (exl3_peer.py builds
         it). Without it nothing is compared, and every row says that the peer is not here.

layer, 4 rows   all linears of a layer as one graph, and with its experts (shared one merged; of the
                peer by a call of its own). The peer's: its fastest way of each group, one graph.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for place in (ROOT / "overlay", ROOT / "tests"):
    sys.path.insert(1, str(place))

import exl3_peer  # noqa: E402
import exl3_peer_many  # noqa: E402
import exl3_prefill  # noqa: E402
import exl3_shapes as shapes  # noqa: E402
import timing  # noqa: E402

Values = dict[str, Any]
Call = Callable[[], Any]
RUNS = 7
SETS_BYTES = 256 << 20  # of weights between two uses of the same: four times an H200's L2
ROWS, TOKENS = (1, 2, 4, 8, 16, 64), (1, 2, 4, 8, 16, 21)
PEER = "EXLLAMAV3"  # its wheel, where --peer does not say it


class Bench:
    """``peer`` is None where none was named; ``ways``: its fastest one of a row's name."""

    def __init__(self, quick: bool, peer: Path | None, cache: Path) -> None:
        import torch

        self.torch, self.quick = torch, quick
        self.peer = exl3_peer.Peer(peer, cache) if peer else None
        self.ways: dict[str, str] = {}
        self.copy = timing.copy_ceiling(RUNS)

    def timed(self, calls: Sequence[Call]) -> list[float]:
        """Microseconds a call, of each of RUNS replays."""
        return timing.graph_us(calls, 3 if self.quick else RUNS)

    def values(self, us: Sequence[float], nbytes: float, off: float) -> Values:
        median = statistics.median(us)
        floor = nbytes / self.copy * 1e6
        found = {
            "us": round(median, 2),
            "us_least": round(min(us), 2),
            "us_most": round(max(us), 2),
            "megabytes": round(nbytes / 1e6, 2),
            "gigabytes_per_second": round(nbytes / median / 1e3, 1),
            "floor_us": round(floor, 2),
            "share_of_floor": round(floor / median, 3),
        }
        if not math.isnan(off):
            found["off"] = float(f"{off:.3g}")
        return found if self.peer else found | {"peer": "not here"}

    def beside(self, name: str, ours: Values, ways: dict[str, list[Call]], int8: bool) -> Values:
        """``ours`` with the peer's figures: the fastest of its ``ways``, and the first of them once
        more with int8 activations, where it has that for the shape."""
        us = {way: statistics.median(self.timed(calls)) for way, calls in ways.items()}
        best = self.ways[name] = min(us, key=us.__getitem__)
        found = {"peer_us": round(us[best], 2), "peer_way": best}
        if int8 and self.peer:
            self.peer.int8(2)
            found["peer_int8_us"] = round(statistics.median(self.timed(ways["gemm"])), 2)
            self.peer.int8(0)
        return ours | found | {"ratio": round(us[best] / ours["us"], 3)}


def dense_rows(bench: Bench) -> Iterator[tuple[str, bool, Values]]:
    from gpu import exl3_cases as cases

    torch = bench.torch
    groups = {**shapes.GROUPS, "head": (shapes.HEAD,)}
    for name, sizes in groups.items():
        nbytes = shapes.group_bytes(sizes)
        sets = made_sets(sizes, nbytes)
        for rows in ROWS:
            xs = inputs(name, sizes, rows)
            calls = [lambda s=s, xs=xs: cases.group(xs, s, torch.bfloat16) for s in sets]
            off = math.nan
            if name != "head":
                right = cases.group_right(xs, sets[0])
                off = cases.off(cases.group(xs, sets[0]), right)
            row = f"{name}, {rows} rows"
            values = bench.values(bench.timed(calls), nbytes, off)
            if bench.peer:
                ways = dense_ways(bench.peer, xs, sets)
                int8 = rows <= 2 and all(n_out % 256 == 0 and k2 <= 12 for _, n_out, k2 in sizes)
                outs = bench.peer.separate(xs, sets[0])
                values = bench.beside(row, values, ways, int8)
                if not math.isnan(off):
                    outs[0]()
                    found = torch.cat(outs[1], -1)
                    values["peer_off"] = float(f"{cases.off(found, right):.3g}")
            yield row, not off >= cases.DENSE, values


def dense_ways(peer: exl3_peer.Peer, xs: list[Any], sets: list[list[Any]]) -> dict[str, list[Call]]:
    """Of each set of matrices a call, by the peer's ways."""
    return {
        "gemm": [peer.separate(xs, one)[0] for one in sets],
        "mgemm": [peer.together(xs, one)[0] for one in sets],
    }


def made_sets(sizes: Sequence[shapes.Size], nbytes: int) -> list[list[Any]]:
    from gpu import exl3_cases as cases

    count = max(2, math.ceil(SETS_BYTES / nbytes))
    return [
        [cases.matrix(*size, 100 * n + i, "cuda") for i, size in enumerate(sizes)]
        for n in range(count)
    ]


def inputs(name: str, sizes: Sequence[shapes.Size], rows: int) -> list[Any]:
    from gpu import exl3_cases as cases

    if name in shapes.OWN_INPUTS:
        whole = cases.rows(rows, len(sizes) * sizes[0][0], "cuda")
        return list(whole.view(rows, len(sizes), -1).unbind(1))
    return [cases.rows(rows, sizes[0][0], "cuda")]


def expert_rows(bench: Bench) -> Iterator[tuple[str, bool, Values]]:
    from gpu import exl3_cases as cases

    torch = bench.torch
    for k2 in (6, 4):
        layer = cases.Layer(shapes.HIDDEN, shapes.INTER, shapes.EXPERTS, [k2], "cuda")
        for tokens in TOKENS:
            x = cases.rows(tokens, shapes.HIDDEN, "cuda")
            count = max(4, 96 // tokens)
            routes = [
                cases.routing(tokens, shapes.TOPK, shapes.EXPERTS, "cuda", seed)
                for seed in range(count)
            ]
            calls = [
                lambda i=ids, w=weights, x=x, layer=layer: layer.run(x, i, w, dtype=torch.bfloat16)
                for ids, weights in routes
            ]
            unique = statistics.mean(ids.unique().numel() for ids, _ in routes)
            off = cases.off(layer.run(x, *routes[0]), layer.right(x, *routes[0]))
            row = f"experts K={k2 // 2}, {tokens} tokens"
            nbytes = unique * shapes.expert_bytes(k2)
            values = bench.values(bench.timed(calls), nbytes, off)
            if bench.peer:
                made = [
                    bench.peer.experts(layer.table, k2, shapes.INTER, x, *route) for route in routes
                ]
                values = bench.beside(row, values, {"moe_coop": [one for one, _ in made]}, False)
                made[0][0]()
                right = layer.right(x, *routes[0])
                values["peer_off"] = float(f"{cases.off(made[0][1], right):.3g}")
            yield row, off < cases.EXPERTS, values | {"experts": round(unique, 1)}


def layer_rows(bench: Bench) -> Iterator[tuple[str, bool, Values]]:
    """All of a layer's packed linears at 4 rows, without and with its experts."""
    from gpu import exl3_cases as cases

    torch, rows = bench.torch, 4
    sets = {
        name: made_sets(sizes, shapes.group_bytes(sizes))[:8]
        for name, sizes in shapes.GROUPS.items()
    }
    xs = {name: inputs(name, sizes, rows) for name, sizes in shapes.GROUPS.items()}
    layer = cases.Layer(
        shapes.HIDDEN, shapes.INTER, shapes.EXPERTS + 1, [6], "cuda", shared=True, seed=7
    )
    x = cases.rows(rows, shapes.HIDDEN, "cuda")
    routes = [cases.routing(rows, shapes.TOPK, shapes.EXPERTS, "cuda", seed) for seed in range(8)]

    def linears(n: int, skip: frozenset[str] = frozenset()) -> None:
        for name, every in sets.items():
            if name not in skip:
                cases.group(xs[name], every[n % len(every)], torch.bfloat16)

    def whole(n: int) -> None:
        linears(n, merged)
        layer.run(x, *routes[n], dtype=torch.bfloat16)

    merged = frozenset({"shared gate + up", "shared down"})
    theirs: dict[str, list[Call]] = {}
    if bench.peer:
        for name, every in sets.items():
            ways = dense_ways(bench.peer, xs[name], every)
            fastest = bench.ways.get(f"{name}, {rows} rows")
            if fastest is None:
                us = {way: statistics.median(bench.timed(calls)) for way, calls in ways.items()}
                fastest = min(us, key=us.__getitem__)
            theirs[name] = ways[fastest]

    def peer_linears(n: int, skip: frozenset[str] = frozenset()) -> None:
        for name, calls in theirs.items():
            if name not in skip:
                calls[n % len(calls)]()

    nbytes = sum(map(shapes.group_bytes, shapes.GROUPS.values()))
    name = "layer, 4 rows: linears"
    values = bench.values(bench.timed([lambda n=n: linears(n) for n in range(8)]), nbytes, math.nan)
    if bench.peer:
        ways = {"each its fastest": [lambda n=n: peer_linears(n) for n in range(8)]}
        values = bench.beside(name, values, ways, False)
    yield name, True, values

    unique = statistics.mean(ids.unique().numel() for ids, _ in routes)
    nbytes += unique * shapes.expert_bytes(6)
    name = "layer, 4 rows: with experts"
    values = bench.values(bench.timed([lambda n=n: whole(n) for n in range(8)]), nbytes, math.nan)
    if bench.peer:
        experts = [
            bench.peer.experts(layer.table, 6, shapes.INTER, x, *route, shared=True)[0]
            for route in routes
        ]

        def peer_whole(n: int) -> None:
            peer_linears(n, merged)
            experts[n]()

        ways = {"each its fastest": [lambda n=n: peer_whole(n) for n in range(8)]}
        values = bench.beside(name, values, ways, False)
    yield name, True, values


PARTS = {"dense": dense_rows, "experts": expert_rows, "layer": layer_rows}


def bars(rows: Sequence[Values]) -> Values:
    """Geometric means of the ratios that the project's bars name; those that were measured."""

    def mean(*names: str) -> float | None:
        ratios = [
            r["values"]["ratio"] for r in rows if r["name"] in names and "ratio" in r["values"]
        ]
        return round(statistics.geometric_mean(ratios), 3) if ratios else None

    small = [f"{name}, {n} rows" for name in (*shapes.GROUPS, "head") for n in (1, 2, 4, 8, 16)]
    return {
        "experts at 1 to 8 tokens (bar 1.8)": mean(
            *(f"experts K={k}, {n} tokens" for k in (2, 3) for n in (1, 2, 4, 8))
        ),
        "dense at 1 to 16 rows (bar 2)": mean(*small),
        "linears of a layer at 4 rows (bar 2.5)": mean("layer, 4 rows: linears"),
        "a layer with experts at 4 rows (bar 2)": mean("layer, 4 rows: with experts"),
    }


def draw(rows: Sequence[Values], copy: float, device: str, out: Path) -> None:
    import charts

    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        values = row["values"]
        if "megabytes" not in values:
            continue
        kind = row["name"].split(",")[0] if row["name"].startswith("experts") else "dense"
        kind = "layer" if row["name"].startswith("layer") else kind
        point = (values["megabytes"], values["gigabytes_per_second"])
        series.setdefault(kind, []).append(point)
        if "peer_us" in values:
            speed = values["megabytes"] * 1e3 / values["peer_us"]
            series.setdefault(f"{kind}, exllamav3 1.6.5", []).append((point[0], speed))
    charts.roofline(series, {"copy": copy / 1e9}, f"EXL3 on {device}", out)


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--chart", type=Path, help="where the chart goes (PNG)")
    options.add_argument("--quick", action="store_true", help="three replays each")
    options.add_argument("--model", action="store_true", help="a GB10's step, by arithmetic")
    options.add_argument("--prefill", action="store_true", help="many rows: exl3_prefill.py")
    options.add_argument("--peer", type=Path, help="exllamav3's wheel (default: EXLLAMAV3)")
    options.add_argument("--peer-cache", type=Path, help="where its library is kept")
    options.add_argument("--commit", help="where git cannot say it")
    given = options.parse_args()
    if given.model:
        print(shapes.model_text())
        return 0
    unknown = sorted(set(given.parts) - set(PARTS))
    if unknown:
        options.error(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    from gpu import run as gpu_run

    from spark_overlay.exl3.cuda import ops

    began = time.perf_counter()
    wheel = given.peer or (Path(os.environ[PEER]) if os.environ.get(PEER) else None)
    bench = Bench(
        given.quick, None if given.prefill else wheel, given.peer_cache or exl3_peer.CACHE
    )
    result = gpu_run.host(given.commit or gpu_run.commit_here(), "cuda")

    def add(name: str, ok: bool, seconds: float, values: Values) -> None:
        result.add({"name": name, "ok": ok, "seconds": round(seconds, 2), "values": values})
        result.seconds = round(time.perf_counter() - began, 1)
        print(f"{name:32} {'' if ok else 'WRONG '}{json.dumps(values)}", flush=True)
        if given.json:
            result.write(given.json)

    table = ops.table_of(bench.torch.device("cuda", 0))
    add("copy", True, 0.0, {
        "bytes_per_second": round(bench.copy), "table": table.name, "origin": table.origin,
    })  # fmt: skip
    parts = [(PARTS[part], (bench,)) for part in given.parts or PARTS]
    if given.prefill:
        many = exl3_peer_many.library(wheel)
        peer = exl3_peer_many.PeerMany(many) if many else None
        parts = [(exl3_prefill.rows_of, (bench, peer))]
    for part, asked in parts:
        last = time.perf_counter()
        for name, ok, values in part(*asked):
            add(name, ok, time.perf_counter() - last, values)
            last = time.perf_counter()
    if given.prefill:
        add("bars", True, 0.0, exl3_prefill.bars(result.rows))
        return int(not all(row["ok"] for row in result.rows))
    steps = {tokens: shapes.step_seconds(tokens) for tokens in (1, 2, 4, 8)}
    add("a GB10's step, modelled, ms", True, 0.0, {
        f"{tokens} tokens": {part: round(1e3 * seconds, 1) for part, seconds in parts.items()}
        for tokens, parts in steps.items()
    })  # fmt: skip
    add("bars", True, 0.0, bars(result.rows))
    print(shapes.model_text())
    if given.chart:
        draw(result.rows, bench.copy, result.device, given.chart)
    return int(not all(row["ok"] for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
