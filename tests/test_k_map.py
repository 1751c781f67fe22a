"""K of every packed linear comes from its headers, and the published pack's map is known."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import re

import pytest
from _packs import header, packed

from spark_overlay.exl3 import kmap
from spark_overlay.exl3.format import Exl3FormatError
from spark_overlay.exl3.modules import Exl3Facts, scan_modules
from spark_overlay.headers import TensorHeader


def published() -> dict[str, TensorHeader]:
    """Headers as the 2.9-bit pack has them, with two experts and two slices a layer."""
    headers = packed("head", 6)
    for i in range(40):
        for name in ("wq_a", "wq_b", "wkv", "wo_b", "wo_a.slice.0", "wo_a.slice.1"):
            headers |= packed(f"layers.{i}.attn.{name}", 5)
        for name in ("0.w1", "0.w2", "0.w3", "1.w1", "1.w2", "1.w3"):
            headers |= packed(f"layers.{i}.ffn.experts.{name}", 2 if 18 <= i <= 22 else 3)
        for name in ("w1", "w2", "w3"):
            bits = 4 if 11 <= i <= 29 and (i, name) != (29, "w2") else 5
            headers |= packed(f"layers.{i}.ffn.shared_experts.{name}", bits)
    for i in (2, 8, 14, 20):
        headers |= packed(f"layers.{i}.attn.indexer.wk", 8)
        headers |= packed(f"layers.{i}.attn.compressor.wkv", 5)
    headers |= packed("layers.1.engram.wkv", 5) | packed("layers.14.engram.wkv", 4)
    headers |= packed("mtp.0.main_proj", 4)
    for i in range(3):
        headers |= packed(f"mtp.{i}.attn.wq_a", 4) | packed(f"mtp.{i}.ffn.experts.0.w1", 4)
    return headers | {"embed.weight": header("BF16", (256, 128))}


@pytest.fixture(scope="module")
def facts() -> dict[str, Exl3Facts]:
    return scan_modules(published())


def test_the_published_pack_is_recognised(facts: dict[str, Exl3Facts]) -> None:
    assert kmap.differences(facts, kmap.PUBLISHED_2_9) == []


def test_measured_cells(facts: dict[str, Exl3Facts]) -> None:
    cells = kmap.measure(facts)
    assert cells["routed", 17] == {3.0: 6} and cells["routed", 18] == {2.0: 6}
    assert cells["shared", 29] == {4.0: 2, 5.0: 1}
    assert cells["attention", 2] == {5.0: 7} and cells["indexer.wk", 2] == {8.0: 1}
    assert cells["head", None] == {6.0: 1}
    assert cells["engram.wkv", 14] == {4.0: 1}
    assert cells["mtp", 0] == {4.0: 3}
    assert {name for name, _ in cells} == set(kmap.CLASSES)


def test_a_rate_is_never_an_average(facts: dict[str, Exl3Facts]) -> None:
    """2.9 bits is what the pack weighs; no tensor has K = 2.9, and none has its integer part."""
    assert {module.k2 for module in facts.values()} == {4, 6, 8, 10, 12, 16}
    assert facts["layers.0.ffn.experts.0.w1"].bits == 3


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (packed("layers.3.ffn.experts.1.w2", 2), "layers.3.ffn.experts.1.w2: K=2, expected 3"),
        (packed("layers.29.ffn.shared_experts.w2", 4), "shared_experts.w2: K=4, expected 5"),
        (packed("layers.2.attn.indexer.wk", 5), "indexer.wk: K=5, expected 8"),
        (packed("layers.5.engram.wkv", 5), "layers.5.engram.wkv: not part of the expected pack"),
        (packed("mtp.1.attn.wq_a", 2.5), "mtp.1.attn.wq_a: K=2.5, expected 4"),
        (packed("layers.40.attn.wq_a", 5), "layers.40.attn.wq_a: not part"),
    ],
)
def test_differences_are_named(change: dict[str, TensorHeader], line: str) -> None:
    found = kmap.differences(scan_modules(published() | change), kmap.PUBLISHED_2_9)
    assert len(found) == 1 and line in found[0]


def test_absent_cells_and_another_codebook_are_named() -> None:
    headers = {k: v for k, v in published().items() if not k.startswith(("head.", "mtp.2."))}
    del headers["layers.7.attn.wkv.mul1"]
    found = kmap.differences(scan_modules(headers), kmap.PUBLISHED_2_9)
    assert found == [
        "head: no packed linear found",
        "layers.7.attn.wkv: codebook 3inst, expected mul1",
        "mtp of stage 2: no packed linear found",
    ]


def test_facts_of_one_linear() -> None:
    facts = scan_modules(packed("layers.0.attn.wkv", 2.5, 256, 384))["layers.0.attn.wkv"]
    assert (facts.in_features, facts.out_features, facts.k2, facts.bits) == (256, 384, 5, 2.5)
    assert facts.codebook == "mul1" and not facts.has_bias
    assert facts.trellis_shape == (16, 24, 40)
    assert facts.trellis_bytes == 16 * 24 * 40 * 2
    assert facts.column_ranges(3) == [(0, 128), (128, 256), (256, 384)]
    with pytest.raises(Exl3FormatError, match=r"layers\.0\.attn\.wkv: cannot keep inputs 0\.\.64"):
        facts.row_slice(0, 64)


@pytest.mark.parametrize("codebook", ["mul1", "mcg", "3inst"])
def test_the_marker_that_is_present_picks_the_codebook(codebook: str) -> None:
    assert scan_modules(packed("k", 3, codebook=codebook))["k"].codebook == codebook


def test_legacy_signs_bias_and_the_obsolete_scale() -> None:
    headers = packed("k", 3, 256, 128)
    del headers["k.suh"]
    headers |= {"k.su": header("I16", (16,)), "k.bias": header("F16", (128,))}
    headers |= {"k.scale": header("F32", ())}
    facts = scan_modules(headers)["k"]
    assert facts.legacy_su and not facts.legacy_sv and facts.has_bias


def test_native_tensors_are_no_modules() -> None:
    native = {"layers.0.ffn.gate.bias": header("F32", (8,)), "a.scale": header("F32", (8,))}
    assert scan_modules(native) == {}


CONTRADICTIONS: list[tuple[dict[str, TensorHeader | None], str]] = [
    ({"k.suh": None}, "k.trellis in .* has no k.suh"),
    ({"k.trellis": None}, "has no k.trellis"),
    ({"k.svh": header("F16", (256,))}, r"k.svh in .*expected F16 \[128\]"),
    ({"k.suh": header("BF16", (128,))}, r"k.suh in .*BF16.*expected F16 \[128\]"),
    ({"k.su": header("I16", (8,))}, "k.suh in .* stands beside k.su"),
    ({"k.mcg": header("I32", ())}, "stands beside k.mcg"),
    ({"k.mul1": header("F16", ())}, "k.mul1 in .*expected one I32"),
    ({"k.weight": header("BF16", (128, 128))}, "packed as well as plain"),
    ({"k.trellis": header("I16", (8, 8, 44))}, "44 words a tile is no EXL3 rate"),
    ({"k.trellis": header("I16", (7, 8, 48))}, "not multiples of 128"),
    ({"k.trellis": header("I32", (8, 8, 48))}, "expected I16"),
    ({"k.trellis": header("I16", (8, 8, 40)), "k.mul1": None}, "K=2.5 exists for .*mul1 only"),
    ({"k.bias": header("F16", (64,))}, "k.bias in .*expected F16 or F32"),
]


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS)
def test_contradictions_name_tensor_and_file(change, message: str) -> None:
    headers = {k: v for k, v in (packed("k", 3) | change).items() if v is not None}
    with pytest.raises(Exl3FormatError, match=message) as error:
        scan_modules(headers)
    assert re.search(r"k\.\w+ in model-1\.safetensors", str(error.value))
