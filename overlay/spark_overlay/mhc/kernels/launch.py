"""The mHC operations on a GPU, called as vLLM calls its own.

Arguments are checked; a shape the kernels do not compute is an error, never another path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from spark_overlay.exl3.cuda.workspace import counters
from spark_overlay.mhc import plan
from spark_overlay.mhc.kernels.fused import one_launch
from spark_overlay.mhc.kernels.split import coefficients_and_norm, streams_and_projection
from spark_overlay.mhc.plan import COLUMNS, MIXES, ONE_LAUNCH, STREAMS, PlanError

#: Columns that a program of one row takes at once; rows and warps of one that makes coefficients.
CHUNK = 1024
MIX_ROWS, MIX_WARPS = 128, 4


@dataclass(frozen=True)
class Numbers:
    """What the model's config gives: epsilons of the projection's norm, of the pre-mix, of
    Sinkhorn's sums and of the input's norm, the post mixes' gain, Sinkhorn's iterations."""

    rms_eps: float
    pre_eps: float
    sinkhorn_eps: float
    post_gain: float
    iterations: int
    norm_eps: float


@dataclass(frozen=True)
class Work:
    """Everything of one call. ``x [T, H]``: the sublayer's output where ``post`` is given, else the
    projection's own input, else None; ``streams [T, 4, H]``; outputs likewise. None: not asked."""

    x: Tensor | None
    residual: Tensor
    post: Tensor | None
    comb: Tensor | None
    pre: Tensor | None
    fn: Tensor
    scale: Tensor
    base: Tensor
    weight: Tensor | None
    streams: Tensor | None
    post_out: Tensor
    comb_out: Tensor
    input_out: Tensor
    pre_out: Tensor
    mean_out: Tensor | None

    @property
    def tokens(self) -> int:
        return self.residual.shape[0]

    @property
    def hidden(self) -> int:
        return self.residual.shape[2]

    @property
    def sources(self) -> int:
        """Streams that the projection reads: 4, or 1 where it has its own input."""
        return self.fn.shape[1] // self.hidden


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise PlanError(f"mHC on a GPU: {what}")


def _tensor(name: str, value: Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    if value is not None:
        _need(
            value.dtype == dtype and value.is_contiguous() and value.numel() == _product(shape),
            f"{name} is {list(value.shape)} {value.dtype}, needed {list(shape)} {dtype}, "
            "contiguous",
        )


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def check(work: Work) -> None:
    """Raise PlanError for a tensor that is not as the kernels read it."""
    bf16, fp32 = torch.bfloat16, torch.float32
    _need(work.residual.dim() == 3 and work.residual.shape[1] == STREAMS, "4 streams are needed")
    tokens, hidden, sources = work.tokens, work.hidden, work.sources
    # Offsets within a tensor are 32-bit.
    _need(tokens * STREAMS * hidden < 1 << 31, f"{tokens} rows in one call are too many")
    _tensor("residual", work.residual, bf16, tokens, STREAMS, hidden)
    _tensor("x", work.x, bf16, tokens, hidden)
    _tensor("post", work.post, fp32, tokens, STREAMS)
    _tensor("comb", work.comb, fp32, tokens, STREAMS, STREAMS)
    _tensor("pre_mix", work.pre, fp32, tokens, STREAMS)
    _need(work.fn.dtype in (fp32, bf16), f"fn is {work.fn.dtype}, needed float32 or bfloat16")
    _tensor("fn", work.fn, work.fn.dtype, MIXES, sources * hidden)
    _need(sources in (1, STREAMS), f"fn {list(work.fn.shape)} does not fit streams of {hidden}")
    _need(sources == STREAMS or (work.x is not None and work.post is None), "fn needs its own x")
    _tensor("hc_scale", work.scale, fp32, 3)
    _tensor("hc_base", work.base, fp32, MIXES)
    _tensor("norm_weight", work.weight, bf16, hidden)


def run(
    work: Work, numbers: Numbers, geometry: plan.OneLaunch | plan.TwoLaunches | None = None
) -> None:
    """Fill the outputs. ``geometry``: another than the plan's, for measurements and tests."""
    check(work)
    if work.tokens == 0:
        return
    if geometry is None:
        by_rows = plan.one_launch if work.tokens <= ONE_LAUNCH else plan.two_launches
        geometry = by_rows(work.tokens, work.hidden)
    geometry.check(work.hidden)
    if isinstance(geometry, plan.OneLaunch):
        _in_one(work, numbers, geometry)
    else:
        _in_two(work, numbers, geometry)


def _some(value: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's argument is a pointer even where it reads none."""
    return other if value is None else value


def _counters(work: Work, groups: int) -> Tensor:
    device = work.residual.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return counters(device).of(("mhc", work.fn.data_ptr(), stream), groups)


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
        room, room[shares:], _counters(work, groups), tokens, numbers.rms_eps, numbers.pre_eps,
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
