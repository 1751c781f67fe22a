#!/usr/bin/env python3
"""Sparse attention's kernels at V4.1's shapes on one of two ranks (32 heads), on the GPU at hand:

    python overlay/benchmarks/attention.py [--json PATH] [--chart PNG] [--quick] [PART…]

us       median of replays of a CUDA graph that holds calls over several sets of caches and indices
         (decode and gather: more of them than the L2 cache holds), by the number of calls.
floor    bytes that must be moved at the copy ceiling of the same run, or multiplications at 780
         TFLOP/s (a figure of the H200; left out elsewhere), the larger; ``share`` floor by us.
off      largest error against float64; ``bar`` twice what rounding the exact result to bf16 makes.
peers    vLLM 0.33.0's own kernels in the same run where it is installed: ``flashmla`` (SM90; its
         prefill with 32 heads, ``flashmla64`` padded to 64), ``triton``; gather ``bounded`` by
         max_gather_len or ``unbounded``; combine fill and kernel. ``ratio`` theirs by ours.
earlier  the same on an H200 in an earlier run (attention_earlier.json); ``seed``: what DeepInfer-
         SM80 says of itself, and against what.
"""

from __future__ import annotations

import argparse
import json
import math
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

import attention_peers as peers  # noqa: E402

Values = dict[str, Any]
Row = tuple[str, bool, Values]
HEADS, SCALE = 32, 512**-0.5
RECORD, ROW = 584, 1024
EARLIER = json.loads((HERE / "attention_earlier.json").read_text())


class Bench:
    """Ceilings of this run, and how one row is measured."""

    def __init__(self, quick: bool) -> None:
        import torch

        import exl3

        self.torch = torch
        self._bench = exl3.Bench(quick)
        self.copy = self._bench.copy
        name = torch.cuda.get_device_name()
        self.flops = 780e12 if name == "NVIDIA H200" else None
        self.earlier: Values = EARLIER["us"] if name == EARLIER["device"] else {}
        self.sink = torch.randn(HEADS, device="cuda")

    def us(self, calls: Sequence[Callable[[], Any]]) -> float:
        return statistics.median(self._bench.timed(calls))

    def values(
        self, name: str, us: float, nbytes: float, flops: float, others: dict[str, Values]
    ) -> Values:
        floor = nbytes / self.copy * 1e6
        if self.flops:
            floor = max(floor, flops / self.flops * 1e6)
        found: Values = {
            "us": round(us, 2),
            "megabytes": round(nbytes / 1e6, 3),
            "gigabytes_per_second": round(nbytes / us / 1e3, 1),
            "floor_us": round(floor, 2),
            "share_of_floor": round(floor / us, 3),
        }
        if flops:
            found["teraflops"] = round(flops / us / 1e6, 1)
        for peer, theirs in others.items():
            found[peer] = theirs
            if "us" in theirs:
                theirs["ratio"] = round(theirs["us"] / us, 3)
        for peer, before in self.earlier.get(name, {}).items():
            found[f"earlier_{peer}"] = {"us": before, "ratio": round(before / us, 3)}
        if name in EARLIER["seed"]:
            found["seed"] = EARLIER["seed"][name]
        return found

    def peer(self, make: Callable[[], tuple[list[Any], Any]], right: Any = None) -> Values:
        """A peer's time and error, or why there is none."""
        try:
            calls, out = make()
            found: Values = {"us": round(self.us(calls), 2)}
            if right is not None:
                calls[0]()
                found["off"] = off(out[: len(right)], right)
            return found
        except (
            Exception
        ) as error:  # not installed, not for this GPU, other shapes: said, not hidden
            return {"absent": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def off(found: Any, right: Any) -> float:
    worst = (found.double() - right).abs().nan_to_num(math.inf).max().item()
    return float(f"{worst:.3g}")


def attention_row(bench: Bench, kind: str, tokens: int) -> Row:
    from gpu import attention_cases as cases

    from spark_overlay.attention import kernels
    from spark_overlay.attention.kernels import reference

    torch = bench.torch
    few = tokens <= 96
    sets = [cases.real(tokens, 10 * n) for n in range(8 if few else 4)]
    q = cases.queries(tokens, HEADS, 3)
    out = torch.full_like(q, math.nan)
    name = f"{kind}, {tokens} tokens"

    def call(sources: Any, into: Any = out, **more: Any) -> None:
        kernels.sparse_mla(q, sources, bench.sink, SCALE, into, **more)

    head = min(tokens, 64)
    cut = [
        kernels.Source(s.cache, s.slots[:head], None if s.lengths is None else s.lengths[:head])
        for s in sets[0]
    ]
    right = reference.sparse_mla(q[:head], cut, bench.sink, SCALE)
    call(sets[0])
    found, limit = off(out[:head], right), cases.tolerance(right)
    again = torch.full_like(out, math.nan)
    call(sets[0], again)
    same = torch.equal(out.view(torch.int16), again.view(torch.int16))
    us = bench.us([lambda s=s: call(s) for s in sets] * (4 if few else 1))
    others: dict[str, Values] = {}
    if kind == "decode":
        for peer in ("flashmla", "triton") if tokens in (1, 4, 24) else ("flashmla",):
            others[peer] = bench.peer(
                lambda p=peer: peers.decode(p, q, sets, bench.sink, SCALE), right
            )
        nbytes = tokens * (640 * RECORD + 2 * HEADS * ROW)
    else:
        workspace, indices = gathered(torch, sets)
        for peer in ("flashmla", "flashmla64", "triton"):
            others[peer] = bench.peer(
                lambda p=peer: peers.prefill(p, q, workspace, indices, bench.sink, SCALE), right
            )
        caches = sum(s.cache.numel() for s in sets[0])
        nbytes = caches + tokens * 2 * HEADS * ROW
    values = bench.values(name, us, nbytes, 4 * tokens * HEADS * 640 * 512, others)
    values |= {"off": found, "bar": float(f"{limit:.3g}"), "same_bits": same}
    if few:
        table = torch.randn(4096, 64, device="cuda")
        turn = (table, torch.arange(tokens, device="cuda"))
        turned = bench.us([lambda s=s: call(s, unrotate=turn) for s in sets] * 4)
        values["us_turned_back"] = round(turned, 2)
    return name, found <= limit and same, values


def gathered(torch: Any, sets: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The first set's records as one bf16 workspace, and every set's rows of it."""
    from spark_overlay.attention.reference import read_records

    parts, begins, rows = [], [], 0
    for source in sets[0]:
        count = source.cache.shape[0] * source.cache.shape[1]
        begins.append(rows)
        rows += count
        parts.append(read_records(source.cache, torch.arange(count, device="cuda")).bfloat16())
    places = [
        torch.cat([s.slots + begin for s, begin in zip(one, begins, strict=True)], 1).int()
        for one in sets
    ]
    return torch.cat(parts), [p.contiguous() for p in places]


def decode_rows(bench: Bench) -> Iterator[Row]:
    for tokens in (1, 4, 24, 2, 6, 8, 12, 16):
        yield attention_row(bench, "decode", tokens)


def prefill_rows(bench: Bench) -> Iterator[Row]:
    for tokens in (2048, 256):
        yield attention_row(bench, "prefill", tokens)


def gather_rows(bench: Bench) -> Iterator[Row]:
    from gpu import attention_cases as cases

    from spark_overlay.attention import kernels
    from spark_overlay.attention.kernels import reference

    torch = bench.torch
    for requests, each in ((1, 16384), (1, 49152), (4, 12288), (1, 2175)):
        name = f"gather, {f'{requests} x ' if requests > 1 else ''}{each} rows"
        pages = -(-each // 64)
        caches = [cases.cache(768, 64, seed) for seed in range(4)]
        table = torch.randperm(768, device="cuda").int()[: requests * pages].view(requests, pages)
        outs = [
            torch.full((requests, each, 512), math.nan, dtype=torch.bfloat16, device="cuda")
            for _ in caches
        ]
        lengths = torch.full((requests,), each, dtype=torch.int32, device="cuda")
        right = torch.empty_like(outs[0])
        reference.gather(right, caches[0], lengths, None, table)

        def call(out: Any, cache: Any, t: Any = table, n: Any = lengths) -> None:
            kernels.gather(out, cache, n, None, t)

        call(outs[0], caches[0])
        same = torch.equal(outs[0].view(torch.int16), right.view(torch.int16))
        us = bench.us([lambda o=o, c=c: call(o, c) for o, c in zip(outs, caches, strict=True)] * 3)
        others = {}
        for peer, most in (("bounded", each), ("unbounded", None)):

            def make(
                m: int | None = most,
                o: Any = outs,
                c: Any = caches,
                n: Any = lengths,
                t: Any = table,
            ) -> Any:
                return [peers.gather(a, b, n, t, m) for a, b in zip(o, c, strict=True)], o[0]

            others[peer] = bench.peer(make)
            if "us" in others[peer]:
                theirs = torch.equal(outs[0].view(torch.int16), right.view(torch.int16))
                others[peer]["same_bits"] = theirs
        yield name, same, bench.values(name, us, requests * each * (RECORD + ROW), 0, others)


def combine_rows(bench: Bench) -> Iterator[Row]:
    from spark_overlay.attention import kernels
    from spark_overlay.attention.kernels import reference

    torch, context = bench.torch, 16384
    for ratio, counts in ((1, (1, 24, 256, 1536, 8192)), (0, (1536, 8192))):
        for tokens in counts:
            name = f"combine ratio {ratio}, {tokens} tokens"
            topk, width = (512, 640) if ratio else (0, 128)
            starts = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
            lengths = torch.tensor([context], dtype=torch.int32, device="cuda")
            gathered_rows = torch.tensor([tokens + 127], dtype=torch.int32, device="cuda")
            args = (starts, lengths, gathered_rows, 128, ratio, topk, 40000, context)
            picks = [
                torch.randint(0, context, (tokens, 512), dtype=torch.int32, device="cuda")
                for _ in range(4)
            ]
            outs = [
                (
                    torch.full((tokens, width), 7, dtype=torch.int32, device="cuda"),
                    torch.full((tokens,), 7, dtype=torch.int32, device="cuda"),
                )
                for _ in picks
            ]
            kernels.combine(picks[0], *args, out=outs[0])
            on_cpu = [a.cpu() if torch.is_tensor(a) else a for a in args]
            right = reference.combine(picks[0].cpu(), *on_cpu)
            same = all(torch.equal(a.cpu(), b) for a, b in zip(outs[0], right, strict=True))
            pairs = list(zip(picks, outs, strict=True))
            us = bench.us([lambda p=p, o=o, a=args: kernels.combine(p, *a, out=o)
                           for p, o in pairs] * 3)  # fmt: skip
            theirs = bench.peer(
                lambda a=args, pairs=pairs: ([peers.combine(p, o, a) for p, o in pairs] * 3, None)
            )
            if "us" in theirs:
                theirs["same_bits"] = torch.equal(outs[0][0].cpu(), right[0])
            nbytes = tokens * 4 * (topk + width + 1)
            yield name, same, bench.values(name, us, nbytes, 0, {"triton": theirs})


def chosen_rows(bench: Bench) -> Iterator[Row]:
    from spark_overlay.attention import kernels
    from spark_overlay.attention.kernels import reference

    torch = bench.torch
    for tokens in (4, 2048):
        name = f"chosen slots, {tokens} tokens"
        topk = torch.randint(-1, 16384, (tokens, 512), dtype=torch.int32, device="cuda")
        table = torch.randperm(256, device="cuda").int().view(1, 256)
        request = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        out = torch.empty_like(topk)
        kernels.chosen_slots(topk, table, request, 64, out)
        same = torch.equal(out, reference.chosen_slots(topk, table, request, 64))
        us = bench.us([lambda a=(topk, table, request, 64, out): kernels.chosen_slots(*a)] * 8)
        theirs = bench.peer(lambda a=(topk, request, table, 64): ([peers.chosen(*a)] * 8, None))
        yield name, same, bench.values(name, us, tokens * 4096, 0, {"triton": theirs})


def launch_rows(bench: Bench) -> Iterator[Row]:
    """Other launches than the table's, for the table."""
    from gpu import attention_cases as cases

    from spark_overlay.attention import kernels
    from spark_overlay.attention.kernels import library, plan, reference

    torch = bench.torch
    for each in (16384, 49152):
        caches = [cases.cache(768, 64, seed) for seed in range(4)]
        table = torch.randperm(768, device="cuda").int()[: each // 64].view(1, -1)
        shape = (1, each, 512)
        outs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in caches]
        lengths = torch.tensor([each], dtype=torch.int32, device="cuda")
        for rows, warps in ((8, 2), (4, 2), (2, 1), (16, 4), (4, 1)):
            for store in ("", ".cs", ".wt"):

                def move(o: Any, c: Any, r: int = rows, w: int = warps, s: str = store,
                         n: Any = lengths, t: Any = table) -> None:  # fmt: skip
                    kernels.gather(o, c, n, None, t, rows=r, warps=w, store=s)

                us = bench.us([lambda o=o, c=c, m=move: m(o, c)
                               for o, c in zip(outs, caches, strict=True)] * 3)  # fmt: skip
                name = (
                    f"launch, gather {each}, {rows} rows, {warps} warps, store {store or 'plain'}"
                )
                yield name, True, {"us": round(us, 2)}
    if not library.present():
        return
    forms = (plan.Cuda(64, 1), plan.Cuda(32, 1), plan.Cuda(32, 1, True))
    splits = [plan.Cuda(keys, n) for keys in (32, 64) for n in (2, 4, 5, 10, 20)]
    paired = [plan.Cuda(32, n, True) for n in (2, 5, 10, 20)]
    for tokens, shapes in (
        (2048, forms), (4, [*splits, *paired]), (1, [*splits, *paired]), (24, [*splits, *paired]),
        (256, forms), (160, forms), (96, [*forms, *splits[:1], *paired[:1]]),
    ):  # fmt: skip
        sets = [cases.real(tokens, 10 * n) for n in range(4)]
        q = cases.queries(tokens, HEADS, 3)
        out = torch.full_like(q, math.nan)
        cut = [
            kernels.Source(s.cache, s.slots[:64], None if s.lengths is None else s.lengths[:64])
            for s in sets[0]
        ]
        right = reference.sparse_mla(q[:64], cut, bench.sink, SCALE)
        for one in shapes:
            if tokens * one.splits > 4096 or one.splits > 640 // one.keys:
                continue

            def call(sources: Any, q: Any = q, out: Any = out, one: Any = one) -> None:
                kernels.sparse_mla(q, sources, bench.sink, SCALE, out, chosen=one)

            call(sets[0])
            found = off(out[:64], right)
            us = bench.us([lambda s=s, c=call: c(s) for s in sets] * 4)
            kind = "pair" if one.pair else "alone"
            name = f"launch, {tokens} tokens, {one.keys} keys, {one.splits} splits, {kind}"
            yield name, found <= cases.tolerance(right), {"us": round(us, 2), "off": found}


PARTS = {
    "decode": decode_rows,
    "prefill": prefill_rows,
    "gather": gather_rows,
    "combine": combine_rows,
    "chosen": chosen_rows,
    "launches": launch_rows,
}


def bars(rows: Sequence[Values]) -> Values:
    """What the project asked of each, by this run's peers where there are any, else by earlier."""
    by_name = {row["name"]: row["values"] for row in rows}
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


def draw(rows: Sequence[Values], copy: float, device: str, out: Path) -> None:
    import charts

    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        values = row["values"]
        if "megabytes" not in values:
            continue
        kind, size = row["name"].split(",")[0], values["megabytes"]
        series.setdefault(kind, []).append((size, values["gigabytes_per_second"]))
        for peer in ("flashmla", "triton", "bounded"):
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
    options.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--chart", type=Path, help="where the chart goes (PNG)")
    options.add_argument("--quick", action="store_true", help="three replays each")
    options.add_argument("--commit", help="where git cannot say it")
    given = options.parse_args()
    unknown = sorted(set(given.parts) - set(PARTS))
    if unknown:
        options.error(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    from gpu import run as gpu_run

    began = time.perf_counter()
    bench = Bench(given.quick)
    result = gpu_run.host(given.commit or gpu_run.commit_here(), "cuda")

    def add(name: str, ok: bool, seconds: float, values: Values) -> None:
        result.add({"name": name, "ok": ok, "seconds": round(seconds, 2), "values": values})
        result.seconds = round(time.perf_counter() - began, 1)
        print(f"{name:28} {'' if ok else 'WRONG '}{json.dumps(values)}", flush=True)
        if given.json:
            result.write(given.json)

    add("copy", True, 0.0, {"bytes_per_second": round(bench.copy)})
    for part in given.parts or PARTS:
        last = time.perf_counter()
        for name, ok, values in PARTS[part](bench):
            add(name, ok, time.perf_counter() - last, values)
            last = time.perf_counter()
    add("bars", True, 0.0, bars(result.rows))
    if given.chart:
        draw(result.rows, bench.copy, result.device, given.chart)
    return int(not all(row["ok"] for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
