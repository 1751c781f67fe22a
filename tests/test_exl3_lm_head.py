"""Names of packed linears: the head, the sliced output projection, and all others, both ways."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_overlay.exl3.names import Exl3NameError, Target, checkpoint_keys, parse

#: Every kind of packed linear that a V4.1 pack has.
TABLE = {
    "head": Target("top", None, "lm_head"),
    "layers.0.attn.wq_a": Target("layers", 0, "attn.fused_wqa_wkv", 0),
    "layers.0.attn.wkv": Target("layers", 0, "attn.fused_wqa_wkv", 1),
    "layers.39.attn.wq_b": Target("layers", 39, "attn.wq_b"),
    "layers.39.attn.wo_b": Target("layers", 39, "attn.wo_b"),
    "layers.7.attn.wo_a.slice.0": Target("layers", 7, "attn.wo_a", slice=0),
    "layers.7.attn.wo_a.slice.7": Target("layers", 7, "attn.wo_a", slice=7),
    "layers.2.attn.indexer.wq_b": Target("layers", 2, "attn.indexer.wq_b"),
    "layers.2.attn.indexer.wk": Target("layers", 2, "attn.indexer.wk"),
    "layers.2.attn.compressor.wkv": Target("layers", 2, "attn.compressor.fused_wkv_wgate", 0),
    "layers.2.attn.compressor.wgate": Target("layers", 2, "attn.compressor.fused_wkv_wgate", 1),
    "layers.3.ffn.experts.383.w1": Target("layers", 3, "ffn.experts", "w1", expert=383),
    "layers.3.ffn.experts.0.w2": Target("layers", 3, "ffn.experts", "w2", expert=0),
    "layers.3.ffn.experts.0.w3": Target("layers", 3, "ffn.experts", "w3", expert=0),
    "layers.3.ffn.shared_experts.w1": Target("layers", 3, "ffn.shared_experts.gate_up_proj", 0),
    "layers.3.ffn.shared_experts.w3": Target("layers", 3, "ffn.shared_experts.gate_up_proj", 1),
    "layers.3.ffn.shared_experts.w2": Target("layers", 3, "ffn.shared_experts.down_proj"),
    "layers.14.engram.wkv": Target("layers", 14, "engram.wkv"),
    "mtp.0.main_proj": Target("mtp", 0, "main_proj"),
    "mtp.2.attn.wkv": Target("mtp", 2, "attn.fused_wqa_wkv", 1),
    "mtp.1.attn.wo_a.slice.3": Target("mtp", 1, "attn.wo_a", slice=3),
    "mtp.2.ffn.experts.127.w3": Target("mtp", 2, "ffn.experts", "w3", expert=127),
    "mtp.0.ffn.shared_experts.w2": Target("mtp", 0, "ffn.shared_experts.down_proj"),
}


@pytest.mark.parametrize("key", TABLE)
def test_every_key_has_its_place_and_is_found_again_from_it(key: str) -> None:
    target = parse(key)
    assert target == TABLE[key]
    layer = "" if target.stage == "top" else f"{target.stage}.{target.layer}."
    assert key in checkpoint_keys(f"{layer}{target.module}", slices=8, experts=384)


@pytest.mark.parametrize(
    "key",
    [
        "mtp.2.markov_head.head",  # ends like the head, and is native
        "mtp.2.markov_head.embed",
        "layers.0.head",
        "lm_head",
        "model.head",
        "mtp.1.main_proj",
        "layers.0.main_proj",
        "mtp.1.engram.wkv",
        "layers.1.engram.embed",
        "layers.0.ffn.gate",
        "layers.0.attn.indexer.weights_proj",
        "layers.0.attn.wo_a",
        "layers.0.attn.wo_a.slice.00",
        "layers.00.attn.wkv",
        "layers.0.ffn.experts.1.w4",
        "layers.0.ffn.experts.w1",
        "vision.blocks.0.attn.wkv",
        "",
    ],
)
def test_other_names_are_refused_by_name(key: str) -> None:
    with pytest.raises(Exl3NameError, match=f"^{key}: packed as EXL3"):
        parse(key)


@pytest.mark.parametrize(
    ("module", "keys"),
    [
        ("lm_head", ["head"]),
        ("layers.3.attn.fused_wqa_wkv", ["layers.3.attn.wq_a", "layers.3.attn.wkv"]),
        (
            "layers.20.attn.compressor.fused_wkv_wgate",
            ["layers.20.attn.compressor.wkv", "layers.20.attn.compressor.wgate"],
        ),
        (
            "mtp.1.ffn.shared_experts.gate_up_proj",
            ["mtp.1.ffn.shared_experts.w1", "mtp.1.ffn.shared_experts.w3"],
        ),
        ("mtp.0.main_proj", ["mtp.0.main_proj"]),
        ("mtp.1.main_proj", []),
        ("mtp.0.engram.wkv", []),
        ("layers.1.engram.embed_tokens", []),
        ("layers.1.ffn.gate", []),
        ("embed_tokens", []),
        ("mtp.2.markov_head.head", []),
    ],
)
def test_keys_of_a_module_come_in_shard_order(module: str, keys: list[str]) -> None:
    assert checkpoint_keys(module) == keys


def test_slices_and_experts_are_counted_out() -> None:
    slices = checkpoint_keys("layers.0.attn.wo_a", slices=2)
    assert slices == ["layers.0.attn.wo_a.slice.0", "layers.0.attn.wo_a.slice.1"]
    experts = checkpoint_keys("mtp.0.ffn.experts", experts=2)
    assert experts[0] == "mtp.0.ffn.experts.0.w1" and experts[-1] == "mtp.0.ffn.experts.1.w3"
    assert len(experts) == 6


@given(st.text(alphabet="layersmtpheadwo_slice.0123456789", max_size=40))
def test_garbage_is_parsed_or_refused_and_a_parsed_name_is_found_again(key: str) -> None:
    try:
        target = parse(key)
    except Exl3NameError:
        return
    layer = "" if target.stage == "top" else f"{target.stage}.{target.layer}."
    counts = {"slices": (target.slice or 0) + 1, "experts": (target.expert or 0) + 1}
    assert key in checkpoint_keys(f"{layer}{target.module}", **counts)
