"""The registered models: vLLM's own V4.1 and its draft, with the hooks in place and packed weights.

Importing this module installs the hooks, so only processes that build or inspect a model do it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext

from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from spark_overlay import holding, hooks
from spark_overlay.engram.names import is_table_tensor
from spark_overlay.exl3.config import Exl3Config
from spark_overlay.exl3.loading import PackedLoader, Rows
from spark_overlay.headers import TensorHeader
from spark_overlay.loading import request
from spark_overlay.loading.formats import check as check_load
from spark_overlay.plain import use_plain_linears

if current_platform.is_cpu():
    from spark_overlay.cpu import glue as cpu_glue

    cpu_glue.prepare()
hooks.install(holding.device())

from vllm.models.deepseek_v41 import (  # noqa: E402  (after the hooks)
    DeepseekV41ForCausalLM,
    DSparkDeepseekV4ForCausalLM,
)

from spark_overlay.exl3.merge import merge_shared_experts  # noqa: E402

#: Checkpoint names of the draft begin so; the target's do not.
DRAFT = "mtp."
EMBEDDING = "embed.weight"
#: Native weights (norms, routers, the vision tower) held at once, bytes.
PORTION = 64 << 20


def packed_tensors() -> Mapping[str, TensorHeader]:
    """Headers of the checkpoint being loaded, where it is an EXL3 pack."""
    quantization = get_current_vllm_config().quant_config
    return quantization.tensors if isinstance(quantization, Exl3Config) else {}


def refuse_other_readers(config: VllmConfig) -> None:
    """Raise ValueError for a way to load that would not come to our reader."""
    if packed_tensors():
        load = config.load_config
        extra = load.model_loader_extra_config
        strategy = load.safetensors_load_strategy
        check_load(str(load.load_format), extra if isinstance(extra, dict) else {}, strategy)


def embedding_rows(model: nn.Module) -> dict[str, Rows]:
    """The token embedding, of which a rank holds a range of rows: the one native tensor too large
    to be held whole for a moment (1.3 GB)."""
    for path, module in model.named_modules():
        if path.endswith("embed_tokens") and type(module) is VocabParallelEmbedding:
            mine = module.shard_indices
            low, high = mine.org_vocab_start_index, mine.org_vocab_end_index
            return {EMBEDDING: Rows(module.weight.data, low, high, f"{path}.weight")}
    return {}


def _merge_experts(model: nn.Module) -> None:
    if packed_tensors():
        merge_shared_experts(model)


class SparkDeepseekV41(DeepseekV41ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        refuse_other_readers(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if current_platform.is_cpu():
            use_plain_linears(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        packed = packed_tensors()
        loader = PackedLoader(
            self,
            packed,
            native=lambda name: not name.startswith(DRAFT),
            rows=embedding_rows(self),
        )
        loaded: set[str] = set()
        with request.asking(loader) if packed else nullcontext():
            native = (
                (name, tensor) for name, tensor in loader.take(weights) if not is_table_tensor(name)
            )
            # vLLM collects all that it is given before it loads any; what it then makes of the
            # parameters it makes anew with every portion, and right with the last.
            for portion in request.portions(native, PORTION) if packed else [native]:
                loaded |= super().load_weights(portion)
        loaded |= loader.finish()
        _merge_experts(self)
        return loaded


class SparkDSparkDraft(DSparkDeepseekV4ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        refuse_other_readers(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if current_platform.is_cpu():
            use_plain_linears(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        packed = packed_tensors()
        loader = PackedLoader(self.model, packed, native=lambda name: name.startswith(DRAFT))
        with request.asking(loader) if packed else nullcontext():
            loaded: set[str] = super().load_weights(loader.take(weights))
        loaded |= {f"model.{name}" for name in loader.finish()}
        _merge_experts(self)
        return loaded


__all__ = ["SparkDSparkDraft", "SparkDeepseekV41"]
