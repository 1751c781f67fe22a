"""vLLM's own attention classes under the overlay: pages, bounded loads, packed projections."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from spark_overlay import hooks

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]

PAGES = [h for h in hooks.HOOKS if h.target.endswith(".get_supported_kernel_block_sizes")]


def family(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The GPU is said to be of that family."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(
        type(current_platform),
        "is_device_capability_family",
        classmethod(lambda _cls, asked, device_id=0: asked == number),
    )


@pytest.mark.parametrize("hook", PAGES, ids=[hook.target for hook in PAGES])
@pytest.mark.parametrize(("gpu", "sizes"), [(120, [64]), (90, [64]), (100, [128])])
def test_a_backend_offers_64_on_sm12x(
    monkeypatch: pytest.MonkeyPatch, hook: hooks.Hook, gpu: int, sizes: list[int]
) -> None:
    family(monkeypatch, gpu)
    owner, name = hook.locate()
    before = getattr(owner, name)()
    module, _, replacement = hook.replacement.partition(":")
    monkeypatch.setattr(owner, name, vars(importlib.import_module(module))[replacement])
    assert getattr(owner, name)(None) == getattr(owner, name)() == sizes
    # Elsewhere it is what vLLM says; where vLLM comes to say 64 itself, the hook may go.
    # FlashInfer's is never asked on SM90.
    if gpu != 90 or "FlashInfer" not in hook.target:
        assert (before == sizes) == (gpu != 120)


def test_an_index_beyond_the_table_is_absent_and_a_padded_row_has_none() -> None:
    from spark_overlay.attention.stock import bounded_topk

    topk = torch.tensor([[0, 33, 64, -1], [5, -1, -1, -1], [1, 2, 3, 4]]).int()
    table = torch.tensor([[3, 5], [7, 9]]).int()
    request, valid = torch.tensor([1, 0, 1]).int(), torch.tensor([True, True, False])
    slots, counts = bounded_topk(topk, request, table, 32, valid)
    assert slots.tolist() == [[224, 289, -1, -1], [101, -1, -1, -1], [-1, -1, -1, -1]]
    assert counts.tolist() == [3, 1, 0] and counts.dtype == torch.int32


def test_inside_the_table_it_is_what_vllms_kernel_says(vllm: ModuleType) -> None:
    from vllm.models.deepseek_v41.common.ops import compute_global_topk_indices_and_lens as theirs

    from spark_overlay.attention.stock import bounded_topk

    made = torch.Generator().manual_seed(7)
    table = torch.randint(0, 50, (3, 8), generator=made).int()
    topk = torch.randint(0, 8 * 32, (5, 16), generator=made).int()
    topk[1, 9:] = -1
    request, valid = torch.tensor([0, 0, 2, 1, 1]).int(), torch.tensor([True] * 4 + [False])
    found, expected = (
        how(topk.clone(), request, table, 32, valid) for how in (bounded_topk, theirs)
    )
    assert torch.equal(found[0][:4], expected[0][:4]) and torch.equal(found[1], expected[1])


def test_flashmlas_prefill_has_all_heads_that_the_query_is_padded_to() -> None:
    from spark_overlay.attention.stock import padded_prefill_heads

    class Layer:
        n_local_heads, padded_heads = 32, 64

    assert padded_prefill_heads(Layer()) == 64


def test_a_class_of_vllms_keeps_its_attention_and_gets_our_projections() -> None:
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention as Theirs

    from spark_overlay.attention import stock

    ours = stock.over(Theirs)
    assert ours is stock.over(Theirs) and issubclass(ours, Theirs)
    assert ours.forward_mqa is Theirs.forward_mqa and ours.backend_cls is Theirs.backend_cls
    assert ours._o_proj is not Theirs._o_proj


@pytest.mark.parametrize(("asked", "named"), [("portable", "SparkAttention"), ("stock", None)])
def test_the_dispatcher_answers_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, asked: str, named: str | None
) -> None:
    from types import SimpleNamespace

    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention as Theirs
    from vllm.platforms import current_platform

    from spark_overlay.attention import glue, select, stock

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _self: True)
    monkeypatch.setattr(
        type(current_platform),
        "get_device_capability",
        classmethod(lambda _cls, device_id=0: SimpleNamespace(major=9, minor=0)),
    )
    monkeypatch.setattr(stock, "DISPATCH", lambda _config: Theirs)
    monkeypatch.setenv(select.VARIABLE, asked)
    glue._picked.cache_clear()
    config: Any = SimpleNamespace(additional_config={})
    found = glue.attention_class(config)
    glue._picked.cache_clear()
    assert found is (glue.SparkAttention if named else stock.over(Theirs))


def test_on_a_cpu_vllms_classes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from spark_overlay.attention import glue, select

    monkeypatch.setenv(select.VARIABLE, "stock")
    glue._picked.cache_clear()
    with pytest.raises(select.ChoiceError, match="for GPUs only"):
        glue.attention_class(SimpleNamespace(additional_config={}))
    glue._picked.cache_clear()


def test_on_sm12x_flashinfer_serves_once_it_computes_rightly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Absent, or wrong on a small case: portable serves, and why is said."""
    from vllm.utils import flashinfer

    from spark_overlay.attention import contest, select, stock

    spark, wrong = (12, 1), "vLLM's attention differs from the reference by 0.3"
    tried: list[tuple[Any, ...]] = []
    monkeypatch.setattr(contest, "case", lambda device, tokens: (str(device), tokens))
    for installed, fault in ((False, ""), (True, wrong), (True, "")):
        monkeypatch.setattr(flashinfer, "has_flashinfer_sparse_mla_sm120", lambda i=installed: i)
        monkeypatch.setattr(contest, "fault", lambda *given, f=fault: tried.append(given) or f)
        missing = stock.missing(spark)
        choice = select.choose(select.Found(spark, missing), select.Wishes())
        if installed and not fault:
            assert missing == "" and choice.kind == "stock"
        else:
            assert choice.kind == "portable" and choice.why == missing
            assert missing == fault or "is not installed" in missing
    assert tried == [("stock", ("cuda", 4))] * 2
    assert [stock.missing(other) for other in ((9, 0), (8, 0), None)] == ["", "", ""]
