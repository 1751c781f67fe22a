"""The model class of tapped.py. Importing it applies the hook, before vLLM's model is built."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from vllm.config import VllmConfig

from gpu import taps
from gpu.tapped import ours, use_our_engram, without_tables

if ours():
    use_our_engram()

from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM


class Tapped(DeepseekV41ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        taps.install(self, vllm_config, torch.get_default_device())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights(without_tables(weights) if ours() else weights)
        return loaded
