"""The numbers of a V4.1 model, read from its config.json, and which layer reads which layer's
cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_overlay.engram.layout import EngramLayout


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies: ``theta``, and YaRN's stretch by ``factor`` (1: none)."""

    theta: float
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class V41Config:
    """Names are config.json's. ``compress_ratios`` has an entry per layer, draft stages too."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    rms_norm_eps: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    num_nextn_predict_layers: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_noise_token_id: int
    window_rope: Rope
    compressed_rope: Rope
    engram: EngramLayout | None

    @classmethod
    def read(cls, directory: Path) -> V41Config:
        """Raises KeyError naming the first key that config.json lacks."""
        raw = json.loads((directory / "config.json").read_bytes())
        text: dict[str, Any] = {**raw, **raw.get("text_config", {})}
        yarn = text.get("rope_scaling") or text.get("rope_parameters") or {}
        stretched = Rope(
            theta=float(text["compress_rope_theta"]),
            factor=float(yarn.get("factor", 1.0)),
            original_positions=int(yarn.get("original_max_position_embeddings", 0)),
            beta_fast=float(yarn.get("beta_fast", 32)),
            beta_slow=float(yarn.get("beta_slow", 1)),
        )
        plain = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in text.items()
            if name in cls.__dataclass_fields__
        }
        return cls(
            **plain,
            window_rope=Rope(float(text["rope_theta"])),
            compressed_rope=stretched,
            engram=EngramLayout.from_config(text),
        )

    def ratio(self, layer: int) -> int:
        """0: sliding window only; 1 or 2: also a compressed cache of that many tokens a row."""
        return self.compress_ratios[layer] if layer < len(self.compress_ratios) else 0

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed cache a layer reads: the last source at or below it."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose indexer chose the rows a layer reads."""
        return max(source for source in self.index_source_layer_ids if source <= layer)
