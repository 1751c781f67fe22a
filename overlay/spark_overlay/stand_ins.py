"""Modules of vLLM that are not to be imported, and what stands in their place (hooks.py)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from spark_overlay.versions import installed


class HookError(RuntimeError):
    """vLLM is not what a hook expects."""


@dataclass(frozen=True)
class StandIn:
    """A module of vLLM that is not to be imported: ``replacement`` stands in its place. It has the
    ``names`` that are asked of it."""

    module: str
    names: tuple[str, ...]
    replacement: str
    reason: str

    def check(self) -> None:
        if find_spec(self.module) is None:
            raise HookError(f"vLLM {installed()} has no module {self.module}; {self.reason}")
        ours = import_module(self.replacement)
        if lacking := [name for name in self.names if not hasattr(ours, name)]:
            raise HookError(f"{self.replacement} has no {', '.join(lacking)}")
        if sys.modules.get(self.module) not in (None, ours):
            raise HookError(f"{self.module} was imported before the overlay's; {self.reason}")

    def apply(self) -> None:
        ours = sys.modules[self.module] = import_module(self.replacement)
        parent, _, name = self.module.rpartition(".")
        setattr(import_module(parent), name, ours)


_MHC = "vllm.model_executor.kernels.mhc"
_WARM_UP = (
    "a decoder layer registers TileLang's kernels for warm-up, which imports TileLang and compiles "
    "what nothing calls"
)
STAND_INS = (
    StandIn(
        f"{_MHC}.tilelang_kernels",
        ("mhc_fused_post_pre_splits",),
        "spark_overlay.mhc.kernels.warmup",
        _WARM_UP,
    ),
    StandIn(
        f"{_MHC}.warmup",
        ("MHC_PRE_NORM_KERNEL",),
        "spark_overlay.mhc.kernels.warmup",
        _WARM_UP,
    ),
)
