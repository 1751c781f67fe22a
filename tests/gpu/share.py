"""What collectives take of an engine's steps, counted within a rank (watch.py).

On a GPU the profiler's kernels of NCCL, so also those replayed in CUDA graphs; on a CPU the calls
of vLLM's group. Both hold the waiting for the other rank, as a step does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

#: How kernels of collectives are named: NCCL's, and vLLM's own, which must not be among them.
KERNELS = ("nccl", "cross_device_reduce", "multimem")
CALLS = ("_all_reduce_out_place", "_all_gather_out_place", "_reduce_scatter_out_place")


class Counter:
    """Counts from its making to ``stop``."""

    def __init__(self) -> None:
        import torch

        self.seconds: dict[str, float] = defaultdict(float)
        self.times: dict[str, int] = defaultdict(int)
        self.profile: Any = None
        self.put_back: list[Callable[[], None]] = []
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            activity = torch.profiler.ProfilerActivity.CUDA
            self.profile = torch.profiler.profile(activities=[activity])
            self.profile.start()
        else:
            from vllm.distributed.parallel_state import GroupCoordinator

            for name in CALLS:
                self._time(GroupCoordinator, name)
        self.began = time.monotonic()

    def stop(self) -> dict[str, Any]:
        """``seconds`` of all, of the collectives and of all kernels; how many, by name."""
        import torch

        busy = None
        if self.profile is not None:
            torch.cuda.synchronize()
        whole = time.monotonic() - self.began
        for each in self.put_back:
            each()
        if self.profile is not None:
            self.profile.stop()
            busy = 0.0
            for event in self.profile.key_averages():
                took = event.self_device_time_total / 1e6
                busy += took
                if any(word in event.key.lower() for word in KERNELS):
                    self.seconds[event.key[:80]] += took
                    self.times[event.key[:80]] += event.count
        return {
            "seconds": whole,
            "collective_seconds": sum(self.seconds.values()),
            "kernel_seconds": busy,
            "collectives": dict(self.times),
            "seconds_by_name": dict(self.seconds),
        }

    def _time(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.seconds[name] += time.perf_counter() - began
                self.times[name] += 1

        setattr(owner, name, timed)
        self.put_back.append(lambda: setattr(owner, name, call))
