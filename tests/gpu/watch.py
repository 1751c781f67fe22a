"""What the GPU checks ask of an engine's worker, beyond the rehearsal's probe."""

from __future__ import annotations

import os
import sys
from typing import Any

from probe import Probe

#: Of vLLM, to take work off its side streams.
SWITCHES = ("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD")


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
            "kernels": _kernels(layer),
            "graphs": _graphs(),
            "whole_graphs": len(getattr(self.model_runner.cudagraph_manager, "graphs", ())),
            "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
            "replay": None if replay is None else _name(replay),
        }

    def probe_hidden(self) -> dict[str, Any]:
        """To which GPU this process is held, and what is imported of what it should not need."""
        from gpu import hidden
        from spark_overlay import arch

        return {"held": os.environ.get(arch.VARIABLE, ""), "loaded": hidden.loaded()}

    def probe_verified(self, token_cost: float = 0.0) -> dict[str, int]:
        """Adaptive verification since the last call: steps, drafted tokens, those verified, steps
        in which some were not; starts counting. Empty where all drafted tokens are verified.

        ``token_cost``: from now on a token costs that many times what a step costs without any. On
        a small model it is next to nothing, so that nothing would ever be left out."""
        manager = getattr(self.model_runner, "adaptive_verification", None)
        if manager is None:
            return {}
        if token_cost:
            # Compiled when first something is left out, which takes longer than all replies; as it
            # stands it computes the same.
            module = sys.modules[type(manager).__module__]
            module._assign_draft_token_budget_compiled = module._assign_draft_token_budget
            draft, verify = manager.cost_tables
            draft[:] = 0.0
            verify[:] = [1.0 + token_cost * tokens for tokens in range(len(verify))]
        found: dict[str, int] = getattr(self, "_probe_verified", {})
        self._probe_verified = {"steps": 0, "drafted": 0, "verified": 0, "cut": 0}
        if not found:
            choose = manager.get_num_tokens

            def counted(scheduled: Any, drafts: Any) -> Any:
                tokens = choose(scheduled, drafts)
                drafted, _, budget = manager._batch_budget
                now = self._probe_verified
                now["steps"] += 1
                now["drafted"] += sum(drafted.values())
                now["verified"] += budget
                now["cut"] += budget < sum(drafted.values())
                return tokens

            manager.get_num_tokens = counted
        return found

    def probe_place(self) -> dict[str, Any]:
        """Where this rank computes, and with how many others."""
        import torch
        from vllm.distributed import get_tensor_model_parallel_rank as rank
        from vllm.distributed import get_tensor_model_parallel_world_size as size

        cuda = torch.cuda.is_available()
        gpu = str(torch.cuda.get_device_properties(0).uuid) if cuda else ""
        return {"rank": rank(), "tp": size(), "pid": os.getpid(), "gpu": gpu}

    def probe_collectives(self, start: bool) -> dict[str, Any]:
        """Start counting the collectives of this rank, or stop and say what they took."""
        from gpu.share import Counter

        if start:
            self._probe_counting = Counter()
            return {}
        return self._probe_counting.stop()

    def probe_launches(self, start: bool) -> dict[str, Any]:
        """Start counting what is launched on this GPU, or stop and say (launches.py)."""
        from gpu.launches import Launches

        if start:
            self._probe_launched = Launches()
            return {}
        return self._probe_launched.stop()

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

    def probe_twins(self) -> list[dict[str, int]]:
        """What each Engram layer counted since the last call (twin_model.py); none without
        twins, as on a CPU."""
        found = []
        for layer in self.model_runner.get_model().language_model.model.layers:
            counts = getattr(layer.engram, "counts", None)
            if counts is not None:
                from gpu.twin_model import COUNTS

                found.append(dict(zip(COUNTS, counts.tolist(), strict=True)))
                counts.zero_()
        return found

    def probe_engram(self) -> list[dict[str, Any]]:
        """What computes each Engram layer, and what its store has read."""
        found = []
        for layer in self.model_runner.get_model().language_model.model.layers:
            if layer.engram is None:
                continue
            ours = getattr(layer.engram, "ours", layer.engram)
            table = ours.embed_tokens
            store = getattr(table, "store", None)
            one = {
                "engram": _name(layer.engram),
                "table": _name(table),
                "prefetched": ours._prefetch_done is not None,
                "parameters": sum(p.nbytes for p in table.parameters()),
                "pinned_bytes": sum(p.nbytes for p in layer.engram.embed_tokens.parameters()),
            }
            if store is not None:
                stats = store.stats()
                one |= {"store": _name(store), "backend": getattr(store, "backend", "plain")}
                one |= {k: getattr(stats, k) for k in ("lookups", "ids", "rows", "reads")}
            found.append(one)
        return found


def _graphs() -> int:
    """CUDA graphs captured by vLLM's breakable capture, pieces counted; 0 without it."""
    module = sys.modules.get("vllm.compilation.breakable_cudagraph")
    wrappers = [] if module is None else list(module.BreakableCUDAGraphWrapper._all_instances)
    captures = [entry.capture for each in wrappers for entry in each.entries.values()]
    return sum(capture.num_graphs for capture in captures if capture is not None)


def _kernels(layer: Any) -> list[Any] | None:
    """What computes with packed weights in a layer (linears, experts, whether the shared expert is
    one of them); None where nothing does."""
    routed = getattr(layer.ffn.experts, "routed_experts", layer.ffn.experts)
    found = [getattr(one, "kernels", None) for one in (layer.attn.wq_b, routed)]
    if None in found:
        return None
    return [*map(_name, found), bool(found[1].shared)]


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
