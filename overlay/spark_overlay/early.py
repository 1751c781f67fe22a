"""Which GPUs start a launch while the one before it on the stream ends.

A Triton kernel for it has ``EARLY: tl.constexpr = False``, and where that is set
``gdc_launch_dependents`` lets the launch after it start, ``gdc_wait`` waits for the one before it:
before the wait nothing is read that a launch writes, and nothing is written. The launch that is to
start early itself is given ``launch_pdl=True``.

Measured on SM90; SM100 is its like. On SM120 others saw captures of graphs fail with it: not there
unless ``SPARK_EARLY_STARTS=1`` asks for it; 0 forbids it. csrc/common/launch.hpp has the same rule.
"""

from __future__ import annotations

import os
from functools import cache

import torch

ASKED = "SPARK_EARLY_STARTS"


@cache
def starts_early(device: torch.device) -> bool:
    """Whether launches on ``device`` do."""
    if device.type != "cuda":
        return False
    major, asked = torch.cuda.get_device_capability(device)[0], os.environ.get(ASKED)
    return major in (9, 10) if asked is None else major >= 9 and asked.startswith("1")
