#!/usr/bin/env python3
"""mHC at V4.1's dimensions on the GPU at hand, beside vLLM's TileLang where vLLM is:

    python overlay/benchmarks/mhc.py [--json PATH] [--quick] [--peer] [--shapes] [--rows N…]

fused    one sublayer's write-back and the next one's read, for N rows; ``read``: without the first.
us       median of RUNS replays of a CUDA graph of 48 calls (6 from 1024 rows on), each with other
         weights (94 MB, so that L2 holds none) and other rows, by their number: device time with a
         graph's gaps. ``launches``: kernels of a call. ``by``: whose they are; if CUDA's, Triton's
         as ``triton_us``. ``--shapes``: each shape of CUDA's launch, too.
floor_us bytes that must be moved, by the bandwidth of a copy in the same run; ``share`` of it.
off      largest relative RMS error of an output against float64, among bf16 and float32 ones.
tilelang vLLM's call on the same inputs; ``ratio`` its us by ours. ``tilelang_dg``: fused with
         DeepGEMM, where it differs (more than 32 rows).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for place in (ROOT / "overlay", ROOT / "tests"):
    sys.path.insert(1, str(place))

import timing  # noqa: E402

Call = Callable[[], Any]
Values = dict[str, Any]
HIDDEN = 5120
ROWS = (1, 4, 6, 8, 12, 16, 17, 32, 33, 64, 256, 2048)
SHAPES = ((8, 64), (8, 128), (16, 64), (16, 128))
#: Up to here vLLM's fused kernel asks no DeepGEMM.
SAME = 32


def fused_bytes(rows: int) -> int:
    """x and streams in, streams and input out (bf16), the weight (float32)."""
    return rows * 2 * HIDDEN * (1 + 4 + 4 + 1) + 24 * 4 * HIDDEN * 4


def read_bytes(rows: int) -> int:
    return rows * 2 * HIDDEN * (4 + 1) + 24 * 4 * HIDDEN * 4


class Bench:
    def __init__(self, runs: int, peer: bool, shapes: bool = False) -> None:
        import torch

        self.torch, self.runs, self.peer, self.shapes = torch, runs, peer, shapes
        self.copy = timing.copy_ceiling(5)


def inputs(bench: Bench, rows: int) -> list[Any]:
    from gpu import mhc_cases as cases

    torch = bench.torch
    first = cases.draw(2, HIDDEN, 1).to("cuda")
    made = []
    for _ in range(48 if rows < 1024 else 6):
        one = cases.Case(**vars(first))
        one.fn = torch.randn(24, 4 * HIDDEN, device="cuda") * HIDDEN**-0.5
        for name in ("x", "residual"):
            shape = (rows, *getattr(first, name).shape[1:])
            setattr(one, name, torch.randn(shape, device="cuda").bfloat16())
        one.post = 2 * torch.rand(rows, 4, 1, device="cuda")
        one.comb = torch.softmax(torch.randn(rows, 4, 4, device="cuda"), -1)
        one.pre = torch.rand(rows, 4, device="cuda")
        made.append(one)
    return made


def fused(call: Callable[..., Any], one: Any, numbers: tuple[Any, ...], eps: float) -> Any:
    return call(
        one.x, one.residual, one.post, one.comb, one.fn, one.scale, one.base, *numbers,
        pre_mix=one.pre, norm_weight=one.weight, norm_eps=eps,
    )  # fmt: skip


def read(call: Callable[..., Any], one: Any, numbers: tuple[Any, ...], eps: float) -> Any:
    return call(
        one.residual, one.fn, one.scale, one.base, *numbers,
        pre_mix=one.pre, norm_weight=one.weight, norm_eps=eps,
    )  # fmt: skip


def off(one: Any, found: Sequence[Any], write_back: bool) -> tuple[float, float]:
    """Against float64, the worst output in bf16 and in float32."""
    from gpu import mhc_cases as cases

    case = one.to("cpu")
    case.write_back = write_back
    right = cases.oracle(case)
    names = (("streams",) if write_back else ()) + ("post", "comb", "input", "next_pre")
    worst = {2: 0.0, 4: 0.0}
    for name, value in zip(names, found, strict=False):
        expected = right[name].double().reshape(value.shape)
        error = float((value.cpu().double() - expected).norm() / expected.norm())
        size = value.element_size()
        worst[size] = max(worst[size], error if error == error else float("inf"))
    return worst[2], worst[4]


def compile_peers(counts: Sequence[int]) -> None:
    """Each of vLLM's calls once: its kernels are compiled, and kept for the run that is timed."""
    import torch
    from gpu import mhc_cases as cases

    n = cases.NUMBERS
    numbers = (n.rms_eps, n.pre_eps, n.sinkhorn_eps, n.post_gain, n.iterations)
    for count in counts:
        one = cases.draw(count, HIDDEN, 1).to("cuda")
        for call, deep_gemm in theirs().values():
            deep_gemm()
            fused(call["fused"], one, numbers, n.norm_eps)
            read(call["read"], one, numbers, n.norm_eps)
    torch.cuda.synchronize()


def rows_of(bench: Bench, counts: Sequence[int]) -> Iterator[tuple[str, bool, Values]]:
    from gpu import mhc_cases as cases

    from spark_overlay.mhc import plan
    from spark_overlay.mhc.kernels import library, ops

    n = cases.NUMBERS
    numbers = (n.rms_eps, n.pre_eps, n.sinkhorn_eps, n.post_gain, n.iterations)
    peers = theirs() if bench.peer else {}
    for kind, shape, ours, nbytes in (
        ("fused", fused, ops.fused_post_pre_delayed, fused_bytes),
        ("read", read, ops.pre_delayed, read_bytes),
    ):
        for count in counts:
            given = inputs(bench, count)
            found = shape(ours, given[0], numbers, n.norm_eps)
            bf16, fp32 = off(given[0], found, kind == "fused")

            def all_of(call: Callable[..., Any], shape: Any = shape, given: Any = given) -> float:
                calls = [lambda one=one: shape(call, one, numbers, n.norm_eps) for one in given]
                return statistics.median(timing.graph_us(calls, bench.runs))

            us = all_of(ours)
            cuda = count <= plan.ONE_LAUNCH and library.present()
            floor = nbytes(count) / bench.copy * 1e6
            values = {
                "us": round(us, 2),
                "launches": 1 if count <= plan.ONE_LAUNCH else 2,
                "floor_us": round(floor, 2),
                "share": round(floor / us, 3),
                "off_bf16": float(f"{bf16:.3g}"),
                "off_float32": float(f"{fp32:.3g}"),
            }
            values["by"] = "CUDA" if cuda else "Triton"
            if cuda:
                with mock.patch.object(library, "present", lambda: False):
                    values["triton_us"] = round(all_of(ours), 2)
            for at in SHAPES if cuda and bench.shapes else ():
                with mock.patch.object(plan, "slices", lambda _, at=at: plan.Slices(*at)):
                    found = shape(ours, given[0], numbers, n.norm_eps)
                    its = off(given[0], found, kind == "fused")
                    bf16, fp32 = max(bf16, its[0]), max(fp32, its[1])
                    values["us_of_{}_{}".format(*at)] = round(all_of(ours), 2)
            for name, (call, deep_gemm) in peers.items():
                if name == "tilelang_dg" and (kind == "read" or count <= SAME):
                    continue
                deep_gemm()
                values[f"{name}_us"] = round(all_of(call[kind]), 2)
                values["ratio" + name[8:]] = round(values[f"{name}_us"] / us, 3)
            yield f"{kind}, {count} rows", bf16 < 1.9e-3 and fp32 < 1.9e-3, values


@functools.cache
def theirs() -> dict[str, tuple[dict[str, Callable[..., Any]], Call]]:
    """vLLM's calls, without and with DeepGEMM; the second of each switches to it."""
    from vllm.model_executor.kernels.mhc import tilelang
    from vllm.utils import deep_gemm

    calls = {
        "fused": tilelang.mhc_fused_post_pre_delayed_tilelang,
        "read": tilelang.mhc_pre_delayed_tilelang,
    }
    supported = deep_gemm.is_deep_gemm_supported

    def switch(on: bool) -> None:
        deep_gemm.is_deep_gemm_supported = supported if on else lambda: False

    found: dict[str, tuple[dict[str, Callable[..., Any]], Call]] = {
        "tilelang": (calls, lambda: switch(False))
    }
    if supported():
        found["tilelang_dg"] = (calls, lambda: switch(True))
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--quick", action="store_true", help="three replays each")
    options.add_argument("--peer", action="store_true", help="vLLM's kernels too (minutes)")
    options.add_argument("--shapes", action="store_true", help="every shape of CUDA's launch")
    options.add_argument("--compile", action="store_true", help="vLLM's kernels, and time nothing")
    options.add_argument("--rows", type=int, nargs="*", default=ROWS)
    options.add_argument("--commit", help="where git cannot say it")
    given = options.parse_args()
    from gpu import run as gpu_run

    if given.compile:
        compile_peers(given.rows)
        return 0
    began = last = time.perf_counter()
    bench = Bench(3 if given.quick else 7, given.peer, given.shapes)
    result = gpu_run.host(given.commit or gpu_run.commit_here(), "cuda")
    copied = ("copy", True, {"bytes_per_second": round(bench.copy)})
    for name, ok, values in itertools.chain([copied], rows_of(bench, given.rows)):
        now = time.perf_counter()
        result.add({"name": name, "ok": ok, "seconds": round(now - last, 2), "values": values})
        result.seconds, last = round(now - began, 1), now
        print(f"{name:16} {'' if ok else 'WRONG '}{json.dumps(values)}", flush=True)
        if given.json:
            result.write(given.json)
    return int(not all(row["ok"] for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
