"""How long a reader of vLLM's shared-memory queue spins before it sleeps.

vLLM spins for a second after each message: the engine and both ranks each burn a core while one of
them works. With a core for each that saves microseconds a step; where there are fewer cores than
that, it takes them from the one that works. ``SPARK_SPINWAIT_MS`` shortens it.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast

VARIABLE = "SPARK_SPINWAIT_MS"
STOCK = shm_broadcast.SpinCondition


def seconds() -> float | None:
    """What the variable asks for, None for vLLM's own; raises ValueError for no number above 0."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    value = float(text) / 1000
    if not 0 < value <= 1:
        raise ValueError(f"{VARIABLE}={text}: milliseconds from above 0 to 1000")
    return value


class SpinCondition(STOCK):  # type: ignore[misc, valid-type]
    """vLLM's, with the asked-for time in place of its default of a second."""

    def __init__(
        self, is_reader: bool, context: Any, notify_address: str, busy_loop_s: float | None = None
    ) -> None:
        asked = seconds() if busy_loop_s is None else busy_loop_s
        super().__init__(is_reader, context, notify_address, 1.0 if asked is None else asked)
