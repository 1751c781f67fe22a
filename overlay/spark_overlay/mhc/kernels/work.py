"""One call of mHC: its tensors, its numbers, and what of them the kernels need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spark_overlay.exl3.cuda.workspace import counters
from spark_overlay.mhc.plan import MIXES, STREAMS, PlanError


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


def counters_of(work: Work, groups: int) -> Tensor:
    """A zero for each group of rows, which a launch leaves so."""
    device = work.residual.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return counters(device).of(("mhc", work.fn.data_ptr(), stream), groups)
