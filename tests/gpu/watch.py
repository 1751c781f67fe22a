"""What the GPU checks ask of an engine's worker, beyond the rehearsal's probe."""

from __future__ import annotations

from typing import Any

from probe import Probe


class GpuProbe(Probe):
    def probe_classes(self) -> dict[str, Any]:
        """Which classes compute, by their full names: the proof of what was measured."""
        model = self.model_runner.get_model().language_model.model
        layer = model.layers[-1]
        experts = layer.ffn.experts
        method = getattr(experts, "routed_experts", experts).quant_method
        replay = getattr(model, "decoder_replay_layers", None)
        return {
            "attention": _name(layer.attn),
            "linear": _name(layer.attn.wq_b.quant_method),
            "experts": _name(method),
            "runner": _name(self.model_runner),
            "replay": None if replay is None else _name(replay),
        }

    def probe_rows(self) -> list[int]:
        """Rows of each eager pass of the last layer since the last call; starts counting."""
        found: list[int] = getattr(self, "_probe_last", [])
        self._probe_last: list[int] = []
        if not hasattr(self, "_probe_rows"):
            last = self.model_runner.get_model().language_model.model.layers[-1]
            self._probe_rows = last.register_forward_pre_hook(
                lambda _module, args: self._probe_last.append(args[1].shape[0])
            )
        return found


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
