"""The model class of twin.py. Importing it puts the twin where vLLM's model builds its layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.models.deepseek_v41.common.engram import Engram
from vllm.models.deepseek_v41.nvidia import model as vllm_model

from gpu.bits import differ
from spark_overlay.engram.glue import SparkEngram
from spark_overlay.engram.layout import EngramLayout

#: What is counted on the device, in graphs as well.
COUNTS = ("tokens", "dead", "rows_unequal", "outputs_unequal", "control")


class TwinEngram(Engram):
    """Answers with what stock gives; ``counts`` says how many tokens' rows and outputs differ."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        layout = EngramLayout.from_config(config.model_config.hf_config)
        assert layout is not None
        ours = SparkEngram.__new__(SparkEngram)
        nn.Module.__init__(ours)
        kept = ("_modules", "_parameters", "_buffers")
        ours.__dict__.update({k: v for k, v in vars(self).items() if k not in kept})
        # One wkv and one gate for both; the table alone is another.
        ours.__dict__["_parameters"] = self._parameters
        table = ours._create_embedding(layout, self.layer_hash_index)
        ours.__dict__["_modules"] = {**self._modules, "embed_tokens": table}
        ours._prefetch_stream = None
        ours._init_staging(config.scheduler_config.max_num_batched_tokens, layout.dim)
        self.__dict__["ours"] = ours  # no module of this one: its weights are named once
        device = torch.get_default_device()
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)

    def prepare_embeddings(self, hash_ids: Tensor) -> None:
        super().prepare_embeddings(hash_ids)
        self.ours.prepare_embeddings(hash_ids)

    def forward(
        self, hidden_states: Tensor, hash_ids: Tensor, token_mask: Tensor | None = None
    ) -> Tensor:
        # Before either of them: both read the streams, and nothing says that they only read.
        streams = hidden_states.clone()
        answer: Tensor = super().forward(hidden_states, hash_ids, token_mask)
        other = self.ours(streams, hash_ids, token_mask)
        tokens = hash_ids.shape[0]
        stock, ours = self.staged_rows[:tokens], self.ours.staged_rows[:tokens]
        found = (
            torch.ones(tokens, dtype=torch.bool, device=answer.device),
            (hash_ids < 0).any(1),
            differ(stock, ours),
            differ(answer, other),
            differ(stock, ours.roll(1, 1)),
        )
        self.counts += torch.stack([each.sum() for each in found])
        return answer


vllm_model.Engram = TwinEngram
from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM  # noqa: E402


class Twinned(DeepseekV41ForCausalLM):
    """vLLM's model; the name says which one an engine has built."""
