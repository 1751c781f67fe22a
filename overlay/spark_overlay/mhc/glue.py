"""vLLM's mHC entry points, answered by the torch reference. Same names, parameters and results."""

from __future__ import annotations

from torch import Tensor

from spark_overlay.attention.reference import rms_norm
from spark_overlay.mhc.reference import collapse, expand, mixes


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
    mix = mixes(
        residual.flatten(1) if x is None else x,
        fn,
        hc_scale,
        hc_base,
        rms_eps=rms_eps,
        pre_eps=hc_pre_eps,
        sinkhorn_eps=hc_sinkhorn_eps,
        post_gain=hc_post_mult_value,
        iterations=sinkhorn_repeat,
    )
    layer_input = collapse(residual, pre_mix)
    if norm_weight is not None:
        layer_input = rms_norm(layer_input, norm_weight, norm_eps).to(residual.dtype)
    return mix.post.unsqueeze(-1), mix.residual, layer_input.contiguous(), mix.next_pre


def post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """Write a sublayer's output back to the streams: ``[T, S, H]``."""
    return expand(x, residual, post_layer_mix.squeeze(-1), comb_res_mix)


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
    streams = post(x, residual, post_layer_mix, comb_res_mix)
    aux = (
        streams.float().mean(1).to(streams.dtype)
        if capture_aux
        else streams.new_empty(0, streams.shape[-1])
    )
    read = pre_delayed(
        streams,
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        pre_mix=pre_mix,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
    )
    return (streams, *read, aux)


def collapse_streams(x: Tensor, pre_mix: Tensor) -> Tensor:
    """``[T, S, H]``, ``[T, S]`` -> ``[T, H]``."""
    return collapse(x, pre_mix)
