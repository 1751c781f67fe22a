"""mHC of few rows by the CUDA library: the same results as Triton's one launch, sooner."""

from __future__ import annotations

import torch

from spark_overlay.mhc.kernels import library
from spark_overlay.mhc.kernels.work import Numbers, Work, counters_of
from spark_overlay.mhc.plan import STREAMS, PlanError, Slices


def serves(work: Work, at: Slices) -> bool:
    """Whether the library computes such a call: streams that are projected by a float32 weight."""
    few = work.tokens <= library.MOST_TOKENS and work.hidden <= library.MOST_HIDDEN
    whole = work.sources == STREAMS and work.fn.dtype == torch.float32
    tensors = (value for value in vars(work).values() if value is not None)
    aligned = all(value.data_ptr() % 16 == 0 for value in tensors)
    return few and whole and aligned and work.hidden % at.columns == 0


def require(work: Work, at: Slices) -> None:
    """Raise PlanError for what the library does not serve."""
    if not serves(work, at):
        raise PlanError(
            f"mHC's CUDA library at {at}: {work.tokens} rows of {work.hidden}, fn {work.fn.dtype} "
            f"over {work.sources} streams; needed: up to {library.MOST_TOKENS} rows, a multiple of "
            f"{at.columns} up to {library.MOST_HIDDEN}, float32 over {STREAMS}, all at 16 bytes"
        )


def run(work: Work, numbers: Numbers, at: Slices) -> None:
    """Fill the outputs, as ``launch.run``, of a call that the library serves."""
    groups = at.groups(work.tokens)
    device = work.residual.device
    shares = work.residual.new_empty(at.shares(work.tokens, work.hidden), dtype=torch.float32)

    def of(value: torch.Tensor | None) -> int | None:
        return None if value is None else value.data_ptr()

    args = library.Args(
        x=None if work.post is None else of(work.x),
        residual=of(work.residual),
        post=of(work.post),
        comb=of(work.comb),
        pre=of(work.pre),
        fn=of(work.fn),
        scale=of(work.scale),
        base=of(work.base),
        weight=of(work.weight),
        streams=of(work.streams),
        input=of(work.input_out),
        mean=of(work.mean_out),
        post_out=of(work.post_out),
        comb_out=of(work.comb_out),
        pre_out=of(work.pre_out),
        shares=of(shares),
        counters=of(counters_of(work, groups)),
        tokens=work.tokens,
        hidden=work.hidden,
        rows=at.rows,
        columns=at.columns,
        iterations=numbers.iterations,
        early=1,
        rms_eps=numbers.rms_eps,
        pre_eps=numbers.pre_eps,
        sinkhorn_eps=numbers.sinkhorn_eps,
        post_gain=numbers.post_gain,
        norm_eps=numbers.norm_eps,
    )
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        library.load().one_launch(args, stream)
