"""Digests of what a model's layers leave, taken on the device, in CUDA graphs as well.

A row's digest is a sum of its bits by fixed odd factors, modulo 2^64: equal rows have equal
digests, and rows that differ will hardly share one. Nothing is copied to the host until ``save``,
so what is captured writes its digests on every replay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

STEPS = 192
#: What a decoder layer answers with, in its order.
ANSWERS = ("x", "streams", "post_mix", "stream_mix", "pre_mix")
_WIDEST = 1 << 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Taps:
    """Watches vLLM's decoder from its construction on: hooks run when a graph is captured."""

    def __init__(self, decoder: Any, rows: int, device: torch.device) -> None:
        layers = list(enumerate(decoder.layers))
        self.names = [f"{index}.{name}" for index, _ in layers for name in ANSWERS]
        engrams = [(index, layer.engram) for index, layer in layers if layer.engram is not None]
        self.names += [f"{index}.{name}" for index, _ in engrams for name in ("rows", "engram")]
        self.rows = rows
        generator = torch.Generator().manual_seed(1)
        self._factors = (
            torch.randint(-(1 << 62), 1 << 62, (_WIDEST,), generator=generator, device="cpu").to(
                device
            )
            * 2
            + 1
        )
        count = len(self.names)
        self._digests = torch.zeros(STEPS * rows * count, dtype=torch.int64, device=device)
        self._counts = torch.zeros(STEPS * count, dtype=torch.int64, device=device)
        self._step = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._row = torch.arange(rows, dtype=torch.int64, device=device)
        layers[0][1].register_forward_pre_hook(lambda *_: self._next())
        for index, layer in layers:
            layer.register_forward_hook(lambda _m, _a, out, index=index: self._layer(index, out))
        for index, engram in engrams:
            engram.register_forward_hook(self._output(f"{index}.engram"))
            engram.embed = self._embed(index, engram.embed)

    def reset(self) -> None:
        self._step.fill_(-1)
        self._counts.zero_()
        self._digests.zero_()

    def save(self, path: Path) -> int:
        """Write ``digests [steps, rows, taps]`` and ``counts [steps, taps]``; how many steps."""
        steps = int(self._step) + 1
        if steps > STEPS:
            raise RuntimeError(f"{steps} steps were tapped, there is room for {STEPS}")
        digests = self._digests.view(STEPS, self.rows, -1)[:steps].cpu().contiguous()
        counts = self._counts.view(STEPS, -1)[:steps].cpu().contiguous()
        save_file({"digests": digests, "counts": counts}, path)
        return steps

    def _next(self) -> None:
        self._step.add_(1)

    def _layer(self, index: int, out: Any) -> None:
        for name, value in zip(ANSWERS, out, strict=False):
            if isinstance(value, Tensor):
                self._take(f"{index}.{name}", value)

    def _output(self, name: str) -> Any:
        return lambda _module, _arguments, out: self._take(name, out)

    def _embed(self, index: int, embed: Any) -> Any:
        def watched(hash_ids: Tensor) -> Tensor:
            rows: Tensor = embed(hash_ids)
            self._take(f"{index}.rows", rows)
            return rows

        return watched

    def _take(self, name: str, value: Tensor) -> None:
        count = min(value.shape[0], self.rows)
        if not count:
            return
        flat = value[:count].reshape(count, -1).contiguous()
        bits = flat.view(_BITS[flat.element_size()]).long()
        digests = (bits * self._factors[: bits.shape[1]]).sum(1)
        tap, taps = self.names.index(name), len(self.names)
        step = self._step.clamp(0, STEPS - 1)
        at = (step * self.rows + self._row[:count]) * taps + tap
        self._digests.index_copy_(0, at, digests)
        self._counts.index_fill_(0, step * taps + tap, count)


def install(model: Any, config: Any, device: torch.device) -> Taps:
    """The taps of a V4.1 model, made once."""
    if not hasattr(model, "spark_taps"):
        rows = config.scheduler_config.max_num_batched_tokens
        model.spark_taps = Taps(model.language_model.model, rows, device)
    taps: Taps = model.spark_taps
    return taps
