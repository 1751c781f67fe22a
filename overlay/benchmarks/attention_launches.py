"""Other launches than the kernels' tables have, on the cases of attention_rows.py: what the tables
were chosen from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attention_rows as rows

Row = tuple[str, bool, rows.Values]


def measured(parts: Sequence[str], quick: bool) -> Iterator[Row]:
    """Those of the named parts of attention.py."""
    if "gather" in parts:
        yield from gathers(quick)
    if "decode" in parts or "prefill" in parts:
        yield from attends(quick)


def gathers(quick: bool) -> Iterator[Row]:
    import torch
    from gpu import attention_cases as cases

    from spark_overlay.attention import kernels

    for each in (16384, 49152):
        caches = [cases.cache(768, 64, seed) for seed in range(4)]
        table = torch.randperm(768, device="cuda").int()[: each // 64].view(1, -1)
        shape = (1, each, 512)
        outs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in caches]
        lengths = torch.tensor([each], dtype=torch.int32, device="cuda")
        for count, warps in ((8, 2), (4, 2), (2, 1), (16, 4), (4, 1)):
            for store in ("", ".cs", ".wt"):

                def move(o: Any, c: Any, r: int = count, w: int = warps, s: str = store,
                         n: Any = lengths, t: Any = table) -> None:  # fmt: skip
                    kernels.gather(o, c, n, None, t, rows=r, warps=w, store=s)

                calls: rows.Calls = [
                    lambda o=o, c=c, m=move: m(o, c) for o, c in zip(outs, caches, strict=True)
                ]
                us = rows.median_us(calls * 3, quick)
                name = f"gather {each}, {count} rows, {warps} warps, store {store or 'plain'}"
                yield f"launch, {name}", True, {"us": round(us, 2)}


def attends(quick: bool) -> Iterator[Row]:
    import torch
    from gpu import attention_cases as cases

    from spark_overlay.attention import kernels
    from spark_overlay.attention.kernels import library, plan, reference

    if not library.present():
        return
    sink = rows.sink_of_all()
    many, alone = plan.Cuda(64, 1, many=True), [plan.Cuda(64, 1), plan.Cuda(32, 1)]
    splits = [plan.Cuda(keys, n) for keys in (32, 64) for n in (2, 4, 5, 10, 20)]
    for tokens, shapes in (
        (2048, [many, *alone]), (4, splits), (1, splits), (24, splits), (256, [many, *alone]),
        (160, [many, *alone]), (96, [many, *alone]), (66, [many, *alone, *splits[::5]]),
        (48, [many, *splits[::5]]),
    ):  # fmt: skip
        sets = [cases.real(tokens, 10 * n) for n in range(4)]
        q = cases.queries(tokens, rows.HEADS, 3)
        out = torch.full_like(q, math.nan)
        right = reference.sparse_mla(q[:64], rows.first(sets[0], 64), sink, rows.SCALE)
        for one in shapes:
            if tokens * one.splits > 4096 or one.splits > 640 // one.keys:
                continue

            def call(sources: Any, q: Any = q, out: Any = out, one: Any = one) -> None:
                kernels.sparse_mla(q, sources, sink, rows.SCALE, out, chosen=one)

            call(sets[0])
            found = rows.off(out[:64], right)
            us = rows.median_us([lambda s=s, c=call: c(s) for s in sets] * 4, quick)
            kind = "many" if one.many else f"{one.keys} keys, {one.splits} splits"
            name = f"launch, {tokens} tokens, {kind}"
            yield name, found <= cases.tolerance(right), {"us": round(us, 2), "off": found}
