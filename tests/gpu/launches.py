"""How many kernels a decode step launches, counted within an engine's worker (watch.py).

The profiler names every kernel, copy and fill on the GPU, those of replayed CUDA graphs, too. A
reply of LONG tokens less one of SHORT is that many decode steps: what the prompt, the first token
and the reply's end launch falls out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

SHORT, LONG = 8, 40
#: What the steps of this package are named in an engine's answers.
NAMES = {SHORT: "launches-short", LONG: "launches-long"}


class Launches:
    """Counts from its making to ``stop``; nothing where there is no GPU."""

    def __init__(self) -> None:
        import torch

        self.profile: Any = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            activity = torch.profiler.ProfilerActivity.CUDA
            self.profile = torch.profiler.profile(activities=[activity])
            self.profile.start()
        self.began = time.monotonic()

    def stop(self) -> dict[str, Any]:
        """``count`` of all, ``busy_us`` of all, ``by_name``: ``[count, us]``."""
        import torch

        whole = time.monotonic() - self.began
        if self.profile is None:
            return {"seconds": whole, "count": 0, "busy_us": 0.0, "by_name": {}}
        torch.cuda.synchronize()
        whole = time.monotonic() - self.began
        self.profile.stop()
        found = {
            event.key[:120]: [event.count, round(event.self_device_time_total, 1)]
            for event in self.profile.key_averages()
            if event.self_device_time_total > 0
        }
        return {
            "seconds": whole,
            "count": sum(count for count, _ in found.values()),
            "busy_us": sum(us for _, us in found.values()),
            "by_name": found,
        }


def steps(prompt: Sequence[int]) -> list[dict[str, Any]]:
    """What an engine is asked: both replies once before they are counted, so that nothing is
    compiled in between."""
    plan = []
    for counted in (False, True):
        for length, name in NAMES.items():
            reply = {"do": "generate", "name": "_", "prompts": [list(prompt)], "logprobs": 1,
                     "max_tokens": length, "keep_cache": False}  # fmt: skip
            begin = {"do": "probe_launches", "name": "_", "args": [True]}
            end = {"do": "probe_launches", "name": name, "args": [False]}
            plan += [begin, reply, end] if counted else [reply]
    return plan


def a_step(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Launches and their microseconds of one decode step, in all and of the kernels that take the
    most, from an engine's answers to ``steps``."""
    short, long = (_first(answers[name]) for name in NAMES.values())
    decoded = LONG - SHORT
    counts: Counter[str] = Counter()
    us: Counter[str] = Counter()
    for sign, found in ((1, long), (-1, short)):
        for name, (count, took) in found["by_name"].items():
            counts[name] += sign * count
            us[name] += sign * took
    return {
        "launches": round((long["count"] - short["count"]) / decoded, 2),
        "busy_us": round((long["busy_us"] - short["busy_us"]) / decoded, 1),
        "kernels": {
            name: [round(counts[name] / decoded, 2), round(us[name] / decoded, 2)]
            for name, _ in us.most_common(24)
        },
    }


def _first(answer: Any) -> Any:
    """Of the first rank, where an answer is one of each."""
    return answer[0] if isinstance(answer, list) else answer
