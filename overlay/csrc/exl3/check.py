#!/usr/bin/env python3
"""Checks and times the CUDA library by itself, on one GPU: ``check.py LIBRARY.so STEP...``.

Steps: ``right`` (against float64), ``stress`` (replays, two streams), ``time``, ``sweep`` (plans),
``small`` (every kernel once on small shapes, for compute-sanitizer), ``profile`` (for ncu).
Only torch and ``spark_overlay.exl3`` are needed; results go to standard output and, as JSON, to
``$OUT/exl3_check.json`` where OUT is set.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from spark_overlay.exl3 import reference  # noqa: E402

CODEBOOKS = ("mul1", "mcg", "3inst")
DEVICE = "cuda"
RESULTS: dict[str, Any] = {}


class Shard(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p), ("x_stride", ctypes.c_int64), ("trellis", ctypes.c_void_p),
        ("suh", ctypes.c_void_p), ("svh", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p), ("y_stride", ctypes.c_int64),
        *[(n, ctypes.c_int32) for n in ("inputs", "outputs", "k2", "codebook", "y_dtype", "chunks", "kblocks", "reserved")],
    ]  # fmt: skip


class Experts(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p), ("x_stride", ctypes.c_int64), ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p), ("table", ctypes.c_void_p), ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        *[(n, ctypes.c_int32) for n in ("id_bytes", "tokens", "topk", "experts", "first_id", "shared", "hidden", "inter", "y_dtype", "max_k2")],
        ("limit", ctypes.c_float),
        *[(n, ctypes.c_int32) for n in ("a_warps", "a_chunks", "a_kblocks", "b_warps", "b_chunks")],
    ]  # fmt: skip


class Library:
    """The library with one scratch and one set of counters."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.lib.exl3_error.restype = ctypes.c_char_p
        self.scratch = torch.full((1 << 27,), 0x7F, dtype=torch.uint8, device=DEVICE)
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=DEVICE)

    def ok(self, status: int) -> None:
        if status:
            raise RuntimeError(f"status {status}: {self.lib.exl3_error().decode()}")

    def decode(self, trellis: Tensor, k2: int, codebook: int) -> Tensor:
        out = torch.full((trellis.shape[0] * 16, trellis.shape[1] * 16), float("nan"), dtype=torch.float16, device=DEVICE)
        self.ok(self.lib.exl3_decode(ctypes.c_void_p(trellis.data_ptr()), out.shape[0], out.shape[1], k2, codebook, ctypes.c_void_p(out.data_ptr()), stream()))  # fmt: skip
        return out

    def group(self, shards: list[Shard], rows: int, warps: int = 8, scratch: Tensor | None = None, counters: Tensor | None = None) -> None:  # fmt: skip
        array = (Shard * len(shards))(*shards)
        s, c = (self.scratch if scratch is None else scratch), (self.counters if counters is None else counters)
        self.ok(self.lib.exl3_group(array, len(shards), rows, warps, ctypes.c_void_p(s.data_ptr()), ctypes.c_int64(s.numel()), ctypes.c_void_p(c.data_ptr()), ctypes.c_int64(c.numel()), stream()))  # fmt: skip

    def experts(self, args: Experts, scratch: Tensor | None = None, counters: Tensor | None = None) -> None:
        s, c = (self.scratch if scratch is None else scratch), (self.counters if counters is None else counters)
        self.ok(self.lib.exl3_experts(ctypes.byref(args), ctypes.c_void_p(s.data_ptr()), ctypes.c_int64(s.numel()), ctypes.c_void_p(c.data_ptr()), ctypes.c_int64(c.numel()), stream()))  # fmt: skip


def stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def random_trellis(inputs: int, outputs: int, k2: int) -> Tensor:
    return torch.randint(-32768, 32768, (inputs // 16, outputs // 16, 8 * k2), dtype=torch.int16, device=DEVICE)


def scales(n: int) -> Tensor:
    sign = torch.randint(0, 2, (n,), device=DEVICE) * 2 - 1
    return (sign * (0.5 + torch.rand(n, device=DEVICE))).half()


class Linear:
    def __init__(self, inputs: int, outputs: int, k2: int, codebook: int = 0) -> None:
        self.inputs, self.outputs, self.k2, self.codebook = inputs, outputs, k2, codebook
        self.trellis = random_trellis(inputs, outputs, k2)
        self.suh, self.svh = scales(inputs), (scales(outputs).float() / inputs**0.5).half()

    def shard(self, x: Tensor, y: Tensor, chunks: int, kblocks: int, bias: Tensor | None = None) -> Shard:
        return Shard(
            x.data_ptr(), x.stride(0), self.trellis.data_ptr(), self.suh.data_ptr(), self.svh.data_ptr(),
            bias.data_ptr() if bias is not None else None, y.data_ptr(), y.stride(0), self.inputs, self.outputs,
            self.k2, self.codebook, int(y.dtype == torch.float32), chunks, kblocks, 0,
        )  # fmt: skip

    def reference(self, x: Tensor) -> Tensor:
        inner = reference.decode_torch(self.trellis, CODEBOOKS[self.codebook]).double()
        rotated = reference.hadamard_rotate(x.double() * self.suh.double())
        return reference.hadamard_rotate(rotated @ inner) * self.svh.double()


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def poison(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE)


# ---- right ------------------------------------------------------------------------------------


def rates() -> Iterator[tuple[int, int]]:
    for codebook in range(3):
        for k2 in (2, 4, 6, 8, 10, 12, 14, 16):
            yield k2, codebook
    for k2 in (3, 5, 7):
        yield k2, 0


def right_decode(lib: Library) -> None:
    for k2, codebook in rates():
        trellis = random_trellis(256, 384, k2)
        want = reference.decode_torch(trellis, CODEBOOKS[codebook])
        got = lib.decode(trellis, k2, codebook)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (k2, codebook)
    print("decode: bit-exact for", len(list(rates())), "rates and codebooks")


def right_dense(lib: Library) -> None:
    worst = 0.0
    report = []
    for k2, codebook in rates():
        linear = Linear(512, 384, k2, codebook)
        for rows, chunks, kblocks, warps in ((1, 1, 4, 8), (5, 2, 1, 8), (8, 3, 2, 7), (16, 1, 3, 8), (23, 2, 2, 4)):
            if k2 > 12:
                warps = min(warps, 6)
            x = torch.randn(rows, 512, device=DEVICE).bfloat16()
            y = poison(rows, 384, torch.float32)
            lib.group([linear.shard(x, y, min(chunks, warps), kblocks)], rows, warps)
            e = error(y, linear.reference(x))
            worst = max(worst, e)
            if not e <= 5e-4:
                report.append((k2, codebook, rows, chunks, kblocks, e))
    print(f"dense, every rate: worst {worst:.2e}", "FAILED" if report else "ok", report[:6])
    # A mixed group with own inputs, strides, bias, bf16 and fp32 outputs.
    for rows in (1, 4, 16, 64):
        big = torch.randn(rows, 1536, device=DEVICE).bfloat16()
        x1, x2 = big[:, :1024], big[:, 1024:]
        parts = [Linear(1024, 640, 6), Linear(1024, 128, 10), Linear(512, 256, 7), Linear(512, 1152, 4, 1), Linear(1024, 384, 12)]
        shards, outs = [], []
        for i, part in enumerate(parts):
            x = x1 if part.inputs == 1024 else x2
            y = poison(rows, part.outputs + 4, torch.bfloat16 if i % 2 else torch.float32)[:, : part.outputs]
            bias = torch.randn(part.outputs, device=DEVICE).half() if i == 1 else None
            shards.append(part.shard(x, y, 1 + i % 3, 2 + i % 3, bias))
            outs.append((part, x, y, bias))
        lib.group(shards, rows, 8)
        for part, x, y, bias in outs:
            want = part.reference(x) + (bias.double() if bias is not None else 0)
            e = error(y, want)
            good = e <= (5e-4 if y.dtype == torch.float32 else 3e-3)
            print(f"group rows {rows} [{part.inputs},{part.outputs}] k2 {part.k2}: {e:.2e}", "ok" if good else "FAILED")
    # bf16 equals the rounded fp32; NaN and inf stay in their rows; deterministic.
    linear = Linear(1280, 1024, 10)
    x = torch.randn(16, 1280, device=DEVICE).bfloat16()
    a, b = poison(16, 1024, torch.float32), poison(16, 1024, torch.bfloat16)
    lib.group([linear.shard(x, a, 2, 2)], 16)
    lib.group([linear.shard(x, b, 2, 2)], 16)
    print("bf16 is the rounded fp32:", torch.equal(a.bfloat16(), b))
    bad = x.clone()
    bad[3, 7], bad[9, 100] = float("nan"), float("inf")
    c = poison(16, 1024, torch.float32)
    lib.group([linear.shard(bad, c, 2, 2)], 16)
    others = [i for i in range(16) if i not in (3, 9)]
    print("NaN, inf stay in their rows:", torch.equal(a[others], c[others]) and not bool(c[[3, 9]].isfinite().any()))
    for inputs, outputs, k2, chunks, kblocks in ((5120, 1280, 10, 1, 4), (1280, 16384, 10, 1, 10), (4096, 1024, 10, 1, 4), (1152, 5120, 10, 1, 9)):
        linear = Linear(inputs, outputs, k2)
        x = torch.randn(8, inputs, device=DEVICE).bfloat16()
        y = poison(8, outputs, torch.float32)
        lib.group([linear.shard(x, y, chunks, kblocks)], 8)
        e = error(y, linear.reference(x))
        print(f"dense [{inputs},{outputs}] k2 {k2}: {e:.2e}", "ok" if e <= 5e-4 else "FAILED")


class Layer:
    """Experts of one layer; `rates` k2 per entry (the shared expert's last)."""

    def __init__(self, experts: int, hidden: int, inter: int, k2s: list[int], shared: bool, codebook: int = 0) -> None:
        self.experts, self.hidden, self.inter, self.shared = experts, hidden, inter, shared
        self.max_k2 = max(k2s)
        self.entries: list[list[Linear]] = [[], [], []]
        total = experts + int(shared)
        for which, (inputs, outputs) in enumerate(((hidden, inter), (hidden, inter), (inter, hidden))):
            for e in range(total):
                self.entries[which].append(Linear(inputs, outputs, k2s[e % len(k2s)], codebook))
        self.table = torch.tensor(
            [[[m.trellis.data_ptr(), m.suh.data_ptr(), m.svh.data_ptr(), m.k2 | m.codebook << 8] for m in row] for row in self.entries],
            dtype=torch.int64, device=DEVICE,
        )  # fmt: skip

    def args(self, x: Tensor, ids: Tensor, weights: Tensor, y: Tensor, plan: tuple[int, int, int, int, int], first_id: int = 0, limit: float = 10.0) -> Experts:  # fmt: skip
        return Experts(
            x.data_ptr(), x.stride(0), ids.data_ptr(), weights.data_ptr(), self.table.data_ptr(), y.data_ptr(), y.stride(0),
            ids.element_size(), ids.shape[0], ids.shape[1], self.experts, first_id, int(self.shared), self.hidden, self.inter,
            int(y.dtype == torch.float32), self.max_k2, limit, *plan,
        )  # fmt: skip

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor, first_id: int = 0, limit: float = 10.0) -> Tensor:
        out = torch.zeros(x.shape[0], self.hidden, dtype=torch.float64, device=DEVICE)

        def one(e: int, row: Tensor) -> Tensor:
            gate, up = self.entries[0][e].reference(row), self.entries[1][e].reference(row)
            if limit > 0:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return self.entries[2][e].reference(torch.nn.functional.silu(gate) * up)

        for e in sorted({int(i) - first_id for i in ids.flatten().tolist()}):
            if 0 <= e < self.experts:
                t, j = (ids - first_id == e).nonzero(as_tuple=True)
                out.index_add_(0, t, one(e, x[t]) * weights[t, j].double()[:, None])
        if self.shared:
            out += one(self.experts, x)
        return out


def right_experts(lib: Library) -> None:
    for hidden, inter, experts, topk, k2s, shared, codebook in (
        (512, 384, 16, 4, [6], False, 0),
        (512, 384, 16, 4, [4, 6, 8, 10, 5], True, 0),
        (512, 256, 8, 2, [6, 2, 16], True, 1),
        (5120, 1152, 24, 6, [6], True, 0),
        (5120, 1152, 24, 6, [4], False, 0),
    ):
        layer = Layer(experts, hidden, inter, k2s, shared, codebook)
        for tokens in (1, 2, 3, 8, 16, 21):
            if tokens * topk > 128:
                continue
            for name in ("random", "one", "outside"):
                x = torch.randn(tokens, hidden, device=DEVICE).bfloat16() * 3
                if name == "random":
                    ids = torch.stack([torch.randperm(experts, device=DEVICE)[:topk] for _ in range(tokens)])
                elif name == "one":
                    ids = torch.full((tokens, topk), 3, device=DEVICE)
                    ids[:, 1:] = torch.randint(4, experts, (tokens, topk - 1), device=DEVICE)
                else:
                    ids = torch.randint(-3, experts + 30, (tokens, topk), device=DEVICE)
                    ids[-1] = experts + 5
                first = 0 if name != "outside" else 2
                weights = torch.rand(tokens, topk, device=DEVICE)
                ids = ids.int() if tokens == 2 else ids
                y = poison(tokens, hidden, torch.float32)
                plan = (8 if max(k2s) <= 12 else 5, 3, 4, 8 if max(k2s) <= 12 else 5, 2)
                lib.experts(layer.args(x, ids.contiguous(), weights, y, plan, first))
                want = layer.reference(x, ids, weights, first)
                if float(want.norm()) == 0:
                    good, e = not bool(y.any()), 0.0
                else:
                    e = error(y, want)
                    good = e <= 1.2e-3
                if not good or tokens in (1, 16):
                    print(f"experts H{hidden} k2 {k2s} T{tokens} {name}: {e:.2e}", "ok" if good else "FAILED")
                if name == "outside" and not shared:
                    assert not bool(y[-1].any()), "a token without experts must be zero"
    assert not bool(lib.counters.any()), "counters must be zero after every launch"
    print("counters: all zero")


# ---- time -------------------------------------------------------------------------------------


def graph_us(calls: list[Callable[[], None]], samples: int = 7) -> float:
    """us a call of a graph that holds all of them, median of samples."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (2 * len(calls)))
    return statistics.median(times)


PEER = {6: {1: 68.3, 2: 125.2, 4: 217.6, 8: 411.4, 16: 709.2}, 4: {1: 63.9, 2: 115.0, 4: 216.4, 8: 361.8, 16: 675.0}}
#: By the tokens from which on they are tried.
A_PLANS = {
    1: [
        *((3, 3, k) for k in (2, 3, 4, 5, 6, 7, 8, 10)), *((6, 3, k) for k in (4, 5, 6, 8, 10)), (4, 1, 10), (4, 2, 5),
        (4, 2, 7), (4, 2, 10), (2, 2, 3), (2, 2, 4), (2, 2, 6), (2, 1, 6), (2, 1, 8), (2, 1, 10), (8, 2, 10), (8, 4, 5), (5, 1, 10),
        (3, 1, 10), (3, 1, 14), (6, 2, 8), (4, 1, 8), (4, 1, 14), (8, 1, 14),
    ],
    4: [
        (4, 2, 5), (4, 2, 7), (4, 2, 10), (4, 4, 5), (4, 4, 8), (4, 4, 10), (4, 1, 14), (3, 3, 5), (3, 3, 6), (3, 3, 8),
        (3, 3, 10), (2, 2, 5), (2, 2, 8), (2, 2, 10), (5, 1, 10), (6, 3, 10),
    ],
}
B_PLANS = [(4, 1), (4, 2), (4, 4), (6, 1), (6, 2), (8, 1), (8, 2), (3, 1), (2, 1), (2, 2)]
BASE = (4, 2, 10, 4, 1)


class Bench:
    """One 384-expert layer, its tensors as slices of slabs, and routings that differ per call."""

    def __init__(self, k2: int) -> None:
        self.hidden, self.inter, self.experts, self.topk, self.k2 = 5120, 1152, 384, 6, k2
        rows = []
        self.keep: list[Tensor] = []
        for inputs, outputs in ((5120, 1152), (5120, 1152), (1152, 5120)):
            slab = torch.randint(-32768, 32768, (self.experts, inputs // 16, outputs // 16, 8 * k2), dtype=torch.int16, device=DEVICE)
            su, sv = scales(self.experts * inputs).view(self.experts, -1), (scales(self.experts * outputs).float() / inputs**0.5).half().view(self.experts, -1)
            self.keep += [slab, su, sv]
            rows.append([[slab[e].data_ptr(), su[e].data_ptr(), sv[e].data_ptr(), k2] for e in range(self.experts)])
        self.table = torch.tensor(rows, dtype=torch.int64, device=DEVICE)

    def calls(self, lib: Library, tokens: int, plan: tuple[int, ...], count: int = 12) -> list[Callable[[], None]]:
        torch.manual_seed(1)
        calls = []
        for _ in range(count):
            x = torch.randn(tokens, self.hidden, device=DEVICE).bfloat16()
            ids = torch.stack([torch.randperm(self.experts, device=DEVICE)[: self.topk] for _ in range(tokens)]).contiguous()
            weights = torch.rand(tokens, self.topk, device=DEVICE)
            y = torch.empty(tokens, self.hidden, dtype=torch.bfloat16, device=DEVICE)
            self.keep += [x, ids, weights, y]
            args = Experts(
                x.data_ptr(), x.stride(0), ids.data_ptr(), weights.data_ptr(), self.table.data_ptr(), y.data_ptr(), y.stride(0),
                8, tokens, self.topk, self.experts, 0, 0, self.hidden, self.inter, 0, self.k2, 10.0, *plan,
            )  # fmt: skip
            calls.append(lambda args=args: lib.experts(args))
        return calls


def sweep_experts(lib: Library, rates: tuple[int, ...] = (6, 4)) -> None:
    for k2 in rates:
        bench = Bench(k2)
        for tokens in (1, 2, 4, 8):
            table = {}
            best = BASE
            for a in A_PLANS[1 if tokens < 4 else 4]:
                table[(*a, *BASE[3:])] = graph_us(bench.calls(lib, tokens, (*a, *BASE[3:])), 3)
            best = min(table, key=lambda p: table[p])
            for b in B_PLANS:
                plan = (*best[:3], *b)
                table[plan] = graph_us(bench.calls(lib, tokens, plan), 3)
            order = sorted(table, key=lambda p: table[p])
            RESULTS[f"experts k2={k2} T={tokens}"] = [[list(p), round(table[p], 2)] for p in order]
            peer = PEER[k2][tokens]
            print(f"experts k2={k2} T={tokens}: {table[order[0]]:.1f} us ({peer / table[order[0]]:.2f}x)", " ".join(f"{p}:{table[p]:.1f}" for p in order[:4]), f"worst {table[order[-1]]:.1f}", flush=True)  # fmt: skip


DENSE = {
    "wq_a": (5120, 1280, 10), "wkv": (5120, 512, 10), "wq_b": (1280, 16384, 10), "wo_a": (4096, 1024, 10),
    "wo_b": (4096, 5120, 10), "gate": (5120, 1152, 10), "down": (1152, 5120, 10), "head": (5120, 64640, 12),
}  # fmt: skip
PEER_DENSE = {
    "wq_a": (21.9, 22.0, 23.3), "wkv": (21.6, 21.8, 23.6), "wq_b": (20.8, 21.5, 24.4), "wo_a": (20.2, 20.3, 21.7),
    "wo_b": (26.0, 26.1, 27.0), "gate": (21.7, 21.9, 23.5), "down": (14.1, 14.3, 15.0), "head": (261.0, 262.0, 262.0),
}  # fmt: skip


def copies(inputs: int, outputs: int, k2: int) -> list[Linear]:
    size = inputs * outputs * k2 / 16
    return [Linear(inputs, outputs, k2) for _ in range(max(2, min(40, int(150e6 / size))))]


def sweep_dense(lib: Library) -> None:
    for name, (inputs, outputs, k2) in DENSE.items():
        sets = copies(inputs, outputs, k2)
        for at, rows in enumerate((1, 4, 16)):
            table = {}
            x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
            y = torch.empty(rows, outputs, dtype=torch.bfloat16, device=DEVICE)
            for warps, chunks in ((4, 1), (4, 2), (8, 1), (8, 2), (8, 4)):
                for kblocks in (1, 2, 3, 4, 5, 8, 10, 16):
                    if kblocks > inputs // 128 or (name == "head" and kblocks < 5) or (rows > 8 and kblocks > 10):
                        continue
                    calls = [lambda s=[m.shard(x, y, chunks, kblocks)]: lib.group(s, rows, warps) for m in sets]  # type: ignore[misc]
                    table[(warps, chunks, kblocks)] = graph_us(calls, 3)
            order = sorted(table, key=lambda p: table[p])
            RESULTS[f"dense {name} rows={rows}"] = [[list(p), round(table[p], 2)] for p in order]
            print(f"dense {name} rows={rows}: {table[order[0]]:.1f} us ({PEER_DENSE[name][at] / table[order[0]]:.2f}x)", " ".join(f"{p}:{table[p]:.1f}" for p in order[:4]), f"worst {table[order[-1]]:.1f}", flush=True)  # fmt: skip


def time_layer(lib: Library, plans: dict[str, tuple[int, int]] | None = None) -> None:
    """All linears of one layer at 4 rows, as one graph: 5 launches beside the peer's 11 (231 us)."""
    plans = plans or {}
    rows = 4
    pick = {"wq_a": (1, 4), "wkv": (1, 4), "wq_b": (1, 5), "wo_a": (1, 4), "wo_b": (1, 8), "gate": (1, 4), "down": (1, 5), **plans}
    layers = 6
    calls = []
    hold = []

    def launch(parts: list[tuple[str, Tensor]]) -> None:
        shards = []
        for name, x in parts:
            inputs, outputs, k2 = DENSE[name]
            linear = Linear(inputs, outputs, k2)
            y = torch.empty(rows, outputs, dtype=torch.bfloat16, device=DEVICE)
            hold.append((linear, y, x))
            shards.append(linear.shard(x, y, *pick[name]))
        calls.append(lambda: lib.group(shards, rows))

    for _ in range(layers):
        def x(n: int) -> Tensor:
            return torch.randn(rows, n, device=DEVICE).bfloat16()

        shared, mid = x(5120), x(5120)
        launch([("wq_a", shared), ("wkv", shared)])
        launch([("wq_b", x(1280))])
        launch([("wo_a", x(4096)) for _ in range(4)])
        launch([("wo_b", x(4096))])
        launch([("gate", mid), ("gate", mid)])
        launch([("down", x(1152))])
    us = graph_us(calls) * len(calls) / layers
    RESULTS["layer rows=4"] = us
    print(f"layer's linears, rows=4: {us:.1f} us (peer 231: {231 / us:.2f}x)")


# ---- stress, small, profile ---------------------------------------------------------------------


def stress(lib: Library, seconds: float = 10.0, replays: int = 10000) -> None:
    layer = Layer(16, 512, 384, [6, 4], True)
    linear = Linear(1280, 640, 10)

    def work(scratch: Tensor, counters: Tensor, seed: int) -> tuple[Callable[[], None], list[Tensor]]:
        torch.manual_seed(seed)
        x = torch.randn(4, 512, device=DEVICE).bfloat16()
        ids = torch.stack([torch.randperm(16, device=DEVICE)[:4] for _ in range(4)]).contiguous()
        weights = torch.rand(4, 4, device=DEVICE)
        y = poison(4, 512, torch.float32)
        u, v = torch.randn(4, 1280, device=DEVICE).bfloat16(), poison(4, 640, torch.float32)
        args, shard = layer.args(x, ids, weights, y, (8, 2, 1, 8, 1)), linear.shard(u, v, 1, 2)

        def call() -> None:
            lib.experts(args, scratch, counters)
            lib.group([shard], 4, 8, scratch, counters)

        return call, [y, v, x, ids, weights, u]

    call, tensors = work(lib.scratch, lib.counters, 5)
    call()
    torch.cuda.synchronize()
    first = [t.clone() for t in tensors[:2]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(replays):
        tensors[0].fill_(float("nan"))
        tensors[1].fill_(float("nan"))
        graph.replay()
        different += (tensors[0] != first[0]).any().long() + (tensors[1] != first[1]).any().long()
    print(f"{replays} graph replays, different:", int(different))

    streams = [torch.cuda.Stream() for _ in range(2)]
    jobs = []
    for i, s in enumerate(streams):
        with torch.cuda.stream(s):
            scratch = torch.full((1 << 24,), 0x7F, dtype=torch.uint8, device=DEVICE)
            counters = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
            one, kept = work(scratch, counters, 7 + i)
            one()
            s.synchronize()
            jobs.append((s, one, kept, [t.clone() for t in kept[:2]], counters, scratch))
    torch.cuda.synchronize()
    bad = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in jobs]
    rounds, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for (s, one, kept, want, _, _), count in zip(jobs, bad, strict=True):
            with torch.cuda.stream(s):
                for _ in range(20):
                    one()
                    count += (kept[0] != want[0]).any().long() + (kept[1] != want[1]).any().long()
        rounds += 20
        if rounds % 2000 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    print(f"two streams, {seconds:.0f} s, {rounds} rounds each, different:", [int(b) for b in bad], "counters zero:", all(not bool(j[4].any()) for j in jobs))


def small(lib: Library) -> None:
    torch.manual_seed(3)
    for k2, codebook in ((4, 0), (6, 0), (8, 0), (10, 0), (12, 0), (16, 0), (5, 0), (6, 1)):
        linear = Linear(256, 256, k2, codebook)
        for rows in (3, 11):
            x = torch.randn(rows, 256, device=DEVICE).bfloat16()
            y = poison(rows, 256, torch.float32)
            lib.group([linear.shard(x, y, 1, 1), linear.shard(x, y, 2, 2)], rows, 4)
        lib.decode(linear.trellis, k2, codebook)
    layer = Layer(6, 256, 256, [6, 4, 5], True)
    for tokens in (2, 10):
        x = torch.randn(tokens, 256, device=DEVICE).bfloat16()
        ids = torch.randint(-1, 7, (tokens, 3), device=DEVICE)
        y = poison(tokens, 256, torch.float32)
        weights = torch.rand(tokens, 3, device=DEVICE)
        lib.experts(layer.args(x, ids, weights, y, (4, 2, 1, 4, 1)))
        torch.cuda.synchronize()
    print("small: ran")


def profile(lib: Library, plan: tuple[int, ...], rates: tuple[int, ...], tokens: int) -> None:
    for k2 in rates:
        bench = Bench(k2)
        calls = bench.calls(lib, tokens, plan, 1)
        for call in calls:
            call()
        ids = bench.keep[-3]
        print("profiled", k2, tokens, "unique", len(set(ids.flatten().tolist())))
        torch.cuda.synchronize()


def main() -> None:
    lib = Library(os.path.abspath(sys.argv[1]))
    torch.manual_seed(0)
    for step in sys.argv[2:]:
        began = time.monotonic()
        print(f"--- {step}", flush=True)
        if step == "right":
            right_decode(lib)
            right_dense(lib)
            right_experts(lib)
        elif step == "sweep":
            sweep_experts(lib)
            sweep_dense(lib)
        elif step == "experts":
            sweep_experts(lib)
        elif step == "dense":
            sweep_dense(lib)
        elif step == "layer":
            time_layer(lib)
        elif step == "stress":
            stress(lib)
        elif step == "small":
            small(lib)
        elif step.startswith("profile:"):
            # profile:K2,TOKENS,PLAN (five numbers)
            k2, tokens, *plan = (int(v) for v in step.split(":")[1].split(","))
            profile(lib, tuple(plan), (k2,), tokens)
        else:
            sys.exit(f"no step {step}")
        torch.cuda.synchronize()
        print(f"--- {step}: {time.monotonic() - began:.1f} s", flush=True)
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], "exl3_check.json").write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
