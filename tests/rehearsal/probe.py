"""Looks into an engine's workers: vLLM's ``worker_extension_cls``, called through collective_rpc.

Every method's name begins with ``probe_`` (the class is mixed into vLLM's worker) and answers in
JSON's types; tensors go through a safetensors file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

#: What is compared of a decoder layer: the answers of its two sublayers, each to a taped input, and
#: the streams that the layer leaves to the next one.
OUTPUTS = ("attention", "experts", "layer")


class Probe:
    """Mixed into the worker; ``self.model_runner`` is vLLM's."""

    model_runner: Any

    def probe_modules(self) -> dict[str, Any]:
        """Parameters, buffers, Engram tables, quantization and packed matrices of this rank."""
        from spark_overlay.engram.glue import SparkEngramEmbedding

        models = _models(self.model_runner)
        tables = [
            {
                "module": path,
                "tensors": [name for name, _ in (*m.named_parameters(), *m.named_buffers())],
                "store": type(m.store).__name__,
                "rows": [m.store.lo, m.store.hi],
                "rows_fetched": m.store.stats().rows,
                "reads": m.store.stats().reads,
            }
            for path, m in _modules(models)
            if isinstance(m, SparkEngramEmbedding)
        ]
        config = self.model_runner.vllm_config
        return {
            "quantization": config.model_config.quantization,
            "quantization_class": type(config.quant_config).__name__,
            "head_method": type(models["target"].language_model.lm_head.quant_method).__name__,
            "tensors": {
                f"{which}.{name}": [str(t.dtype), list(t.shape)]
                for which, model in models.items()
                for name, t in (*model.named_parameters(), *model.named_buffers())
            },
            "engram": tables,
        }

    def probe_allocated(self) -> dict[str, Any]:
        """Bytes of this rank's storages, each counted once: ``parameters``; ``buffers``, which are
        all other tensors of its modules but decoded weights, bound caches and the step's positions,
        which are the runner's; ``kv_blocks``."""
        kept: dict[str, dict[int, int]] = {"parameters": {}, "buffers": {}}

        def keep(kind: str, tensor: Any) -> None:
            # A layer of a stubbed tower lies on the meta device and takes nothing.
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                kept[kind][storage.data_ptr()] = storage.nbytes()

        for _, module in _modules(_models(self.model_runner)):
            for parameter in module.parameters(recurse=False):
                keep("parameters", parameter)
            for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
                if name not in ("dense", "kv_cache", "positions"):
                    keep("buffers", value)
        for place in kept["parameters"]:
            kept["buffers"].pop(place, None)
        return {
            **{kind: sum(storages.values()) for kind, storages in kept.items()},
            "kv_blocks": self.model_runner.kv_cache_config.num_blocks,
        }

    def probe_packed(self) -> list[dict[str, Any]]:
        """Every packed matrix of this rank: rate, shapes, and digests of what was loaded."""
        from spark_overlay.exl3.packed import PackedStack

        return [
            {
                "model": path.partition(".")[0],
                "key": key,
                "k2": stack.k2,
                "words": stack.trellis.shape[-1],
                "in": stack.in_features,
                "out": stack.out_features,
                "dense": list(stack.dense.shape[1:]),
                "sha256": {
                    leaf: _digest(getattr(stack, leaf)[index]) for leaf in ("trellis", "suh", "svh")
                },
            }
            for path, stack in _modules(_models(self.model_runner))
            if isinstance(stack, PackedStack)
            for index, key in enumerate(stack.keys)
        ]

    def probe_steps(self) -> list[int]:
        """Tokens of each forward pass of the target since the last call; starts counting."""
        decoder = _decoder(self.model_runner)
        found: list[int] = getattr(self, "_probe_sizes", [])
        self._probe_sizes: list[int] = []
        if not hasattr(self, "_probe_counter"):
            self._probe_counter = decoder.layers[0].register_forward_pre_hook(
                lambda _module, args: self._probe_sizes.append(args[1].shape[0])
            )
        return found

    def probe_record(self) -> None:
        """From now on keep each decoder layer's inputs and outputs."""
        tape = self._probe_tape = Tape()
        for index, layer in enumerate(_decoder(self.model_runner).layers):
            tape.wrap(index, layer, tape.record)

    def probe_save(self, path: str) -> int:
        """Stop recording; write the tape. The number of forward passes on it."""
        self._probe_tape.unwrap()
        save_file(self._probe_tape.tensors, path)
        return self._probe_tape.passes()

    def probe_force(self, path: str) -> None:
        """From now on feed each layer the tape's inputs, compare, hand on the tape's outputs."""
        tape = self._probe_tape = Tape(load_file(path))
        for index, layer in enumerate(_decoder(self.model_runner).layers):
            tape.wrap(index, layer, tape.force)

    def probe_errors(self) -> dict[str, Any]:
        """Stop forcing. Relative error of each token by layer and output; how far the tape ran."""
        tape = self._probe_tape
        tape.unwrap()
        return {"passes": tape.passes(), "of": tape.recorded_passes(), "errors": tape.errors}

    def probe_swap_groups(self, layer: int, rank: int) -> None:
        """A fault: the first two ``wo_a`` slices of one rank change places."""
        if self._probe_rank() == rank:
            first, second, *_ = self._probe_layer(layer).attn.wo_a.exl3
            first.dense, second.dense = second.dense, first.dense

    def probe_shift_experts(self, layer: int, rank: int, low: int) -> None:
        """A fault: one rank's down projections hold the rows that begin at ``low``."""
        if self._probe_rank() != rank:
            return
        from safetensors import safe_open

        from spark_overlay.arithmetic import weight_dtype
        from spark_overlay.exl3.format import row_slice
        from spark_overlay.headers import CheckpointHeaders

        directory = self.model_runner.vllm_config.model_config.model
        headers = CheckpointHeaders.scan(Path(directory)).tensors
        for stack in self._probe_layer(layer).ffn.experts.routed_experts.w2.stacks:
            for key in stack.keys:
                stored = headers[f"{key}.trellis"].shape[0] * 16
                stack.cut = row_slice(low, low + stack.in_features, stored, key)
                for leaf in ("trellis", "suh", "svh"):
                    name = f"{key}.{leaf}"
                    with safe_open(headers[name].file, framework="pt") as file:
                        stack.load(key, leaf, file.get_tensor(name))
            stack.prepare(weight_dtype(stack.suh.device, torch.bfloat16))

    def _probe_layer(self, index: int) -> Any:
        return _decoder(self.model_runner).layers[index]

    def _probe_rank(self) -> int:
        from vllm.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())


class Tape:
    """What went into and came out of each decoder layer, pass by pass.

    Tensors are named ``layer/pass/what/place``; ``what`` is ``in`` or ``out`` (of the layer),
    ``attention`` (its answer) or ``experts`` (their input). Places that held no tensor are absent.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.tensors = tensors or {}
        self.at: dict[int, int] = {}
        self.errors: dict[str, dict[str, list[float]]] = {}
        self._wrapped: list[nn.Module] = []

    def wrap(self, index: int, layer: nn.Module, around: Callable[..., Any]) -> None:
        """Let ``around(index, layer, forward, args, kwargs)`` answer for the layer."""
        forward = layer.forward
        self.at[index] = 0

        def answer(*args: Any, **kwargs: Any) -> Any:
            result = around(index, layer, forward, args, kwargs)
            self.at[index] += 1
            return result

        layer.forward = answer  # type: ignore[method-assign]
        self._wrapped.append(layer)

    def unwrap(self) -> None:
        for layer in self._wrapped:
            del layer.forward
        self._wrapped.clear()

    def passes(self) -> int:
        (count,) = set(self.at.values())
        return count

    def recorded_passes(self) -> int:
        return 1 + max(int(name.split("/")[1]) for name in self.tensors)

    def record(
        self, index: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        where = f"{index}/{self.at[index]}"
        for place, value in _places(args, kwargs):
            if isinstance(value, Tensor):
                self.tensors[f"{where}/in/{place}"] = value.clone().contiguous()
        result, attention, experts_input = _watched(layer, forward, args, kwargs)
        self.tensors[f"{where}/attention/0"] = attention
        self.tensors[f"{where}/experts/0"] = experts_input
        for place, value in enumerate(result):
            if isinstance(value, Tensor):
                self.tensors[f"{where}/out/{place}"] = value.clone().contiguous()
        return result

    def force(
        self, index: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        where = f"{index}/{self.at[index]}"
        forced = {
            place: self._taken(f"{where}/in/{place}", value)
            for place, value in _places(args, kwargs)
        }
        if not torch.equal(forced["1"], args[1]):
            raise RuntimeError(f"{where}: the tape was made of other tokens than this pass has")
        args = tuple(forced[str(place)] for place in range(len(args)))
        kwargs = {name: forced[name] for name in kwargs}
        result, attention, _ = _watched(layer, forward, args, kwargs)
        experts = layer.ffn(self.tensors[f"{where}/experts/0"].clone(), args[2], None)
        taped = tuple(self._taken(f"{where}/out/{p}", value) for p, value in enumerate(result))
        pairs = (
            (attention, self.tensors[f"{where}/attention/0"]),
            (experts, taped[0]),
            (_written_back(result), _written_back(taped)),
        )
        for name, (found, expected) in zip(OUTPUTS, pairs, strict=True):
            rows = self.errors.setdefault(str(index), {}).setdefault(name, [])
            rows.extend(_relative(found, expected))
        return taped

    def _taken(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        found = self.tensors[name]
        if found.shape != value.shape or found.dtype != value.dtype:
            raise RuntimeError(
                f"{name}: the tape has {found.dtype} {list(found.shape)}, this pass has "
                f"{value.dtype} {list(value.shape)}"
            )
        return found.clone()


def _watched(
    layer: Any, forward: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Tensor, Tensor]:
    """A layer's result, its attention's answer and its experts' input on the way."""
    answers: list[Tensor] = []
    inputs: list[Tensor] = []
    hooks = (
        layer.attn.register_forward_hook(lambda _m, _a, out: answers.append(out.clone())),
        layer.ffn.register_forward_pre_hook(lambda _m, given: inputs.append(given[0].clone())),
    )
    try:
        result = forward(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    (attention,), (experts_input,) = answers, inputs
    return result, attention, experts_input


def _written_back(result: tuple[Any, ...]) -> Tensor:
    """The streams after the layer's second sublayer, which the next layer would write."""
    from spark_overlay.mhc.reference import expand

    x, residual, post_mix, residual_mix = result[:4]
    return expand(x, residual, post_mix.squeeze(-1), residual_mix)


def _places(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    yield from ((str(place), value) for place, value in enumerate(args))
    yield from kwargs.items()


def _relative(found: Tensor, expected: Tensor) -> list[float]:
    """``|found - expected| / |expected|`` of each token."""
    difference = (found.double() - expected.double()).flatten(1).norm(dim=1)
    size = expected.double().flatten(1).norm(dim=1)
    answer: list[float] = (difference / size.clamp_min(1e-30)).tolist()
    return answer


def _decoder(runner: Any) -> Any:
    return runner.get_model().language_model.model


def _models(runner: Any) -> dict[str, Any]:
    models = {"target": runner.get_model(), "draft": runner.get_draft_model()}
    return {which: model for which, model in models.items() if model is not None}


def _modules(models: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for which, model in models.items():
        for path, module in model.named_modules():
            yield f"{which}.{path}", module


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
