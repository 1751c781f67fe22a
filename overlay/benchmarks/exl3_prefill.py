"""EXL3's kernels for many rows at V4.1's shapes; ``exl3.py --prefill`` runs this.

    experts, N tokens   one layer's 384, six a token, K = 3 and 2, routed anew each call
    layer, N tokens     all its linears and experts, the shared one too
    rotate, finish      bytes that must move, of the copy ceiling
    reconstruct         likewise: packed weights in, fp16 out; a matrix a launch, and as the serving
                        path has it, the matrices of a group in one

peer: exllamav3 1.6.5 in the same run (exl3_peer_many): exl3_moe with its sort and the counts it
reads back, three tiles; linears by the faster of its two ways for each. ``ratio`` its us by ours.
Experts and layers are timed as they are called, one call after the other, without a graph, since
the peer's cannot be captured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import exl3_shapes as shapes

Values = dict[str, Any]
Rows = Iterator[tuple[str, bool, Values]]
TOKENS = (128, 512, 1024, 2048, 4096, 8192)
#: The layer's linears but for the shared expert's.
LINEARS = ("wq_a + wkv", "wq_b", "wo_a", "wo_b")
SHARED = ("shared gate + up", "shared down")


def eager(torch: Any, calls: Sequence[Callable[[], Any]], runs: int) -> float:
    """Microseconds a call, the median of ``runs``."""
    for call in calls[:2]:
        call()
    found = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(found)


def beside(us: float, peer_us: float | None, **more: Any) -> Values:
    found = {"us": round(us, 1), **more}
    if peer_us is None:
        return found | {"peer": "not here"}
    return found | {"peer_us": round(peer_us, 1), "ratio": round(peer_us / us, 3)}


def expert_rows(bench: Any, peer: Any, layer: Any, k2: int) -> Rows:
    from gpu import exl3_cases as cases

    from spark_overlay.exl3.cuda import prefill

    torch, runs = bench.torch, 2 if bench.quick else 5
    for tokens in TOKENS:
        x = cases.rows(tokens, shapes.HIDDEN, "cuda")
        routes = [
            cases.routing(tokens, shapes.TOPK, shapes.EXPERTS, "cuda", seed) for seed in range(4)
        ]

        def ours(ids: Any, weights: Any, x: Any = x, dtype: Any = torch.bfloat16) -> Any:
            return prefill.experts(
                x, ids, weights, layer.table, shapes.EXPERTS, shapes.INTER, layer.max_k2,
                limit=10.0, dtype=dtype,
            )  # fmt: skip

        us = eager(torch, [lambda r=r, f=ours: f(*r) for r in routes], runs)
        peer_us, more = None, {}
        flops = 6.0 * tokens * shapes.TOPK * shapes.HIDDEN * shapes.INTER
        more["teraflops"] = round(flops / us / 1e6, 1)
        if peer is not None:
            made = [peer.experts(layer.table, k2, shapes.INTER, x, *route) for route in routes]
            peer_us = eager(torch, [call for call, _ in made], runs)
            found = ours(*routes[0], dtype=torch.float32)
            made[0][0]()
            more["from_peer"] = float(f"{cases.off(found, made[0][1].double()):.3g}")
        ok = more.get("from_peer", 0.0) < 3e-3
        yield f"experts K={k2 // 2}, {tokens} tokens", ok, beside(us, peer_us, **more)


def layer_rows(bench: Any, peer: Any, layer: Any) -> Rows:
    """At 1024 and 2048 tokens. Ours as the serving path calls it (layers.py)."""
    from gpu import exl3_cases as cases

    import exl3
    from spark_overlay.exl3.cuda.layers import Experts, Group

    torch, runs = bench.torch, 2 if bench.quick else 5
    parts = {n: exl3.made_sets(shapes.GROUPS[n], 1 << 40)[0] for n in (*LINEARS, *SHARED)}
    groups = {name: Group([m.entry for m in parts[name]]) for name in LINEARS}
    # The experts of `layer` and a shared one with rates of its own.
    entries = [[m.entry for m in part[: shapes.EXPERTS]] for part in layer.parts]
    for which, m in enumerate((*parts["shared gate + up"], *parts["shared down"])):
        entries[which].append(m.entry)
    experts = Experts(*entries, limit=10.0, shared=True)
    for tokens in (1024, 2048):
        xs = {name: exl3.inputs(name, shapes.GROUPS[name], tokens) for name in LINEARS}
        x = cases.rows(tokens, shapes.HIDDEN, "cuda")
        routes = [
            cases.routing(tokens, shapes.TOPK, shapes.EXPERTS, "cuda", seed) for seed in range(4)
        ]

        def ours(route: Any, xs: Any = xs, x: Any = x) -> None:
            for name in LINEARS:
                groups[name](xs[name], torch.bfloat16)
            experts(x, *route)

        us = eager(torch, [lambda r=r, f=ours: f(r) for r in routes], runs)
        peer_us = None
        if peer is not None:
            moe = [peer.experts(layer.table, 6, shapes.INTER, x, *route)[0] for route in routes]
            inner = cases.rows(tokens, shapes.INTER, "cuda")
            linears = []
            for name in (*LINEARS, *SHARED):
                own = {**xs, "shared gate + up": [x], "shared down": [inner]}[name]
                every = own if len(own) == len(parts[name]) else own * len(parts[name])
                for one, m in zip(every, parts[name], strict=True):
                    ways = [peer.linear(one, m, way)[0] for way in (True, False)]
                    linears.append(min(ways, key=lambda way: eager(torch, [way] * 4, 3)))
            calls = [[*linears, one] for one in moe]
            peer_us = eager(torch, [lambda c=c: [f() for f in c] for c in calls], runs)
        yield f"layer, {tokens} tokens", True, beside(us, peer_us)


def moving_rows(bench: Any, peer: Any) -> Rows:
    """Rotations and weights, by the bytes they must move."""
    from gpu import exl3_cases as cases

    import exl3
    from spark_overlay.exl3.cuda import prefill

    torch = bench.torch

    def decoding(ms: Sequence[Any]) -> Callable[[], Any]:
        pieces = [prefill.Piece(m.trellis, 0, 0, m.svh.numel()) for m in ms]
        return lambda: prefill.reconstruct(pieces)

    def row(name: str, nbytes: int, calls: Sequence[Any], other: Sequence[Any]) -> Any:
        us = statistics.median(bench.timed(calls))
        peer_us = statistics.median(bench.timed(other)) if other else None
        share = nbytes / us * 1e6 / bench.copy
        return name, True, beside(us, peer_us, share_of_copy=round(share, 3))

    for rows, width in ((2048, 5120), (2048, 16384), (8192, 5120)):
        count = max(2, (256 << 20) // (rows * width * 2))
        xs = [cases.rows(rows, width, "cuda", n) for n in range(count)]
        suh = cases.matrix(width, 128, 6, 1, "cuda").suh
        other = [peer.rotated(x.half(), suh)[0] for x in xs] if peer else []
        calls = [lambda x=x, s=suh: prefill.rotate(x, s) for x in xs]
        yield row(f"rotate [{rows}, {width}]", 4 * rows * width, calls, other)
        y = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
        sums = [x.float() for x in xs[: max(2, count // 2)]]
        calls = [lambda s=s, y=y, v=suh: prefill.finish(s, v, y) for s in sums]
        yield row(f"finish [{rows}, {width}]", 6 * rows * width, calls, [])
    for size in sorted({s for n in (*LINEARS, *SHARED) for s in shapes.GROUPS[n]}):
        nbytes = 2 * size[0] * size[1] + size[0] * size[1] * size[2] // 16
        count = max(2, math.ceil((256 << 20) / nbytes))
        ms = [cases.matrix(*size, n, "cuda") for n in range(count)]
        other = [peer.reconstructed(m)[0] for m in ms] if peer else []
        calls = [decoding([m]) for m in ms]
        yield row(f"reconstruct {size[0]} -> {size[1]}, K={size[2] / 2:g}", nbytes, calls, other)
    for name in (*LINEARS, *SHARED):
        sizes = shapes.GROUPS[name]
        if len(sizes) == 1:
            continue
        nbytes = sum(2 * a * b + a * b * k2 // 16 for a, b, k2 in sizes)
        sets = exl3.made_sets(sizes, nbytes)
        made = [[peer.reconstructed(m)[0] for m in ms] for ms in sets] if peer else []
        other = [lambda calls=calls: [call() for call in calls] for calls in made]
        calls = [decoding(ms) for ms in sets]
        yield row(f"reconstruct {name}, one launch", nbytes, calls, other)


def rows_of(bench: Any, peer: Any) -> Rows:
    from gpu import exl3_cases as cases

    yield from moving_rows(bench, peer)
    for k2 in (6, 4):
        layer = cases.Layer(shapes.HIDDEN, shapes.INTER, shapes.EXPERTS, [k2], "cuda")
        yield from expert_rows(bench, peer, layer, k2)
        if k2 == 6:
            yield from layer_rows(bench, peer, layer)
        del layer
        bench.torch.cuda.empty_cache()


def bars(rows: Sequence[Values]) -> Values:
    """What the project wants, where it was measured."""

    def of(start: str, key: str) -> list[float]:
        return [
            r["values"][key] for r in rows if r["name"].startswith(start) and key in r["values"]
        ]

    def worst(k: int) -> float | None:
        names = [f"experts K={k}, {n} tokens" for n in (1024, 2048, 4096)]
        return min((v for name in names for v in of(name, "ratio")), default=None)

    shares = [v for what in ("rotate", "finish", "reconstruct") for v in of(what, "share_of_copy")]
    return {
        "experts at 1024 to 4096 tokens, worst (bar 2.5)": worst(3),
        "the same at K = 2": worst(2),
        "a layer at 2048 tokens (bar 2)": min(of("layer, 2048", "ratio"), default=None),
        "share of copy, worst (bar 0.6)": min(shares, default=None),
    }
