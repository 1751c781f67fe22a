"""The registered models: vLLM's own V4.1 and its draft, with the hooks in place and packed weights.

Importing this module installs the hooks, so only processes that build or inspect a model do it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.platforms import current_platform

from spark_overlay import hooks
from spark_overlay.engram.source import is_table_tensor
from spark_overlay.exl3.config import Exl3Config
from spark_overlay.exl3.loading import PackedLoader
from spark_overlay.headers import TensorHeader
from spark_overlay.plain import use_plain_linears

if current_platform.is_cpu():
    from spark_overlay.cpu import glue as cpu_glue

    cpu_glue.prepare()
hooks.install("cpu" if current_platform.is_cpu() else "cuda")

from vllm.models.deepseek_v41 import (  # noqa: E402  (after the hooks)
    DeepseekV41ForCausalLM,
    DSparkDeepseekV4ForCausalLM,
)

from spark_overlay.exl3.merge import merge_shared_experts  # noqa: E402


def packed_tensors() -> Mapping[str, TensorHeader]:
    """Headers of the checkpoint being loaded, where it is an EXL3 pack."""
    quantization = get_current_vllm_config().quant_config
    return quantization.tensors if isinstance(quantization, Exl3Config) else {}


def _merge_experts(model: nn.Module) -> None:
    if packed_tensors():
        merge_shared_experts(model)


class SparkDeepseekV41(DeepseekV41ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if current_platform.is_cpu():
            use_plain_linears(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loader = PackedLoader(self, packed_tensors())
        native = (
            (name, tensor) for name, tensor in loader.take(weights) if not is_table_tensor(name)
        )
        loaded: set[str] = super().load_weights(native)
        loaded |= loader.finish()
        _merge_experts(self)
        return loaded


class SparkDSparkDraft(DSparkDeepseekV4ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if current_platform.is_cpu():
            use_plain_linears(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loader = PackedLoader(self.model, packed_tensors())
        loaded: set[str] = super().load_weights(loader.take(weights))
        loaded |= {f"model.{name}" for name in loader.finish()}
        _merge_experts(self)
        return loaded


__all__ = ["SparkDSparkDraft", "SparkDeepseekV41"]
