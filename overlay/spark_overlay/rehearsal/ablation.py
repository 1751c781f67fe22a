"""The reference with one part left out: what a checkpoint that needs every layer must notice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spark_overlay.engram.layout import EngramLayout
from spark_overlay.reference.config import V41Config
from spark_overlay.reference.model import Reference, State

Part = tuple[str, int]
"""("attention" | "experts" | "Engram", layer)."""


class Ablated(Reference):
    """``without`` names the sublayer whose answer is zero, or the Engram that adds nothing."""

    without: Part | None = None

    def attention(self, layer: int, x: Tensor, state: State) -> Tensor:
        y = super().attention(layer, x, state)
        return torch.zeros_like(y) if self.without == ("attention", layer) else y

    def experts(self, prefix: str, x: Tensor, top_k: int | None = None) -> Tensor:
        y = super().experts(prefix, x, top_k)
        layer = prefix.removeprefix("layers.").removesuffix(".ffn")
        gone = self.without is not None and self.without == ("experts", _number(layer))
        return torch.zeros_like(y) if gone else y

    def engram(self, layer: int, state: State, layout: EngramLayout) -> None:
        if self.without != ("Engram", layer):
            super().engram(layer, state, layout)


def parts(config: V41Config) -> Iterator[Part]:
    """Every part of the backbone that can be left out."""
    for layer in range(config.num_hidden_layers):
        yield "attention", layer
        yield "experts", layer
    if config.engram is not None:
        yield from (("Engram", layer) for layer in config.engram.layer_ids)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1
