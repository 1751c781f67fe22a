"""The mHC operations on a GPU, called as vLLM calls its own.

Arguments are checked; a shape the kernels do not compute is an error, never another path.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from spark_overlay.exl3.cuda.workspace import counters
from spark_overlay.mhc import plan
from spark_overlay.mhc.kernels import launch_cuda, library
from spark_overlay.mhc.kernels.fused import one_launch
from spark_overlay.mhc.kernels.split import coefficients_and_norm, streams_and_projection
from spark_overlay.mhc.kernels.work import Numbers, Work, check, counters_of
from spark_overlay.mhc.plan import COLUMNS, ONE_LAUNCH, Geometry

#: Columns that a program of one row takes at once; rows and warps of one that makes coefficients.
CHUNK = 1024
MIX_ROWS, MIX_WARPS = 128, 4


def run(work: Work, numbers: Numbers, geometry: Geometry | None = None) -> None:
    """Fill the outputs. ``geometry``: another than the plan's, for measurements and tests."""
    check(work)
    if work.tokens == 0:
        return
    asked = geometry or _geometry(work)
    asked.check(work.hidden)
    if isinstance(asked, plan.Slices):
        if geometry:  # else it has been asked whether the library serves it
            launch_cuda.require(work, asked)
        launch_cuda.run(work, numbers, asked)
    elif isinstance(asked, plan.OneLaunch):
        _in_one(work, numbers, asked)
    else:
        _in_two(work, numbers, asked)


def _geometry(work: Work) -> Geometry:
    """By rows; of few the CUDA library's, where it is and can."""
    if work.tokens > ONE_LAUNCH:
        return plan.two_launches(work.tokens, work.hidden)
    slices = plan.slices(work.tokens)
    if work.residual.is_cuda and library.present() and launch_cuda.serves(work, slices):
        return slices
    return plan.one_launch(work.tokens, work.hidden)


def _some(value: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's argument is a pointer even where it reads none."""
    return other if value is None else value


def constants_of_one(
    at: plan.OneLaunch, hidden: int, iterations: int, bytes_each: int
) -> dict[str, int]:
    """What ``one_launch`` is compiled for, besides the call's kind; ``bytes_each``: of the weight's
    values, 4 or 2."""
    return {
        "ITERATIONS": iterations,
        "ROWS": at.rows,
        "TILE_N": at.tile_n,
        "SPLITS": at.splits,
        "BLOCK": at.block,
        "LOADS": at.loads,
        "LIMBS": at.limbs if bytes_each == 4 else 1,
        "M": at.m,
        "N": at.n,
        "FOLD": at.fold,
        "CHUNK": _chunk(hidden),
        "STAGES": at.stages,
        "PARTS": _parts(hidden),
    }


def constants_of_two(at: plan.TwoLaunches, bytes_each: int) -> dict[str, int]:
    """The same of ``streams_and_projection``."""
    return {
        "ROWS": at.rows,
        "SPLITS": at.splits,
        "BLOCK": at.block,
        "LIMBS": at.limbs if bytes_each == 4 else 1,
        "STAGES": at.stages,
    }


def constants_of_finish(at: plan.TwoLaunches, hidden: int, iterations: int) -> dict[str, int]:
    """The same of ``coefficients_and_norm``."""
    return {
        "ITERATIONS": iterations,
        "SPLITS": at.splits,
        "MIX_ROWS": MIX_ROWS,
        "CHUNK": _chunk(hidden),
    }


def _in_one(work: Work, numbers: Numbers, at: plan.OneLaunch) -> None:
    groups, tokens = at.groups(work.tokens), work.tokens
    shares = groups * at.splits * at.rows * COLUMNS
    room = work.residual.new_empty(shares + groups * at.rows * COLUMNS, dtype=torch.float32)
    one_launch[(at.programs(tokens),)](
        _some(work.x, work.residual), work.residual, _some(work.post, work.scale),
        _some(work.comb, work.scale), _some(work.pre, work.scale), work.fn, work.scale, work.base,
        _some(work.weight, work.residual), _some(work.streams, work.input_out), work.post_out,
        work.comb_out, work.input_out, work.pre_out, _some(work.mean_out, work.input_out),
        room, room[shares:], counters_of(work, groups), tokens, numbers.rms_eps, numbers.pre_eps,
        numbers.sinkhorn_eps, numbers.post_gain, numbers.norm_eps,
        H=work.hidden, SOURCES=work.sources, POST=work.post is not None,
        PRE=work.pre is not None, NORM=work.weight is not None, MEAN=work.mean_out is not None,
        **constants_of_one(at, work.hidden, numbers.iterations, work.fn.element_size()),
        num_warps=at.warps, enable_fp_fusion=True,
    )  # fmt: skip


def _in_two(work: Work, numbers: Numbers, at: plan.TwoLaunches) -> None:
    tokens, hidden = work.tokens, work.hidden
    shares = work.residual.new_empty(at.splits * COLUMNS * tokens, dtype=torch.float32)
    if work.residual.device.type == "cuda":
        # A graph of fewer rows, captured later, finds its counters.
        counters(work.residual.device).reserve()
    streams_and_projection[(triton.cdiv(tokens, at.rows), at.splits)](
        _some(work.x, work.residual), work.residual, _some(work.post, work.scale),
        _some(work.comb, work.scale), _some(work.pre, work.scale), work.fn,
        _some(work.streams, work.input_out), work.input_out, _some(work.mean_out, work.input_out),
        shares, tokens,
        H=hidden, SOURCES=work.sources, POST=work.post is not None, PRE=work.pre is not None,
        MEAN=work.mean_out is not None, **constants_of_two(at, work.fn.element_size()),
        num_warps=at.warps, enable_fp_fusion=True,
    )  # fmt: skip
    norms = tokens if work.weight is not None else 0
    coefficients_and_norm[(triton.cdiv(tokens, MIX_ROWS) + norms,)](
        shares, work.scale, work.base, _some(work.weight, work.residual), work.post_out,
        work.comb_out, work.pre_out, work.input_out, tokens, numbers.rms_eps, numbers.pre_eps,
        numbers.sinkhorn_eps, numbers.post_gain, numbers.norm_eps,
        H=hidden, SOURCES=work.sources, NORM=work.weight is not None,
        **constants_of_finish(at, hidden, numbers.iterations),
        num_warps=MIX_WARPS, enable_fp_fusion=True,
    )  # fmt: skip


def _chunk(hidden: int) -> int:
    """Columns a row program takes at once."""
    return min(CHUNK, triton.next_power_of_2(hidden))


def _parts(hidden: int) -> int:
    """Chunks of a row, as a power of two."""
    return triton.next_power_of_2(triton.cdiv(hidden, _chunk(hidden)))
