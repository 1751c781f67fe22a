"""vLLM's CPU router entry, answered by the torch reference."""

from __future__ import annotations

from torch import Tensor

from spark_overlay.router.reference import sqrt_softplus_top_k


def biased_top_k(
    hidden_states: Tensor,
    gating_output: Tensor,
    correction_bias: Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    num_fused_shared_experts: int,
    routed_scaling_factor: float | None,
    apply_routed_scaling_factor_on_output: bool,
) -> tuple[Tensor, Tensor]:
    """Weights float32 and experts int32, both ``[T, topk]``."""
    if scoring_func != "sqrtsoftplus" or not renormalize or num_fused_shared_experts:
        raise NotImplementedError(
            f"the overlay's router is V4.1's (sqrtsoftplus, renormalised); found {scoring_func}, "
            f"renormalize={renormalize}, {num_fused_shared_experts} fused shared experts"
        )
    scaling = routed_scaling_factor if apply_routed_scaling_factor_on_output else None
    return sqrt_softplus_top_k(gating_output, correction_bias, topk, scaling or 1.0)
