"""Device time of calls, by replays of one CUDA graph that holds them all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

RUNS = 7


def graph_us(calls: Sequence[Callable[[], Any]], runs: int = RUNS) -> list[float]:
    """Microseconds a call, of each of ``runs`` replays. ``calls`` should differ in what they read,
    and read more than a cache holds between two uses of the same."""
    import torch

    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return found


def copy_ceiling(runs: int = RUNS) -> float:
    """Bytes read and written a second by a copy of 2 GiB; eager, a graph's copy node is slower."""
    import torch

    a = torch.empty(1 << 30, dtype=torch.int16, device="cuda")
    b = torch.empty_like(a)
    found = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        found.append(2 * a.nbytes / begin.elapsed_time(end) * 1e3)
    return statistics.median(found[1:])
