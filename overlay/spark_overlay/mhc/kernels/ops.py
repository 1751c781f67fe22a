"""vLLM's mHC entry points on a GPU: same names, parameters and results, no TileLang."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from spark_overlay.mhc.kernels.launch import run
from spark_overlay.mhc.kernels.work import Numbers, Work
from spark_overlay.mhc.kernels.write_back import write_back
from spark_overlay.mhc.plan import STREAMS, PlanError

_TILE, _TILE_WARPS = 1024, 4


def pre_delayed(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None = None,
    x: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``-> post [T, S, 1], residual mix [T, S, S], layer input [T, H], next pre-mix [T, S]``."""
    work = _work(residual, fn, hc_scale, hc_base, pre_mix, norm_weight, x=x)
    run(
        work,
        Numbers(
            rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps
        ),
    )
    return work.post_out, work.comb_out, work.input_out, work.pre_out


def fused_post_pre_delayed(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    capture_aux: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One sublayer's write-back and the next one's read; also the streams' mean for a draft."""
    work = _work(
        residual,
        fn,
        hc_scale,
        hc_base,
        pre_mix,
        norm_weight,
        x=x,
        post=post_layer_mix,
        comb=comb_res_mix,
        streams=torch.empty_like(residual),
        mean=residual.new_empty(residual.shape[0], residual.shape[2]) if capture_aux else None,
    )
    run(
        work,
        Numbers(
            rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps
        ),
    )
    assert work.streams is not None
    mean = residual.new_empty(0, residual.shape[2]) if work.mean_out is None else work.mean_out
    return (work.streams, work.post_out, work.comb_out, work.input_out, work.pre_out, mean)


def post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """Write a sublayer's output back to the streams: ``[T, S, H]``."""
    tokens, streams, hidden = residual.shape
    given = (x, residual, post_layer_mix, comb_res_mix)
    if streams != STREAMS or not all(value.is_contiguous() for value in given):
        raise PlanError(
            f"mHC on a GPU: residual {list(residual.shape)}; 4 streams and contiguous tensors are "
            "needed"
        )
    out = torch.empty_like(residual)
    if tokens:
        write_back[(tokens, triton.cdiv(hidden, _TILE))](
            *given, out, H=hidden, CHUNK=_TILE, num_warps=_TILE_WARPS
        )
    return out


def _work(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    pre: Tensor | None,
    weight: Tensor | None,
    *,
    x: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    streams: Tensor | None = None,
    mean: Tensor | None = None,
) -> Work:
    tokens, count, hidden = residual.shape

    def empty(*shape: int) -> Tensor:
        return residual.new_empty(shape, dtype=torch.float32)

    return Work(
        x=x,
        residual=residual,
        post=post,
        comb=comb,
        pre=pre,
        fn=fn,
        scale=scale,
        base=base,
        weight=weight,
        streams=streams,
        post_out=empty(tokens, count, 1),
        comb_out=empty(tokens, count, count),
        input_out=residual.new_empty(tokens, hidden),
        pre_out=empty(tokens, count),
        mean_out=mean,
    )
