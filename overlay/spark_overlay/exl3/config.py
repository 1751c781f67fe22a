"""The quantization config "exl3": which layer of a model is packed, told by the checkpoint's
headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from spark_overlay.exl3.experts import DOWN, GATE, UP, Exl3MoEMethod
from spark_overlay.exl3.format import Exl3FormatError
from spark_overlay.exl3.ledger import check_ledger, read_ledger
from spark_overlay.exl3.linear import Exl3GroupedLinearMethod, Exl3HeadMethod, Exl3LinearMethod
from spark_overlay.exl3.modules import Exl3Facts, scan_modules
from spark_overlay.exl3.names import checkpoint_keys, parse
from spark_overlay.headers import CheckpointHeaders, TensorHeader

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


class Exl3Config(QuantizationConfig):
    """Nothing here comes from ``bits``: rate, shape and codebook of each matrix are its headers'.

    The header index is read where it is needed and never pickled to a worker.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model_dir: Path | None = None
        self.num_layers = 0
        self.o_groups = 0

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return "exl3"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:  # type: ignore[override]
        return "exl3" if hf_quant_cfg.get("quant_method") == "exl3" else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        directory = Path(model_name)
        if not directory.is_dir():
            raise Exl3FormatError(
                f"found model {model_name!r}, which is no directory; EXL3 reads the headers of the "
                "safetensors files first: download the checkpoint and give its path"
            )
        self.model_dir = directory
        if hf_config is not None:
            self.num_layers = int(hf_config.num_hidden_layers)
            self.o_groups = int(hf_config.o_groups)

    def __getstate__(self) -> dict[str, Any]:
        read = ("modules", "tensors")
        return {name: value for name, value in self.__dict__.items() if name not in read}

    @cached_property
    def tensors(self) -> Mapping[str, TensorHeader]:
        """Every tensor's header; raises HeaderError for a damaged file or index."""
        if self.model_dir is None:
            raise Exl3FormatError("the exl3 config was never given its model directory")
        return CheckpointHeaders.scan(self.model_dir, whole=True).tensors

    @cached_property
    def modules(self) -> dict[str, Exl3Facts]:
        """Every packed matrix by key, checked before anything is allocated: the headers agree with
        each other, every key has a place in V4.1, and the pack's own ledger says the same rates."""
        found = scan_modules(self.tensors)
        assert self.model_dir is not None
        for key in found:
            parse(key)
        check_ledger(found, read_ledger(self.model_dir))
        return found

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if isinstance(layer, ParallelLMHead):
            head = self._packed("lm_head")
            return Exl3HeadMethod(head) if head else None
        if not isinstance(layer, LinearBase):
            return None
        module = self.checkpoint_module(prefix)
        shards = self._packed(module, slices=self.o_groups)
        if not shards:
            return UnquantizedLinearMethod()
        grouped = parse(shards[0].key).slice is not None
        return (Exl3GroupedLinearMethod if grouped else Exl3LinearMethod)(shards)

    def checkpoint_module(self, prefix: str) -> str:
        """vLLM's module prefix by its layer in the checkpoint: draft layers are ``mtp.i``."""
        found = _LAYER.search(prefix)
        if found is None:
            last = prefix.rpartition(".")[2]
            return f"mtp.0.{last}" if last == "main_proj" else last
        layer, below = int(found[1]), found[2]
        draft = layer - self.num_layers
        return f"layers.{layer}.{below}" if draft < 0 else f"mtp.{draft}.{below}"

    def _packed(self, module: str, *, slices: int = 0, experts: int = 0) -> list[Exl3Facts]:
        """Packed matrices that fill one module, in order; all of its parts are packed or none."""
        keys = checkpoint_keys(module, slices=slices, experts=experts)
        found = [self.modules[key] for key in keys if key in self.modules]
        absent = [key for key in keys if key not in self.modules]
        # A compressor that does not pool (ratio 1) has no gate.
        absent = [key for key in absent if not key.endswith(".compressor.wgate")]
        if found and absent:
            raise Exl3FormatError(
                f"{module}: {found[0].key} is packed, {absent[0]} (of {len(absent)} such) is not; "
                "they are one layer. The pack is incomplete: download its missing shards"
            )
        return found

    def _experts(self, layer: RoutedExperts, prefix: str) -> Exl3MoEMethod | None:
        module = self.checkpoint_module(prefix).partition(".experts")[0] + ".experts"
        projections: dict[str, list[Exl3Facts]] = {GATE: [], UP: [], DOWN: []}
        for facts in self._packed(module, experts=layer.moe_config.num_experts):
            projections[str(parse(facts.key).shard)].append(facts)
        return Exl3MoEMethod(layer.moe_config, projections) if projections[GATE] else None
