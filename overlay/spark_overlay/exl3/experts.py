"""EXL3 routed experts in vLLM: one slab per projection and rate, computed expert by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from spark_overlay.arithmetic import matmul, weight_dtype, wide
from spark_overlay.exl3 import cuda
from spark_overlay.exl3.format import Codebook, Exl3FormatError, Exl3Slice
from spark_overlay.exl3.modules import Exl3Facts
from spark_overlay.exl3.packed import Allocate, PackedStack, Slab
from spark_overlay.exl3.shares import share, share_bytes

GATE, DOWN, UP = "w1", "w2", "w3"


class Projection(nn.Module):
    """One projection of all experts; experts of different rates lie in different slabs."""

    def __init__(self, experts: list[Exl3Facts], cut: Exl3Slice, allocate: Allocate) -> None:
        super().__init__()
        slabs: dict[tuple[int, str], list[int]] = {}
        for index, facts in enumerate(experts):
            slabs.setdefault((facts.k2, facts.codebook), []).append(index)
        self.stacks = nn.ModuleList(
            PackedStack([experts[i] for i in members], cut, allocate) for members in slabs.values()
        )
        self.place = {
            expert: (slab, row)
            for slab, members in enumerate(slabs.values())
            for row, expert in enumerate(members)
        }

    def matrices(self) -> list[tuple[Tensor, Tensor, Tensor, Codebook]]:
        """Every expert's packed matrix, by expert."""
        places = (self.place[expert] for expert in range(len(self.place)))
        return [self.stacks[slab].matrix(row) for slab, row in places]

    def weight(self, expert: int) -> Tensor:
        """Decoded ``[in, out]`` of one expert."""
        slab, row = self.place[expert]
        return self.stacks[slab].dense[row]


class Exl3MoEMethod(FusedMoEMethodBase):
    """``sum_e w_e * down_e(silu(min(gate_e, L)) * clamp(up_e, -L, L))`` over each token's experts.

    Under tensor parallelism each rank holds a range of the intermediate channels of every expert
    and returns its partial sum; vLLM's runner adds the ranks, and the shared expert unless it is
    computed in the same launches (``shared``, see merge.py)."""

    def __init__(self, moe: Any, experts: Mapping[str, list[Exl3Facts]]) -> None:
        super().__init__(moe)
        self.experts = experts
        self.shared: nn.Module | None = None

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        parallel = self.moe.moe_parallel_config
        first = self.experts[GATE][0]
        if parallel.use_ep or num_experts != len(self.experts[GATE]):
            raise Exl3FormatError(
                f"{first.key}: EXL3 experts run under tensor parallelism; found expert parallelism "
                f"or {num_experts} of {len(self.experts[GATE])} experts on this rank: drop "
                "--enable-expert-parallel"
            )
        if first.out_features != intermediate_size_per_partition * parallel.tp_size:
            raise Exl3FormatError(
                f"{first.key}: stored with {first.out_features} outputs, the model's config makes "
                f"it {intermediate_size_per_partition * parallel.tp_size}"
            )
        parts: dict[str, Exl3Slice] = {}
        for name in (GATE, UP, DOWN):
            part = share(self.experts[name][0], parallel.tp_rank, parallel.tp_size)
            assert part is not None
            parts[name] = part
        # One allocation a layer: an allocator's rounding, and its gaps, are paid for once.
        slab = Slab(sum(share_bytes(e, part) for n, part in parts.items() for e in self.experts[n]))
        for name, part in parts.items():
            setattr(layer, name, Projection(self.experts[name], part, slab))

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    @property
    def is_monolithic(self) -> bool:
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.kernels = None
        if cuda.serves(layer.w1.stacks[0].suh.device):
            from spark_overlay.exl3.cuda.layers import Experts

            parts = [getattr(layer, name).matrices() for name in (GATE, UP, DOWN)]
            if self.shared is not None:
                gate, up = self.shared.gate_up_proj.exl3
                for part, stack in zip(parts, (gate, up, *self.shared.down_proj.exl3), strict=True):
                    part.append(stack.matrix(0))
            layer.kernels = Experts(
                *parts, limit=layer.swiglu_limit, shared=self.shared is not None
            )
            return
        for name in (GATE, UP, DOWN):
            for stack in getattr(layer, name).stacks:
                stack.prepare(weight_dtype(stack.suh.device, torch.bfloat16))

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """``x [T, H]``, ``topk_weights [T, k]`` float32, ``topk_ids [T, k]`` -> ``[T, H]``."""
        if layer.kernels is not None:
            return layer.kernels(x, topk_ids, topk_weights)
        limit = layer.swiglu_limit
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in topk_ids.unique().tolist():
            token, choice = (topk_ids == expert).nonzero(as_tuple=True)
            rows = x[token]
            gate = matmul(rows, layer.w1.weight(expert), torch.float32)
            up = matmul(rows, layer.w3.weight(expert), torch.float32)
            if limit is not None:
                gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
            down = matmul(F.silu(wide(gate)) * up, layer.w2.weight(expert), torch.float32)
            out[token] += down * topk_weights[token, choice, None].float()
        return out.to(x.dtype)
