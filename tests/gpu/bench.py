"""What the checks of a GPU host share: one check, and the bench that it judges on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gpu import engines
from gpu.said import Values


@dataclass(frozen=True)
class Check:
    """``seconds``: the judging alone, without the engines' own cost (engines.py). One that asks no
    engine is judged before any starts."""

    name: str
    asks: tuple[str, ...]
    seconds: int
    what: str
    judge: Callable[[Bench], tuple[bool, Values]]


class Bench:
    """What the checks share: the models, the engines' answers, and the reference beside them."""

    def __init__(
        self, text: Mapping[str, Any], models: Mapping[str, Path], scratch: Path, device: str
    ) -> None:
        self.text, self.models, self.scratch, self.device = text, models, scratch, device
        self.answers: dict[str, dict[str, Any]] = {}
        self._weights: dict[str, Any] = {}

    @cached_property
    def prompts(self) -> list[list[int]]:
        return engines.prompts(self.text)

    def weights(self, kind: str) -> Any:
        """The plain or packed checkpoint's tensors; one of them is held."""
        if kind not in self._weights:
            import torch

            from gpu.dense import DenseWeights
            from spark_overlay.reference.weights import Weights

            self._weights.clear()
            cpu = self.device == "cpu"
            # The kernels compute with the packed form, the torch path with bf16 weights.
            whole = cpu or kind == "plain" or ours()
            reader = Weights if whole else DenseWeights
            dtype = torch.float64 if cpu else torch.float32
            self._weights[kind] = reader(self.models[kind], dtype=dtype, device=self.device)
        return self._weights[kind]

    def reference(self, kind: str, **changed: Any) -> Any:
        """A ``Watched`` reference; ``changed`` replaces numbers of its config (a fault)."""
        from oracle import Watched

        from spark_overlay.reference.config import V41Config

        config = replace(V41Config.read(self.models[kind]), **changed)
        return Watched(self.weights(kind), config, serving=True, positions=4096)

    def tape(self, engine: str) -> Any:
        from oracle import Taped

        tape = Taped(self.scratch / f"{engine}.safetensors", self.text["num_hidden_layers"])
        tape.tokens = tape.tokens.to(self.device)
        tape.streams_in = [t.to(self.device) for t in tape.streams_in]
        tape.pre_in = [None if t is None else t.to(self.device) for t in tape.pre_in]
        tape.out = [{name: t.to(self.device) for name, t in out.items()} for out in tape.out]
        return tape


def ours() -> bool:
    """Whether the engines of this run use the kernels."""
    from spark_overlay.exl3.cuda import SWITCH

    return os.environ.get(SWITCH) != "0"
