"""The numbers of a V4.1 config.json that decide sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class BudgetError(ValueError):
    """A checkpoint or a layout that no budget can be made of; the message says how to mend it."""


#: A number above this is no model's, and a table of so many layers would take the memory itself.
MOST_LAYERS = 4096


@dataclass(frozen=True)
class Vision:
    """The tower: ``layers`` 0 where there is none. Sizes in elements."""

    layers: int = 0
    hidden: int = 1024
    inner: int = 2816
    patch: int = 14
    downsample: int = 3


@dataclass(frozen=True)
class ModelShape:
    """Names as in config.json, shortened; counts, widths and lengths."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_rank: int
    o_groups: int
    max_position: int
    yarn_position: int  # rows of the stretched RoPE table
    window: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int
    candidate_blocks: int
    experts: int
    inner: int
    hc_mult: int
    stages: int  # of the draft
    draft_targets: tuple[int, ...]
    draft_experts: int
    markov_rank: int
    engram_layers: tuple[int, ...]
    engram_ngram: int
    engram_heads: int
    engram_dim: int
    vision: Vision = Vision()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Of a parsed config.json. Raises BudgetError for one that is not V4.1's."""
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise BudgetError(
                "config.json: text_config is no object; use the checkpoint's own file"
            )

        def number(key: str, of: Mapping[str, Any] = text) -> int:
            value = of.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise BudgetError(
                    f"config.json: {key} is {value!r}, needed a whole number; it is not the config "
                    "of a DeepSeek V4.1 checkpoint, or was cut off: download it again"
                )
            return value

        def numbers(key: str) -> tuple[int, ...]:
            value = text.get(key)
            if not isinstance(value, Sequence) or not all(type(v) is int for v in value):
                raise BudgetError(
                    f"config.json: {key} is {value!r}, needed a list of whole numbers; it is not "
                    "the config of a DeepSeek V4.1 checkpoint: download it again"
                )
            return tuple(value)

        def section(key: str, of: Mapping[str, Any]) -> Mapping[str, Any]:
            value = of.get(key) or {}
            if not isinstance(value, Mapping):
                raise BudgetError(
                    f"config.json: {key} is {value!r}, needed an object; it is not the config of a "
                    "DeepSeek V4.1 checkpoint: download it again"
                )
            return value

        rope = section("rope_scaling", text)
        position = number("max_position_embeddings")
        stretched = position
        if rope:
            factor = rope.get("factor", 1)
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
                raise BudgetError(
                    f"config.json: rope_scaling.factor is {factor!r}, needed a number above 0"
                )
            stretched = int(number("original_max_position_embeddings", rope) * float(factor))
        tower = section("vision_config", config)
        found = cls(
            vocab=number("vocab_size"),
            hidden=number("hidden_size"),
            layers=number("num_hidden_layers"),
            heads=number("num_attention_heads"),
            head_dim=number("head_dim"),
            rope_dim=number("qk_rope_head_dim"),
            q_rank=number("q_lora_rank"),
            o_rank=number("o_lora_rank"),
            o_groups=number("o_groups"),
            max_position=position,
            yarn_position=stretched,
            window=number("sliding_window"),
            ratios=numbers("compress_ratios"),
            kv_sources=numbers("kv_source_layer_ids"),
            index_sources=numbers("index_source_layer_ids"),
            index_heads=number("index_n_heads"),
            index_dim=number("index_head_dim"),
            index_topk=number("index_topk"),
            candidate_source=number("candidate_source_layer_id"),
            candidate_blocks=number("candidate_topk_blocks"),
            experts=number("n_routed_experts"),
            inner=number("moe_intermediate_size"),
            hc_mult=number("hc_mult"),
            stages=number("num_nextn_predict_layers"),
            draft_targets=numbers("dspark_target_layer_ids"),
            draft_experts=number("dspark_n_routed_experts"),
            markov_rank=number("dspark_markov_rank"),
            engram_layers=numbers("engram_layer_ids"),
            engram_ngram=number("engram_max_ngram_size"),
            engram_heads=number("engram_n_heads"),
            engram_dim=number("engram_head_dim"),
            vision=_vision(tower) if tower else Vision(),
        )
        found._check()
        return found

    def _check(self) -> None:
        """Raises BudgetError for what sizes are divided by, and for layers that are not there."""
        if not self.head_dim or not 0 < self.layers <= MOST_LAYERS:
            raise BudgetError(
                f"config.json: num_hidden_layers is {self.layers} and head_dim {self.head_dim}, "
                f"needed 1 to {MOST_LAYERS} layers and heads of some width; it is not the config "
                "of a DeepSeek V4.1 checkpoint"
            )
        if self.stages > MOST_LAYERS:
            raise BudgetError(
                f"config.json: num_nextn_predict_layers is {self.stages}, needed {MOST_LAYERS} or "
                "fewer; it is not the config of a DeepSeek V4.1 checkpoint"
            )
        for layer in self.kv_sources:
            # Those beyond the model's layers are the draft's, which has windows alone.
            if layer < 0 or (layer < self.layers and self.ratio(layer) < 1):
                raise BudgetError(
                    f"config.json: kv_source_layer_ids names layer {layer}, which has no entry "
                    "above 0 in compress_ratios; the file was changed or cut off: download it again"
                )

    @property
    def engram_columns(self) -> int:
        """Hash columns of a table."""
        return (self.engram_ngram - 1) * self.engram_heads

    def ratio(self, layer: int) -> int:
        """Tokens of one compressed state; 0 for a layer with a sliding window alone (the draft's
        layers, too)."""
        return self.ratios[layer] if layer < len(self.ratios) else 0

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed cache ``layer`` reads; None without one."""
        return self._latest(self.kv_sources, layer)

    def index_source(self, layer: int) -> int | None:
        """The layer whose indexer chooses for ``layer``."""
        return self._latest(self.index_sources, layer)

    def _latest(self, sources: tuple[int, ...], layer: int) -> int | None:
        if layer >= self.layers or not self.ratio(layer):
            return None
        return max((source for source in sources if source <= layer), default=None)


def _vision(tower: Mapping[str, Any]) -> Vision:
    """vLLM's defaults where the config leaves a number out."""
    default = Vision()

    def number(key: str, otherwise: int) -> int:
        value = tower.get(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BudgetError(f"config.json: vision_config.{key} is {value!r}, needed a number")
        return value

    return Vision(
        layers=number("num_hidden_layers", 0),
        hidden=number("hidden_size", default.hidden),
        inner=number("intermediate_size", default.inner),
        patch=number("patch_size", default.patch),
        downsample=number("downsample_ratio", default.downsample),
    )
