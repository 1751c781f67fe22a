"""Which GPUs start a launch while the one before it on the stream ends.

A Triton kernel for it has ``EARLY: tl.constexpr = False``, and where that is set
``gdc_launch_dependents`` lets the launch after it start, ``gdc_wait`` waits for the one before it:
before the wait nothing is read that a launch writes, and nothing is written. The launch that is to
start early itself is given ``launch_pdl=True``.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def starts_early(device: torch.device) -> bool:
    """Whether ``device`` can: an NVIDIA GPU from SM90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
