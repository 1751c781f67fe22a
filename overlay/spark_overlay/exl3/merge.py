"""The shared expert in the routed experts' launches.

vLLM's runner computes the shared expert by itself, before the routed ones or on a stream of its
own, and adds it. With the kernels it is one more entry of their table: three launches and an
addition less in every layer. The runner then has none, and what it adds up over ranks holds it.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul, SiluAndMulWithClamp
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from spark_overlay.exl3 import cuda
from spark_overlay.exl3.experts import GATE, Exl3MoEMethod
from spark_overlay.exl3.linear import Exl3LinearMethod
from spark_overlay.stand_ins import HookError
from spark_overlay.versions import installed

#: What is read or set of vLLM's runner, which has no such option.
_RUNNER = ("_shared_experts", "_forward_entry", "_select_forward", "routed_experts")


def merge_shared_experts(model: nn.Module) -> int:
    """Hand every shared expert that can be merged to its layer's method; how many those were.

    After the weights are loaded and before they are processed. Raises HookError for a runner that
    is not as vLLM 0.33's."""
    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    return sum(_merge(runner) for runner in runners)


def _merge(runner: Any) -> bool:
    missing = [name for name in _RUNNER if not hasattr(runner, name)]
    if missing:
        raise HookError(
            f"vLLM {installed()}: its MoE runner has no {', '.join(missing)}; the overlay merges "
            "the shared expert there. Use a vLLM the overlay supports, or a newer overlay"
        )
    method, wrapper = runner.routed_experts.quant_method, runner._shared_experts
    if wrapper is None or not isinstance(method, Exl3MoEMethod):
        return False
    # As the method itself will decide, from where its own weights are.
    if not cuda.serves(getattr(runner.routed_experts, GATE).stacks[0].suh.device):
        return False
    if runner.routed_scaling_factor != 1.0 or not _alike(wrapper._layer, runner.routed_experts):
        return False
    method.shared = wrapper._layer
    runner._shared_experts = None
    runner._forward_entry = runner._select_forward()
    return True


def _alike(mlp: Any, routed: Any) -> bool:
    """Whether the shared expert is one more expert: packed, of the same size and activation, summed
    over ranks together with the others."""
    linears = [getattr(mlp, name, None) for name in ("gate_up_proj", "down_proj")]
    if any(not isinstance(getattr(one, "quant_method", None), Exl3LinearMethod) for one in linears):
        return False
    gate_up, down = (list(one.exl3) for one in linears)
    first = getattr(routed, GATE).stacks[0]
    size = (first.in_features, first.out_features)
    same = [(stack.in_features, stack.out_features) for stack in gate_up] == [size, size]
    same = same and [(s.in_features, s.out_features) for s in down] == [size[::-1]]
    return same and _limit(mlp.act_fn) == routed.swiglu_limit and not linears[1].reduce_results


def _limit(act: Any) -> float | None:
    """The clamp of a SwiGLU; NaN, which equals nothing, for another activation."""
    if type(act) is SiluAndMul:
        return None
    plain = type(act) is SiluAndMulWithClamp and (act.alpha, act.beta) == (1.0, 0.0)
    return float(act.swiglu_limit) if plain else math.nan
