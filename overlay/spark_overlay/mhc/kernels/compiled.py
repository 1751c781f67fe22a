"""mHC's kernels as served at V4.1's dimensions, for overlay/benchmarks/triton_check.py."""

from __future__ import annotations

from typing import Any

from spark_overlay.compiled import Compiled
from spark_overlay.mhc import plan
from spark_overlay.mhc.kernels import fused, launch, split, write_back

HIDDEN = 5120
_NUMBERS = ("rms_eps", "pre_eps", "sinkhorn_eps", "post_gain", "norm_eps")
_TYPES = {
    **dict.fromkeys(("x", "residual", "weight", "streams_out", "input_out", "mean_out"), "*bf16"),
    **dict.fromkeys(("post", "comb", "pre", "fn", "scale", "base", "partials", "totals"), "*fp32"),
    **dict.fromkeys(("post_out", "comb_out", "pre_out"), "*fp32"),
    **dict.fromkeys(_NUMBERS, "fp32"),
    "counters": "*i32",
    "tokens": "i32",
    "out": "*bf16",
}
_PLAIN = (*_NUMBERS, "tokens")


def _of(name: str, kernel: Any, constants: dict[str, Any], warps: int) -> Compiled:
    types = {one: _TYPES[one] for one in kernel.arg_names if one in _TYPES}
    return Compiled(name, kernel, types, constants, warps, plain=_PLAIN)


def kernels() -> list[Compiled]:
    model = {"H": HIDDEN, "SOURCES": 4, "POST": True, "PRE": True, "MEAN": False}
    found = []
    for rows in (4, 8, 16, 64):
        one = plan.one_launch(rows, HIDDEN)
        constants = {**model, **launch.constants_of_one(one, HIDDEN, 20, 4), "NORM": True}
        found.append(_of(f"mHC one_launch {rows} rows", fused.one_launch, constants, one.warps))
    for rows in (256, 2048):
        two = plan.two_launches(rows, HIDDEN)
        constants = {**model, **launch.constants_of_two(two, 4)}
        kernel = split.streams_and_projection
        found.append(_of(f"mHC streams_and_projection {rows} rows", kernel, constants, two.warps))
    finish = {
        "H": HIDDEN,
        "SOURCES": 4,
        "NORM": True,
        **launch.constants_of_finish(two, HIDDEN, 20),
    }
    kernel = split.coefficients_and_norm
    found.append(_of("mHC coefficients_and_norm", kernel, finish, launch.MIX_WARPS))
    shape = {"H": HIDDEN, "CHUNK": launch.CHUNK}
    found.append(_of("mHC write_back", write_back.write_back, shape, 4))
    return found
