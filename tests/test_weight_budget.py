"""What a rank holds, from headers alone: the loader's own rule, every class of tensor, no torch."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from _packs import header, packed, write_safetensors

from launcher.plan import source, weight_budget
from spark_overlay.budget.checkpoint import Contents
from spark_overlay.budget.published import CONFIG
from spark_overlay.budget.shape import BudgetError, ModelShape
from spark_overlay.budget.weights import ClassWeight, Part, total, weigh
from spark_overlay.exl3.layout import Exl3FormatError
from spark_overlay.exl3.modules import scan_modules
from spark_overlay.exl3.names import Exl3NameError
from spark_overlay.exl3.shares import share, share_bytes, split_of
from spark_overlay.rehearsal import bits as rehearsal_bits
from spark_overlay.rehearsal import shape as rehearsal

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "weight_budget.py"
GIB = 1 << 30

CLASSES = {
    "routed experts", "shared experts", "attention", "attention sinks", "indexer", "compressor",
    "Engram projection", "embedding", "head", "router", "norms", "hyper-connections", "vision",
    "image vectors", "draft routed experts", "draft shared experts", "draft attention",
    "draft attention sinks", "draft router", "draft norms", "draft hyper-connections",
    "draft main projection", "draft Markov head", "draft confidence head",
}  # fmt: skip


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return ModelShape.from_config(CONFIG)


@pytest.fixture(scope="module")
def contents() -> Contents:
    return source.published().contents


def rows_of(
    contents: Contents, shape: ModelShape, tp: int = 2, vision: bool = True, draft: bool = True
) -> list[ClassWeight]:
    return weigh(contents, shape, Part.whole(shape, vision=vision, draft=draft), tp)


def test_the_published_pack(contents: Contents, shape: ModelShape) -> None:
    """47,900 matrices in 196.14 GiB of files, whose headers take some 0.02 of them. 895 other
    tensors is what the native checkpoint's 96,085 come to without experts, scales and tables."""
    assert len(contents.packed) == 47_900 and len(contents.native) == 895
    rows = rows_of(contents, shape)
    assert sum(row.tensors for row in rows) == 4 * 47_900 + 895
    assert sum(row.stored for row in rows) / GIB == pytest.approx(196.12, abs=0.02)


def test_a_rank_of_two_is_what_a_boot_measured(contents: Contents, shape: ModelShape) -> None:
    rows = rows_of(contents, shape)
    assert total(rows) / GIB == pytest.approx(98.9, abs=0.4)
    assert {row.name for row in rows} == CLASSES
    # A published estimate of 99.5 counts wo_b as whole on both ranks.
    wo_b = sum(row.resident for row in rows if row.name == "attention" and row.split == "rows")
    assert (total(rows) + wo_b) / GIB == pytest.approx(99.5, abs=0.15)


def test_what_is_left_out_is_not_held(contents: Contents, shape: ModelShape) -> None:
    whole = {row.name: 0 for row in rows_of(contents, shape)}
    less = rows_of(contents, shape, vision=False, draft=False)
    assert {row.name for row in less} == set(whole)
    gone = {row.name for row in less if not row.resident}
    assert gone == {n for n in CLASSES if n.startswith("draft ")} | {"vision", "image vectors"}


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_hold_everything_between_them(contents: Contents, shape: ModelShape, tp: int) -> None:
    part = Part.whole(shape)
    ranks = [weigh(contents, shape, part, tp, rank) for rank in range(tp)]
    assert len({total(rows) for rows in ranks}) == 1
    for facts in contents.kinds:
        key = facts.key
        parts = [share(facts, rank, tp, shape.o_groups) for rank in range(tp)]
        held = [cut for cut in parts if cut is not None]
        weights = sum(share_bytes(facts, cut) for cut in held)
        once = {"columns": 2 * facts.in_features, "rows": 2 * facts.out_features}
        scales = 2 * (facts.in_features + facts.out_features)
        if split_of(key) == "none":
            assert weights == tp * (facts.trellis_bytes + scales)
        else:
            more = (tp - 1) * once.get(split_of(key), 0)
            assert weights == facts.trellis_bytes + scales + more
        assert len(held) == (1 if split_of(key) == "groups" else tp)


def test_stages_hold_everything_between_them(contents: Contents, shape: ModelShape) -> None:
    """And nothing twice, but for the tower and the embedding that the draft needs."""
    whole = total(weigh(contents, shape, Part.whole(shape), 2))
    first = Part(range(0, 20), last=False)
    second = Part(range(20, 40), first=False)
    rows = {row.name: row.resident for row in rows_of(contents, shape)}
    twice = rows["embedding"] + rows["vision"] + rows["image vectors"]
    stages = sum(total(weigh(contents, shape, part, 2)) for part in (first, second))
    assert stages == whole + twice


def test_the_config_tells_the_tensors_of_the_rehearsal() -> None:
    """The generator that stands for the published pack makes, of the rehearsal's config, exactly
    what the rehearsal's own generator writes."""
    small = ModelShape.from_config({"text_config": rehearsal.TEXT})
    told = Contents.of_config(small, rehearsal_bits.bits, "mul1")
    linears = {each.key: each for each in rehearsal.linears()}
    assert set(told.packed) == set(linears)
    for key, facts in told.packed.items():
        assert (facts.in_features, facts.out_features) == (linears[key].n_in, linears[key].n_out)
        assert facts.bits == rehearsal_bits.bits(key)
        # Its own idea of what two ranks share.
        assert {"whole": "groups"}.get(linears[key].split, linears[key].split) == split_of(key)
    natives = {each.name: (each.dtype, each.shape) for each in rehearsal.natives()}
    assert {name: (h.dtype, h.shape) for name, h in told.native.items()} == natives


def test_four_ranks_are_refused_and_told_why(contents: Contents, shape: ModelShape) -> None:
    experts = contents.packed["layers.0.ffn.experts.0.w1"]
    with pytest.raises(Exl3FormatError, match=r"2304 channels over 4 ranks is 576"):
        share(experts, 0, 4)
    with pytest.raises(Exl3FormatError, match="4 ranks"):
        rows_of(contents, shape, tp=4)
    with pytest.raises(Exl3FormatError, match="3 ranks cannot hold whole ones of 8 groups"):
        share(contents.packed["layers.0.attn.wo_a.slice.0"], 0, 3, shape.o_groups)
    with pytest.raises(Exl3FormatError, match="no rank 2 of 2"):
        share(experts, 2, 2)


def test_tensors_without_a_place(shape: ModelShape) -> None:
    part = Part.whole(shape)
    strange = Contents.of_headers({"layers.0.attn.new_gate.weight": header("BF16", (4, 4))})
    with pytest.raises(BudgetError, match=r"1 tensors .* layers\.0\.attn\.new_gate\.weight"):
        weigh(strange, shape, part, 1)
    with pytest.raises(Exl3NameError, match="wq_c"):
        weigh(Contents.of_headers(packed("layers.0.attn.wq_c", 4)), shape, part, 1)


def test_tables_are_in_files_and_plain_linears_are_cut_alike(shape: ModelShape) -> None:
    headers = {
        "layers.1.engram.embed.weight": header("F8_E4M3", (1000, 256)),
        "layers.0.attn.wq_b.weight": header("BF16", (512, 256)),
        "layers.0.attn.wq_a.weight": header("BF16", (256, 256)),
        "embed.weight": header("BF16", (100, 8)),
    }
    rows = weigh(Contents.of_headers(headers), shape, Part.whole(shape), 2)
    found = {(row.name, row.split): row.resident for row in rows}
    assert found == {
        ("Engram tables", "file"): 0,
        ("attention", "columns"): 512 * 256,
        ("attention", "none"): 2 * 256 * 256,
        # The vocabulary is made a multiple of 64 first.
        ("embedding", "vocabulary"): 128 * 8,
    }


def test_a_bias_for_images_is_allocated_stored_or_not(shape: ModelShape) -> None:
    plain = {"layers.0.ffn.gate.bias": header("F32", (384,))}
    both = {**plain, "layers.0.ffn.gate.bias_vl": header("F32", (384,))}
    blind = replace(shape, vision=replace(shape.vision, layers=0))
    sizes = [
        total(weigh(Contents.of_headers(headers), model, Part.whole(model, vision=False), 1))
        for headers, model in ((plain, shape), (both, shape), (plain, blind))
    ]
    assert sizes == [2 * 384 * 4, 2 * 384 * 4, 384 * 4]


def test_old_signs_are_held_as_scales() -> None:
    headers = packed("head", 4, 128, 256)
    del headers["head.suh"]
    headers["head.su"] = header("I16", (8,))
    (facts,) = scan_modules(headers).values()
    assert share_bytes(facts, share(facts, 0, 1)) == 128 * 256 // 2 + 2 * (128 + 256)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "max_position_embeddings is None"),
        ({"text_config": 3}, "text_config is no object"),
        ({**CONFIG["text_config"], "o_groups": True}, "o_groups is True"),
        ({**CONFIG["text_config"], "compress_ratios": [1, "2"]}, "compress_ratios is"),
        ({**CONFIG, "vision_config": {"num_hidden_layers": -1}}, "vision_config.num_hidden_layers"),
        ({**CONFIG, "vision_config": "x"}, "vision_config is 'x', needed an object"),
        (
            {**CONFIG["text_config"], "rope_scaling": [1]},
            r"rope_scaling is \[1\], needed an object",
        ),
        ({**CONFIG["text_config"], "rope_scaling": {"factor": None}}, "factor is None"),
        ({**CONFIG["text_config"], "compress_ratios": []}, "names layer 2, which has no entry"),
        ({**CONFIG["text_config"], "kv_source_layer_ids": [-1]}, "names layer -1"),
        ({**CONFIG["text_config"], "head_dim": 0}, "head_dim 0, needed"),
        ({**CONFIG["text_config"], "num_hidden_layers": 10**12}, "needed 1 to 4096 layers"),
        ({**CONFIG["text_config"], "num_nextn_predict_layers": 10**12}, "needed 4096 or fewer"),
    ],
)
def test_a_config_of_another_model(config: dict[str, object], said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        ModelShape.from_config(config)


def test_the_script_by_a_bare_python() -> None:
    """One that has neither numpy nor torch, nor anything of the launcher's."""
    code = (
        "import runpy, sys; sys.modules.update(numpy=None, torch=None, requests=None, docker=None);"
        f"sys.argv = ['weight_budget.py', *sys.argv[1:]]; runpy.run_path({str(SCRIPT)!r},"
        " run_name='__main__')"
    )
    words = ["--published", "--tp", "2", "--json"]
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, *words], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["per_rank_gib"] == pytest.approx(98.9, abs=0.4)
    resident = sum(row["resident_bytes"] for row in found["classes"])
    assert found["per_rank_bytes"] == max(found["ranks_bytes"]) == resident
    assert {row["class"] for row in found["classes"]} == CLASSES
    assert found["node"]["rows"][0]["name"] == "weights"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--tp", "0", "--published"], 2, "'0' is not a number from 1 to 64"),
        (["--tp", "two"], 2, "'two'"),
        (["--published", "somewhere"], 2, "not allowed with"),
        (["--tp", "4", "--published"], 1, "576, 4.5 blocks of 128"),
        (["/nowhere/at/all"], 1, "/nowhere/at/all/config.json cannot be read: No such file"),
        ([], 1, "model/config.json cannot be read"),
    ],
)
def test_the_script_says_what_is_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    try:
        found = weight_budget.main(words, tmp_path)
    except SystemExit as end:  # argparse has said it
        found = end.code
    assert found == code and said in capfd.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_settings_that_no_pool_can_have_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".env").write_text("KV_BLOCK_SIZE=3\n")
    assert weight_budget.main(["--published"], tmp_path) == 1
    err = capfd.readouterr().err
    assert "KV pages of 3 tokens cannot hold states of 2" in err and "do next: " in err


def test_a_pool_by_share_is_what_so_many_ranks_leave(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rank's weights are more than a Spark has; two ranks' leave some."""
    (tmp_path / ".env").write_text("KV_CACHE_MEMORY_BYTES=\n")
    pools = {}
    for tp in ("1", "2"):
        assert weight_budget.main(["--published", "--tp", tp, "--json"], tmp_path) == 0
        rows = json.loads(capfd.readouterr().out)["node"]["rows"]
        pools[tp] = next(row["bytes"] for row in rows if row["name"] == "KV pool")
    assert pools["1"] == 0 < pools["2"]


def test_a_cut_off_shard_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shard = tmp_path / "model-1.safetensors"
    write_safetensors(shard, {"norm.weight": ("BF16", (4,), bytes(8))})
    assert weight_budget.main([str(tmp_path)], tmp_path) == 1
    assert "holds no EXL3 tensor" in capfd.readouterr().err
    shard.write_bytes(shard.read_bytes()[:-2])
    assert weight_budget.main([str(tmp_path)], tmp_path) == 1
    err = capfd.readouterr().err
    assert "model-1.safetensors" in err and "truncated" in err


def test_in_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert weight_budget.main(["--published", "--tp", "1", "--text-only"], tmp_path) == 0
    out = capfd.readouterr().out
    assert "TP1: 195.21 GiB" in out and "with draft\n" in out
