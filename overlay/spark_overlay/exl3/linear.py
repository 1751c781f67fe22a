"""EXL3 in vLLM's linear layers: one packed matrix per checkpoint tensor behind each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from spark_overlay.arithmetic import einsum, matmul, weight_dtype
from spark_overlay.exl3 import cuda
from spark_overlay.exl3.format import Exl3FormatError, Exl3Slice
from spark_overlay.exl3.modules import Exl3Facts
from spark_overlay.exl3.packed import PackedStack
from spark_overlay.exl3.shares import share, share_sizes, split_of


class Exl3LinearMethod(LinearMethodBase):
    """Whole, column-parallel, merged column-parallel and row-parallel linears.

    Each shard keeps its own input scales, so a fused layer is as many products as it has shards; a
    row-parallel layer gives this rank's partial sum, which vLLM adds up.
    """

    def __init__(self, shards: Sequence[Exl3Facts]) -> None:
        self.shards = list(shards)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if len(self.shards) != len(output_partition_sizes):
            raise Exl3FormatError(
                f"{self.shards[0].key}: the checkpoint stores {len(self.shards)} matrices where "
                f"vLLM builds one layer of {len(output_partition_sizes)} shards"
            )
        layer.exl3 = nn.ModuleList(
            PackedStack(
                [facts], self._cut(layer, facts, width, input_size_per_partition, input_size)
            )
            for facts, width in zip(self.shards, output_partition_sizes, strict=True)
        )

    def _cut(
        self, layer: nn.Module, facts: Exl3Facts, width: int, rows: int, all_rows: int
    ) -> Exl3Slice:
        if facts.in_features != all_rows:
            raise Exl3FormatError(
                f"{facts.key}: stored with {facts.in_features} inputs, the model's config makes it "
                f"{all_rows}: config.json and checkpoint do not belong together"
            )
        tp, split = int(getattr(layer, "tp_size", 1)), split_of(facts.key)
        outputs = width * tp if split == "columns" else width
        if outputs != facts.out_features:
            raise Exl3FormatError(
                f"{facts.key}: stored with {facts.out_features} outputs, the model's config makes "
                f"it {outputs}: config.json and checkpoint do not belong together"
            )
        part = share(facts, layer.tp_rank if tp > 1 else 0, tp)
        assert part is not None
        if share_sizes(facts, part) != (rows, width):
            raise Exl3FormatError(
                f"{facts.key}: vLLM gives this rank [{rows}, {width}] of it, the overlay's rule "
                f"({split}) {list(share_sizes(facts, part))}: use a vLLM the overlay supports"
            )
        return part

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        device = layer.exl3[0].suh.device
        layer.kernels = None
        if cuda.serves(device):
            from spark_overlay.exl3.cuda.layers import Group

            layer.kernels = Group([stack.matrix(0) for stack in layer.exl3])
            return
        for stack in layer.exl3:
            stack.prepare(weight_dtype(device, torch.bfloat16))

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.project(layer, x, x.dtype)
        return y if bias is None else y + bias

    def project(self, layer: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x [..., in]`` -> ``[..., out]`` of ``dtype``, shards side by side."""
        if layer.kernels is not None:
            return layer.kernels([x.flatten(0, -2)], dtype).unflatten(0, x.shape[:-1])
        parts = [matmul(x, stack.dense[0], dtype) for stack in layer.exl3]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Exl3GroupedLinearMethod(Exl3LinearMethod):
    """``wo_a``: one packed matrix per group of heads; a rank holds whole groups."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        groups, tp = len(self.shards), int(layer.tp_size)
        width = self.shards[0].out_features
        if width * groups != output_size or self.shards[0].in_features != input_size or groups % tp:
            raise Exl3FormatError(
                f"{self.shards[0].key}: {groups} slices of [{self.shards[0].in_features}, {width}] "
                f"for a layer of [{input_size}, {output_size}] on {tp} ranks; each rank needs "
                "whole slices"
            )
        parts = [(facts, share(facts, layer.tp_rank, tp, groups)) for facts in self.shards]
        layer.exl3 = nn.ModuleList(
            PackedStack([facts], part) for facts, part in parts if part is not None
        )

    def project(self, layer: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x [T, groups, in]`` -> ``[T, groups * rank]``, each group by its own matrix."""
        if layer.kernels is not None:
            return layer.kernels(list(x.unbind(1)), dtype)
        return torch.cat(
            [matmul(x[:, g], stack.dense[0], dtype) for g, stack in enumerate(layer.exl3)], -1
        )


class Exl3HeadMethod(Exl3LinearMethod):
    """``lm_head``: the vocabulary cut as vLLM cuts it, padding included."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        (facts,) = self.shards
        if facts.out_features != output_size or facts.in_features != input_size:
            raise Exl3FormatError(
                f"{facts.key}: stored as [{facts.in_features}, {facts.out_features}], vLLM's "
                f"padded vocabulary makes it [{input_size}, {output_size}]"
            )
        rows = layer.shard_indices
        part = share(facts, layer.tp_rank, int(layer.tp_size))
        mine = slice(rows.padded_org_vocab_start_index, rows.padded_org_vocab_end_index)
        if part is None or part.svh != mine:
            raise Exl3FormatError(
                f"{facts.key}: vLLM gives this rank columns {mine.start} to {mine.stop}, the "
                f"overlay's rule {part and part.svh}: use a vLLM the overlay supports"
            )
        layer.exl3 = nn.ModuleList([PackedStack([facts], part)])

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        raise Exl3FormatError("a packed lm_head cannot be tied to the embedding")


class SparkLMHead(ParallelLMHead):
    """vLLM's lm_head, given the quantization config that V4.1's model code does not pass on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("quant_config", get_current_vllm_config().quant_config)
        super().__init__(*args, **kwargs)


def pack_if_stored(layer: nn.Module, prefix: str) -> None:
    """Give a linear that vLLM built without a quantization config what the checkpoint stores for
    it."""
    config = get_current_vllm_config().quant_config
    method = config.get_quant_method(layer, prefix) if config is not None else None
    if not isinstance(method, Exl3LinearMethod):
        return
    del layer.weight
    layer.quant_method = method
    widths = getattr(layer, "output_sizes", None) or [layer.output_size]
    method.create_weights(
        layer,
        layer.input_size,
        list(widths),
        layer.input_size,
        layer.output_size,
        layer.params_dtype,
    )


def project(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x [..., in]`` through a packed or plain linear with its result in ``dtype``."""
    if isinstance(layer.quant_method, Exl3LinearMethod):
        return layer.quant_method.project(layer, x, dtype)
    if x.device.type == "cpu":
        return matmul(x, layer.weight.T, dtype)
    return torch.mm(x, layer.weight.T, out_dtype=dtype)


def project_groups(layer: nn.Module, x: Tensor, rank: int) -> Tensor:
    """``x [T, groups, in]`` through ``wo_a``, packed or plain: ``[T, groups * rank]``."""
    if isinstance(layer.quant_method, Exl3GroupedLinearMethod):
        return layer.quant_method.project(layer, x, x.dtype)
    weight = layer.weight.view(x.shape[1], rank, -1)
    if x.device.type != "cpu":
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).flatten(1)
    return einsum("tgi,gri->tgr", x, weight).to(x.dtype).flatten(1)
