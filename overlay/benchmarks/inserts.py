#!/usr/bin/env python3
"""The cache inserts on the GPU at hand, beside vLLM's own where vLLM is:

    python overlay/benchmarks/inserts.py [--json PATH] [--quick] [--peer] [--rows N…]

latents  compressed latents to records (ratio 1 and 2); keys: index keys; window: 32 heads of
         queries rotated and the window's records, vLLM's by its C++ op.
us       median of a CUDA graph's replays, by its 32 calls on other rows and pages each.
floor_us bytes that must be moved, by the bandwidth of a copy in the same run.
differ   bytes of the pages, and bf16 values of the queries, that are not as vLLM's; ``written``:
         how many there are. ``stock_us``: vLLM's; ``ratio``: it by ours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for place in (HERE, ROOT / "overlay", ROOT / "tests"):
    sys.path.insert(1, str(place))

import timing  # noqa: E402

ROWS = (1, 4, 32, 256, 2048)
SETS, BLOCK, HEADS, EPS = 32, 64, 32, 1e-6
Values = dict[str, Any]


def stock() -> dict[str, Callable[..., Any]]:
    """vLLM's kernels, by the modules that define them: no hook reaches these names."""
    import torch
    import vllm._custom_ops  # noqa: F401  (loads the C++ ops)
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import rope_quant_insert
    from vllm.models.deepseek_v41.common.ops.indexer_k_store import indexer_k_norm_rope_store

    def window(q: Any, kv: Any, cache: Any, slots: Any, positions: Any, table: Any) -> Any:
        pages = cache.as_strided((cache.shape[0], BLOCK * 584), (cache.stride(0), 1))
        return torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            q, kv, pages, slots, positions, table, HEADS, EPS, BLOCK, False, False, True, False
        )

    return {"latents": rope_quant_insert, "keys": indexer_k_norm_rope_store, "window": window}


def ours() -> dict[str, Callable[..., Any]]:
    from spark_overlay.attention.inserts import ops

    def window(q: Any, kv: Any, cache: Any, slots: Any, positions: Any, table: Any) -> Any:
        return ops.rotate_queries_and_insert(q, kv, cache, slots, positions, table, HEADS, BLOCK)

    return {
        "latents": ops.rope_quant_insert,
        "keys": ops.indexer_k_norm_rope_store,
        "window": window,
    }


def calls(
    kind: str, call: Callable[..., Any], given: Sequence[Any], pages: Sequence[Any], ratio: int
) -> list[Callable[[], Any]]:
    """One call for each set of rows and its pages."""

    def one(rows: Any, cache: Any) -> Callable[[], Any]:
        if kind == "latents":
            return lambda: call(rows.rows, rows.positions, rows.cos_sin, cache, rows.slots, ratio)
        if kind == "keys":
            return lambda: call(
                rows.keys, rows.positions, rows.cos_sin, rows.weight, EPS, cache, rows.slots, ratio,
                False,
            )  # fmt: skip
        return lambda: call(rows.q, rows.rows, cache, rows.slots, rows.positions, rows.cos_sin)

    return [one(rows, cache) for rows, cache in zip(given, pages, strict=True)]


def moved(kind: str, rows: int, ratio: int) -> int:
    """Bytes read and written: of rows that end a group."""
    ends = rows / ratio
    if kind == "latents":
        return round(ends * (1024 + 584 + 256))
    if kind == "keys":
        return round(ends * (256 + 132 + 256))
    return rows * (1024 + 584 + 256 + 2 * HEADS * 1024)


def rows_of(counts: Sequence[int], peer: bool, runs: int, copy: float) -> Iterator[Any]:
    import torch
    from gpu import insert_cases as cases

    theirs, mine = (stock() if peer else {}), ours()
    for kind, ratio in (("latents", 1), ("latents", 2), ("keys", 1), ("keys", 2), ("window", 1)):
        width = 132 if kind == "keys" else 584
        for count in counts:
            blocks = -(-count // BLOCK) + 1
            first = cases.draw(count, blocks * BLOCK, HEADS, 3).to("cuda")
            if count == 1:  # the one row is written, at either ratio
                first.slots[0], first.positions[0] = 3, 77
            given = []
            for _ in range(SETS):
                given.append(cases.Rows(**vars(first)))
                for name in ("rows", "keys", "q"):
                    setattr(given[-1], name, torch.randn_like(getattr(first, name)))
            pages, other = (
                [cases.cache(blocks, BLOCK, width, "cuda") for _ in given] for _ in range(2)
            )
            values: Values = {}
            made = calls(kind, mine[kind], given, pages, ratio)
            ok = True
            if peer:
                right = calls(kind, theirs[kind], given, other, ratio)
                differ = written = 0
                for a, b, page, expected in zip(made, right, pages, other, strict=True):
                    q, q_right = a(), b()
                    expected_bytes = cases.whole(expected)
                    differ += int((cases.whole(page) != expected_bytes).sum())
                    written += int((expected_bytes != cases.POISON).sum())
                    if kind == "window":
                        differ += int((q.view(torch.int16) != q_right.view(torch.int16)).sum())
                        written += q.numel()
                values |= {"differ": differ, "written": written}
                ok = differ == 0
            us = statistics.median(timing.graph_us(made, runs))
            floor = moved(kind, count, ratio) / copy * 1e6
            values |= {
                "us": round(us, 2),
                "floor_us": round(floor, 3),
                "share": round(floor / us, 3),
            }
            if peer:
                values["stock_us"] = round(statistics.median(timing.graph_us(right, runs)), 2)
                values["ratio"] = round(values["stock_us"] / us, 3)
            yield f"{kind} 1/{ratio}, {count} rows", ok, values


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--quick", action="store_true", help="three replays each")
    options.add_argument("--peer", action="store_true", help="vLLM's kernels too")
    options.add_argument("--rows", type=int, nargs="*", default=ROWS)
    options.add_argument("--commit", help="where git cannot say it")
    given = options.parse_args()
    from gpu import run as gpu_run

    began = last = time.perf_counter()
    result = gpu_run.host(given.commit or gpu_run.commit_here(), "cuda")
    copy = timing.copy_ceiling(5)
    copied = ("copy", True, {"bytes_per_second": round(copy)})
    made = rows_of(given.rows, given.peer, 3 if given.quick else 7, copy)
    for name, ok, values in itertools.chain([copied], made):
        now = time.perf_counter()
        result.add({"name": name, "ok": ok, "seconds": round(now - last, 2), "values": values})
        result.seconds, last = round(now - began, 1), now
        print(f"{name:24} {'' if ok else 'WRONG '}{json.dumps(values)}", flush=True)
        if given.json:
            result.write(given.json)
    return int(not all(row["ok"] for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
