"""How a Triton kernel of ours is compiled without a GPU: what overlay/benchmarks/triton_check.py
asks of each package's ``compiled.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """``signature``: Triton's type of every argument that is no constant (``*fp32``, ``i32``);
    ``plain``: those of them that need not be multiples of 16. ``spills``: bytes that a thread may
    store and load besides, with the reason where it is set. ``since``: the oldest GPU it is for."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    plain: tuple[str, ...] = field(default=())
    spills: int = 0
    since: int = 80
