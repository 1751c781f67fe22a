"""vLLM's methods by the kernels' ops, here on a CPU, against the torch path that decodes once: the
same answers for few rows and for many, packed weights only, and the shared expert in one launch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SiluAndMul, SiluAndMulWithClamp

from spark_overlay.exl3 import cuda, experts, linear, merge
from spark_overlay.exl3.cuda import ops, prefill
from spark_overlay.exl3.experts import DOWN, GATE, UP, Exl3MoEMethod
from spark_overlay.exl3.modules import Exl3Facts
from spark_overlay.stand_ins import HookError

pytestmark = pytest.mark.rehearsal

HIDDEN, INTER, EXPERTS, TOPK, LIMIT = 256, 128, 6, 3, 0.5
#: The ops sum in float32 over fp16-rounded rotations where they say so; the torch path in float64.
CLOSE = 1e-3


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "serves", lambda device: True)


def facts(key: str, n_in: int, n_out: int, k2: int) -> Exl3Facts:
    return Exl3Facts(f"layers.0.{key}", n_in, n_out, k2, "mul1")


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    made = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if name.endswith("trellis"):
            words = torch.randint(-(1 << 15), 1 << 15, parameter.shape, generator=made)
            parameter.data.copy_(words)
        else:
            size = 1.0 if name.endswith("suh") else parameter.shape[-1] ** -0.5
            parameter.data.copy_(torch.randn(parameter.shape, generator=made) * size)
    return module


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(50 + seed)).bfloat16()


def off(found: Tensor, right: Tensor) -> float:
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def made_linear(kind: str) -> tuple[Any, nn.Module]:
    """A merged linear of two rates, and wo_a's slices; ``tp_size`` as vLLM's layers have it."""
    layer = nn.Module()
    layer.tp_size, layer.tp_rank = 1, 0
    if kind == "merged":
        shards = [facts("attn.wq_a", HIDDEN, 128, 10), facts("attn.wkv", HIDDEN, 256, 7)]
        method: Any = linear.Exl3LinearMethod(shards)
        method.create_weights(layer, HIDDEN, [128, 256], HIDDEN, 384, torch.bfloat16)
    else:
        shards = [facts(f"attn.wo_a.slice.{g}", HIDDEN, 128, 10) for g in range(3)]
        method = linear.Exl3GroupedLinearMethod(shards)
        method.create_weights(layer, HIDDEN, [384], HIDDEN, 384, torch.bfloat16)
    return method, fill(layer)


@pytest.mark.parametrize("count", [0, 1, 5, 64, 65, 200])
@pytest.mark.parametrize("kind", ["merged", "slices"])
def test_a_linear_by_either_path(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method, layer = made_linear(kind)
    x = rows(count, 3, HIDDEN) if kind == "slices" else rows(count, HIDDEN)
    method.process_weights_after_loading(layer)
    right = method.project(layer, x, torch.float32)
    assert layer.kernels is None

    monkeypatch.setattr(cuda, "serves", lambda device: True)
    method, layer = made_linear(kind)
    method.process_weights_after_loading(layer)
    assert [stack.dense for stack in layer.exl3] == [None] * len(layer.exl3)
    found = method.project(layer, x, torch.float32)
    assert found.shape == right.shape == (count, 384)
    if count:
        assert off(found, right) < CLOSE
        rounded = method.apply(layer, x, None)
        assert rounded.dtype == torch.bfloat16 and off(rounded, right) < 5e-3


def test_leading_dimensions_of_a_linear_stay(by_kernels: None) -> None:
    method, layer = made_linear("merged")
    method.process_weights_after_loading(layer)
    x = rows(2, 3, HIDDEN)
    flat = method.project(layer, x.view(6, HIDDEN), torch.float32)
    assert torch.equal(method.project(layer, x, torch.float32), flat.view(2, 3, 384))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_activations_are_rounded_to_what_the_kernels_read(
    dtype: torch.dtype, by_kernels: None
) -> None:
    method, layer = made_linear("merged")
    method.process_weights_after_loading(layer)
    x = rows(4, HIDDEN)
    right = method.project(layer, x, torch.float32).to(dtype)
    assert torch.equal(method.apply(layer, x.to(dtype), None), right)
    routed, (ids, weights) = fill(Routed()), routing(4)
    routed.quant_method.process_weights_after_loading(routed)
    assert torch.equal(
        run(routed, x.to(dtype), ids, weights), run(routed, x, ids, weights).to(dtype)
    )


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.swiglu_limit = LIMIT
        rates = (6, 4, 6, 8, 10, 7)
        self.all = {
            name: [
                facts(
                    f"ffn.experts.{e}.{name}",
                    *((INTER, HIDDEN) if name == DOWN else (HIDDEN, INTER)),
                    k2,
                )
                for e, k2 in enumerate(rates)
            ]
            for name in (GATE, UP, DOWN)
        }
        parallel = SimpleNamespace(use_ep=False, tp_size=1, tp_rank=0)
        self.quant_method = Exl3MoEMethod(SimpleNamespace(moe_parallel_config=parallel), self.all)
        self.quant_method.create_weights(self, EXPERTS, HIDDEN, INTER, torch.bfloat16)


def activation(limit: float | None) -> nn.Module:
    """vLLM's, without the engine's config that its constructor asks for."""
    kind = SiluAndMul if limit is None else SiluAndMulWithClamp
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    if limit is not None:
        made.swiglu_limit, made.alpha, made.beta = limit, 1.0, 0.0
    return made


class Mlp(nn.Module):
    def __init__(self, inter: int = INTER, limit: float | None = LIMIT) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Module(), nn.Module()
        for layer, shards, reduces in (
            (
                self.gate_up_proj,
                [
                    facts("ffn.shared_experts.w1", HIDDEN, inter, 10),
                    facts("ffn.shared_experts.w3", HIDDEN, inter, 8),
                ],
                0,
            ),
            (self.down_proj, [facts("ffn.shared_experts.w2", inter, HIDDEN, 10)], 0),
        ):
            layer.tp_size, layer.tp_rank, layer.reduce_results = 1, 0, bool(reduces)
            layer.quant_method = linear.Exl3LinearMethod(shards)
            sizes = (shards[0].in_features, [s.out_features for s in shards])
            layer.quant_method.create_weights(layer, *sizes, sizes[0], sum(sizes[1]), None)
        self.act_fn = activation(limit)

    def process(self) -> None:
        for layer in (self.gate_up_proj, self.down_proj):
            layer.quant_method.process_weights_after_loading(layer)

    def forward(self, x: Tensor) -> Tensor:
        """In float32: what vLLM's own MLP computes, without its roundings."""
        up_down = (self.gate_up_proj, self.down_proj)
        first, second = (layer.quant_method.project for layer in up_down)
        gate, up = first(self.gate_up_proj, x, torch.float32).chunk(2, -1)
        limit = math.inf if isinstance(self.act_fn, SiluAndMul) else LIMIT
        inner = torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
        return second(self.down_proj, inner, torch.float32)


def routing(tokens: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    weights, ids = torch.rand((tokens, EXPERTS), generator=made).topk(TOPK, -1)
    return ids, weights


def run(routed: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    found: Tensor = routed.quant_method.apply(routed, x, weights, ids, None, None)
    return found


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 7, 42, 43, 100])
def test_experts_by_either_path(tokens: int, merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, (ids, weights) = rows(tokens, HIDDEN), routing(tokens)
    plain, shared = fill(Routed()), fill(Mlp(), 1)
    plain.quant_method.process_weights_after_loading(plain)
    shared.process()
    right = run(plain, x, ids, weights).float()
    if merged and tokens:
        right = right + shared(x)

    monkeypatch.setattr(cuda, "serves", lambda device: True)
    routed, mlp = fill(Routed()), fill(Mlp(), 1)
    routed.quant_method.shared = mlp if merged else None
    routed.quant_method.process_weights_after_loading(routed)
    assert routed.kernels.shared == merged and routed.kernels.count == EXPERTS
    assert all(s.dense is None for name in (GATE, UP, DOWN) for s in getattr(routed, name).stacks)
    routed.kernels.many = 252  # 42 tokens of 3 experts fit in a call, 83 in two
    few: list[int] = []
    many: list[int] = []
    monkeypatch.setattr(ops, "experts", counted(ops.experts, few))
    monkeypatch.setattr(prefill, "experts", counted(prefill.experts, many))
    found = run(routed, x, ids, weights)
    assert found.dtype == torch.bfloat16 and found.shape == x.shape
    assert (len(few), len(many)) == ((0, 1) if tokens >= 84 else (1 + (tokens > 42), 0))
    if tokens:
        assert off(found, right) < 5e-3


def counted(call: Any, calls: list[int]) -> Any:
    def noted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return call(*given, **named)

    return noted


class Runner(nn.Module):
    """vLLM's runner as far as it is touched."""

    def __init__(self, mlp: nn.Module | None) -> None:
        super().__init__()
        self.routed_experts, self.routed_scaling_factor = Routed(), 1.0
        self._shared_experts = nn.Module() if mlp is not None else None
        if self._shared_experts is not None:
            self._shared_experts._layer = mlp
        self._forward_entry = self._select_forward()

    def _select_forward(self) -> str:
        return "alone" if self._shared_experts is None else "with shared"


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MoERunner", Runner)
    monkeypatch.setattr(cuda, "serves", lambda device: True)


def test_the_shared_expert_moves_to_the_method(runners: None) -> None:
    model = nn.ModuleList([Runner(Mlp()), Runner(None)])
    assert merge.merge_shared_experts(model) == 1
    first = model[0]
    assert isinstance(first.routed_experts.quant_method.shared, Mlp)
    assert first._shared_experts is None and first._forward_entry == "alone"
    assert merge.merge_shared_experts(model) == 0


@pytest.mark.parametrize(
    "changed",
    [
        lambda runner: setattr(runner, "routed_scaling_factor", 1.5),
        lambda runner: setattr(runner.routed_experts, "quant_method", None),
        lambda runner: setattr(runner._shared_experts, "_layer", Mlp(inter=256)),
        lambda runner: setattr(runner._shared_experts, "_layer", Mlp(limit=None)),
        lambda runner: setattr(runner._shared_experts, "_layer", Mlp(limit=7.0)),
        lambda runner: setattr(runner._shared_experts._layer.down_proj, "reduce_results", True),
        lambda runner: setattr(runner._shared_experts._layer.down_proj, "quant_method", None),
        lambda runner: setattr(runner._shared_experts._layer, "act_fn", nn.SiLU()),
    ],
)
def test_a_shared_expert_that_is_not_alike_stays(changed: Any, runners: None) -> None:
    runner = Runner(Mlp())
    changed(runner)
    assert merge.merge_shared_experts(nn.ModuleList([runner])) == 0
    assert runner._shared_experts is not None and runner._forward_entry == "with shared"


def test_nothing_is_merged_where_the_kernels_do_not_serve(
    runners: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "serves", lambda device: False)
    assert merge.merge_shared_experts(nn.ModuleList([Runner(Mlp())])) == 0


def test_a_runner_that_is_not_as_expected_is_an_error(runners: None) -> None:
    runner = Runner(Mlp())
    del runner._forward_entry
    with pytest.raises(HookError, match="no _forward_entry"):
        merge.merge_shared_experts(nn.ModuleList([runner]))


def test_vllms_own_runner_has_what_is_touched() -> None:
    from inspect import getsource

    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    source = getsource(moe_runner.MoERunner)
    for name in (*merge._RUNNER, "routed_scaling_factor"):
        assert f"self.{name} = " in source or hasattr(moe_runner.MoERunner, name), name
    assert experts.Exl3MoEMethod.mk_can_overlap_shared_experts is not None
