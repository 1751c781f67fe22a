"""The reference model beside vLLM: each layer fed with what vLLM's own layer was fed with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from spark_overlay.mhc.reference import expand
from spark_overlay.reference.config import V41Config
from spark_overlay.reference.model import Reference, State
from spark_overlay.reference.weights import Weights
from spark_overlay.rehearsal.train import tokens_of

#: What is compared of a layer: its attention's answer, its experts' answer, the streams it leaves.
OUTPUTS = ("attention", "experts", "layer")


class Taped:
    """vLLM's layers of one request, all passes joined: by layer, over all tokens in order."""

    def __init__(self, path: Path, layers: int) -> None:
        tensors = load_file(path)
        passes = 1 + max(int(name.split("/")[1]) for name in tensors)

        def joined(layer: int, what: str) -> Tensor:
            parts = (tensors.get(f"{layer}/{p}/{what}") for p in range(passes))
            return torch.cat([part for part in parts if part is not None])

        self.tokens = joined(0, "in/2").long()
        assert torch.equal(joined(0, "in/1"), torch.arange(len(self.tokens)))
        self.streams_in: list[Tensor] = []
        self.pre_in: list[Tensor | None] = []
        self.out: list[Mapping[str, Tensor]] = []
        self.pre_out = joined(layers - 1, "out/4")
        for layer in range(layers):
            if layer == 0:
                self.streams_in.append(joined(0, "in/0"))
                self.pre_in.append(None)
            else:
                self.streams_in.append(_streams(joined, layer, "in", (0, 6, 4, 5)))
                self.pre_in.append(joined(layer, "in/3"))
            self.out.append(
                {
                    "attention": joined(layer, "attention/0"),
                    "experts": joined(layer, "out/0"),
                    "layer": _streams(joined, layer, "out", (0, 1, 2, 3)),
                }
            )


def _streams(
    joined: Callable[[int, str], Tensor], layer: int, side: str, places: tuple[int, ...]
) -> Tensor:
    """The residual streams at one side of a layer, whose last write-back is still to be done."""
    x, residual, post, mix = (joined(layer, f"{side}/{place}") for place in places)
    return expand(x, residual, post.squeeze(-1), mix)


class Watched(Reference):
    """The reference, remembering what its sublayers answer."""

    def attention(self, layer: int, x: Tensor, state: State) -> Tensor:
        self.answer = {"attention": super().attention(layer, x, state)}
        return self.answer["attention"]

    def experts(self, prefix: str, x: Tensor, top_k: int | None = None) -> Tensor:
        self.answer["experts"] = super().experts(prefix, x, top_k)
        return self.answer["experts"]


def oracle(
    root: Path,
    *,
    kind: type[Reference] = Watched,
    weights: Weights | None = None,
    config: V41Config | None = None,
) -> Any:
    """The reference of a rehearsal folder, rounding as serving does, summed in float64."""
    model = root / "checkpoint"
    weights = weights or Weights(model, root / "engram-src", dtype=torch.float64)
    config = config or V41Config.read(model)
    return kind(weights, config, token_map=tokens_of(model), serving=True, positions=1024)


def errors(reference: Any, tape: Taped) -> dict[str, list[Tensor]]:
    """``|found - vLLM's| / |vLLM's|`` of each token, by output and layer, teacher-forced."""
    found: dict[str, list[Tensor]] = {name: [] for name in OUTPUTS}
    with torch.no_grad():
        state = reference.embed(tape.tokens)
        for layer, taped in enumerate(tape.out):
            if layer:
                state.streams = tape.streams_in[layer].to(reference.weights.dtype)
                pre = tape.pre_in[layer]
                state.pre = None if pre is None else pre.to(reference.weights.dtype)
            reference.layer(layer, state)
            answers = {**reference.answer, "layer": state.streams}
            for name in OUTPUTS:
                found[name].append(relative(answers[name], taped[name]))
    return found


def logits(reference: Any, tape: Taped) -> tuple[Tensor, Tensor]:
    """Logits ``[T, vocab]`` of the reference from the tokens alone, and of vLLM's last streams."""
    with torch.no_grad():
        alone = reference(tape.tokens)
        state = reference.embed(tape.tokens)
        state.streams = tape.out[-1]["layer"].to(reference.weights.dtype)
        state.pre = tape.pre_out.to(reference.weights.dtype)
        return alone, reference.logits(state)


def relative(found: Tensor, expected: Tensor) -> Tensor:
    difference = (found.double() - expected.double()).flatten(1).norm(dim=1)
    return difference / expected.double().flatten(1).norm(dim=1).clamp_min(1e-30)
