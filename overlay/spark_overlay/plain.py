"""Linears the checkpoint does not pack, on the torch path."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from spark_overlay.arithmetic import matmul


class PlainLinearMethod(UnquantizedLinearMethod):
    """An unpacked linear on a CPU: its weight stays readable (vLLM would repack and drop it), and
    its result has the dtype the layer asks for (the router's logits are float32, as on a GPU)."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = getattr(layer, "out_dtype", None) or x.dtype
        y = matmul(x, layer.weight.T, dtype)
        return y if bias is None else y + bias


def use_plain_linears(model: nn.Module) -> None:
    """Give every unpacked linear of a model on a CPU the method above, before weights load."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod):
            module.quant_method = PlainLinearMethod()
