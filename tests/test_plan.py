"""Plans against what is known: layouts that run or cannot, published capacities, measured boots."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from settings_root import settings_of

from launcher import cli
from launcher.plan import others, pair, source
from launcher.plan.asked import asked, serving
from launcher.plan.machines import MACHINES, capability
from spark_overlay.budget import kv
from spark_overlay.budget.buffers import Serving
from spark_overlay.budget.layouts import cut_faults, layout, layouts, legal_cuts, tp_faults
from spark_overlay.budget.node import GIB, Asked, Node, largest, low_water, node
from spark_overlay.budget.shape import BudgetError
from spark_overlay.budget.weights import Part

SOURCE = source.published()
SHAPE, CONTENTS = SOURCE.shape, SOURCE.contents
WHOLE = [Part.whole(SHAPE)]
POOL = int(2.5 * GIB)
#: The published boot: text only, three draft tokens, a workspace of one prompt.
BOOT = Serving(614_400, 2, 2048, draft_tokens=3, workspace=1)
ASKED = Asked(BOOT, POOL, floor=int(1.5 * GIB))


# ---- KV cache -----------------------------------------------------------------------------------


def test_the_published_capacities_to_the_token() -> None:
    found = kv.capacity(SHAPE, WHOLE, [POOL], BOOT, "states")
    assert found.tokens == 774_400
    other = replace(BOOT, max_len=600_000, batch=1536)
    assert kv.capacity(SHAPE, WHOLE, [POOL], other, "states").tokens == 785_676
    assert kv.capacity(SHAPE, WHOLE, [4 * GIB], other, "states").tokens == pytest.approx(
        1_253_996, rel=0.02
    )


def test_vllms_pages_hold_nearly_twice_as_much() -> None:
    """A ratio-2 layer's page of 64 tokens has 32 states, and windows share blocks with it."""
    found = kv.capacity(SHAPE, WHOLE, [POOL], replace(BOOT, max_len=600_000, batch=1024))
    assert (found.tokens, found.block_bytes) == (1_387_409, 116_928)


def test_a_million_tokens_and_the_longest_request() -> None:
    million = replace(BOOT, max_len=1_048_576, batch=1024)
    found = kv.capacity(SHAPE, WHOLE, [POOL], million)
    assert found.requests >= 1
    small = POOL // 4
    longest = kv.longest(SHAPE, WHOLE, [small], million, SHAPE.max_position)
    assert kv.capacity(SHAPE, WHOLE, [small], replace(million, max_len=longest)).requests >= 1
    assert kv.capacity(SHAPE, WHOLE, [small], replace(million, max_len=longest + 1)).requests < 1
    assert kv.longest(SHAPE, WHOLE, [1000], million, SHAPE.max_position) == 0


def test_the_tightest_stage_decides() -> None:
    stages = layout(SHAPE, CONTENTS, 2, (20, 20)).parts(draft=True, vision=False)
    both = kv.capacity(SHAPE, stages, [GIB, 8 * GIB], BOOT)
    assert both.blocks == kv.capacity(SHAPE, stages, [GIB, GIB], BOOT).blocks
    # Three of the four compressed caches, and their indices, are the first stage's.
    kinds = [[c.name for c in kv.caches(SHAPE, part, BOOT) if c.kind == "full"] for part in stages]
    assert [len(names) for names in kinds] == [6, 2]


def test_pages_that_cannot_be() -> None:
    with pytest.raises(BudgetError, match="33 tokens"):
        kv.caches(SHAPE, WHOLE[0], replace(BOOT, block=33))


# ---- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "said"),
    [
        (3, "64 attention heads cannot be shared by 3 ranks"),
        (4, "the experts' intermediate: 2304 channels over 4 ranks is 576, 4.5 blocks of 128"),
        (4, "the vocabulary: 129280 channels over 4 ranks is 32320, 252.5 blocks"),
        (8, "2304 channels over 8 ranks is 288, 2.25 blocks"),
        (16, "8 output groups cannot be shared by 16 ranks"),
        (32, "24 Engram columns leave one of 32 ranks without any"),
    ],
)
def test_tensor_parallel_sizes_that_exl3_refuses(tp: int, said: str) -> None:
    assert any(said in fault for fault in tp_faults(SHAPE, CONTENTS, tp))


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_sizes_that_run(tp: int) -> None:
    assert tp_faults(SHAPE, CONTENTS, tp) == []


def test_stages_begin_with_a_kv_source_or_before_the_first() -> None:
    assert legal_cuts(SHAPE) == [1, 2, 8, 14, 20]
    (fault,) = cut_faults(SHAPE, 28)
    assert "layers 28-39 read the compressed KV cache of layer 20" in fault
    (fault,) = cut_faults(SHAPE, 5)
    assert "layers 5-7 read the compressed KV cache of layer 2" in fault


def test_a_layer_that_shares_only_an_index_is_kept_with_it() -> None:
    """No such layer in V4.1; in another model it would read the choice of another stage."""
    other = replace(SHAPE, kv_sources=(2, 8, 14, 20, 30))
    (fault,) = cut_faults(other, 30)
    assert "layers 30, 31 read the indexer's choice of layer 28" in fault


def test_six_gpus_as_the_fork_has_them() -> None:
    found = layout(SHAPE, CONTENTS, 2, (14, 14, 12))
    assert found.name == "TP2 x PP3" and not found.tp_faults
    (fault,) = found.stage_faults
    assert "cannot begin with layer 28" in fault and "1, 2, 8, 14, 20" in fault
    assert any("no bounded replay" in note for note in found.notes)


def test_every_layout_of_six() -> None:
    found = {each.name: each for each in layouts(SHAPE, CONTENTS, 6)}
    assert list(found) == ["TP6", "TP3 x PP2", "TP2 x PP3", "TP1 x PP6"]
    assert [name for name, each in found.items() if not each.faults] == ["TP2 x PP3", "TP1 x PP6"]
    assert found["TP2 x PP3"].layers == (8, 12, 20)
    assert found["TP1 x PP6"].layers == (1, 1, 6, 6, 6, 20)


def test_more_stages_than_the_model_has_places_for() -> None:
    (fault,) = layouts(SHAPE, CONTENTS, 7)[1].stage_faults[:1]
    assert "7 stages: only 6 can be made" in fault


def test_more_gpus_than_layers() -> None:
    assert [each.name for each in layouts(SHAPE, CONTENTS, 64)][-2:] == ["TP4 x PP16", "TP2 x PP32"]


def test_a_draft_reads_layers_of_the_last_stage() -> None:
    found = layout(SHAPE, CONTENTS, 1, (38, 2))
    assert any("the draft reads layers 37-39" in fault for fault in found.stage_faults)
    plain = layout(SHAPE, CONTENTS, 1, (38, 2), draft=False)
    assert len(plain.stage_faults) == len(found.stage_faults) - 1


@pytest.mark.parametrize("layers", [(14, 14), (0, 20, 20), ()])
def test_stages_that_are_no_partition(layers: tuple[int, ...]) -> None:
    with pytest.raises(BudgetError, match="sum to 40"):
        layout(SHAPE, CONTENTS, 2, layers)


# ---- one Spark ----------------------------------------------------------------------------------


def test_the_published_boot_and_its_long_prompts() -> None:
    """Available on the head: 4.07 to 4.21 GiB when warm; 2.56 after 455,000 tokens, 2.1 after
    601,000. With 3 GiB of KV a prompt of 470,000 ran into the guard's 1.5."""
    warm = node(SHAPE, CONTENTS, ASKED).left
    assert warm / GIB == pytest.approx(4.14, abs=0.1)
    for prompt, low in ((455_000, 2.56), (601_000, 2.1)):
        assert low_water(warm, prompt, POOL) / GIB == pytest.approx(low, abs=0.12)
    larger = node(SHAPE, CONTENTS, replace(ASKED, pool=3 * GIB)).left
    assert low_water(larger, 470_000, 3 * GIB) / GIB == pytest.approx(1.5, abs=0.12)


def at(name: str, value: int) -> Asked:
    if name == "pool":
        return replace(ASKED, pool=value)
    return replace(ASKED, serving=replace(BOOT, **{name: value}))


def holds(found: Node, question: Asked) -> bool:
    low = low_water(found.left, question.serving.max_len, question.pool)
    return found.capacity.requests >= 1 and low >= question.floor


@pytest.mark.parametrize(("name", "step"), [("max_len", 1024), ("pool", 64 << 20), ("batch", 64)])
def test_the_largest_holds_and_one_step_more_does_not(name: str, step: int) -> None:
    most = getattr(largest(SHAPE, CONTENTS, ASKED), name)
    assert holds(node(SHAPE, CONTENTS, at(name, most)), at(name, most))
    more = at(name, most + step)
    # The batch ends where nodes were wedged, whatever a table says.
    assert (name == "batch" and most == 2048) or not holds(node(SHAPE, CONTENTS, more), more)


def test_nothing_fits_a_small_node() -> None:
    found = largest(SHAPE, CONTENTS, replace(ASKED, memory=64 * GIB))
    assert (found.max_len, found.pool, found.batch) == (0, 0, 0)


def test_settings_in_the_budgets_terms(tmp_path: Path) -> None:
    given = settings_of(tmp_path, "SPEC_METHOD=none\nLANGUAGE_MODEL_ONLY=0\nDSV41_CACHE_GIB=2\n")
    found = asked(given, SOURCE)
    assert (found.serving.draft_tokens, found.serving.vision, found.pool) == (0, True, POOL)
    assert found.engram_cache == 2 * GIB
    rows = {row.name: row.bytes for row in node(SHAPE, CONTENTS, found).rows}
    assert rows["Engram rows kept (DSV41_CACHE_GIB)"] == 2 * GIB
    assert rows["indexer workspace"] == 600_000 * 132


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("", 1),
        ("DSV41_INDEXER_PREFILL_FACTOR=", 40),
        ("DSV41_INDEXER_PREFILL_FACTOR=\nGLM53_INDEXER_WORKSPACE=rightsize\nMAX_NUM_SEQS=3", 3),
        ("GLM53_INDEXER_WORKSPACE=rightsize\nDSV41_INDEXER_PREFILL_FACTOR=5", 5),
    ],
)
def test_the_indexers_workspace(tmp_path: Path, text: str, prompts: int) -> None:
    assert serving(settings_of(tmp_path, text)).workspace == prompts


def test_a_pool_that_vllm_measures(tmp_path: Path) -> None:
    given = settings_of(tmp_path, "KV_CACHE_MEMORY_BYTES=\nGPU_MEM_UTIL=0.9\n")
    larger = settings_of(tmp_path, "KV_CACHE_MEMORY_BYTES=\nGPU_MEM_UTIL=0.95\n")
    less, more = asked(given, SOURCE).pool, asked(larger, SOURCE).pool
    assert 0 < less < more and (more - less) / GIB == pytest.approx(0.05 * 121.69, abs=0.01)


def test_prefill_and_decode_on_a_spark_each() -> None:
    made = pair.plan_pair(SOURCE, ASKED)
    assert made.whole > made.node.memory
    assert pair.as_json(made)["prefill_decode_split"]["fits"] is False
    assert any("195.21 GiB of weights in 121.69 GiB" in line for line in pair.tell(made))


# ---- other machines -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "gpus", "running"),
    [
        ("spark", 1, []),
        ("spark", 2, ["TP2", "TP1 x PP2"]),
        ("h200", 1, []),
        ("h200", 2, ["TP2", "TP1 x PP2"]),
        ("a100-80", 4, ["TP2 x PP2"]),
        ("a800-80", 3, []),
        ("ga100-64", 6, ["TP2 x PP3"]),
        ("a100-40", 8, []),
        ("3090", 8, []),
        ("rtx6000-pro", 4, ["TP2 x PP2"]),
    ],
)
def test_machines(machine: str, gpus: int, running: list[str]) -> None:
    ways = others.plan_machine(SOURCE, MACHINES[machine], gpus, ASKED)
    assert [way.layout.name for way in ways if way.runs] == running
    assert all(way.longest == 1_048_576 for way in ways if way.runs and machine != "spark")


def test_the_six_gpus_of_the_fork_are_shown_beside() -> None:
    ways = others.plan_machine(SOURCE, MACHINES["ga100-64"], 6, ASKED)
    fork = ways[-1]
    assert fork.layout.layers == (14, 14, 12) and fork.fits and not fork.runs
    # More than the 4,648,480 tokens that it reports beside the native checkpoint's weights.
    assert fork.tokens > 4_648_480
    lines = [*others.tell(SOURCE, MACHINES["ga100-64"], 6, ways)]
    assert any("4,648,480" in line for line in lines)
    assert any("TP2 beside TP4" in line and "4.5 blocks" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "number"),
    [("sm80", 80), ("SM_90", 90), ("8.0", 80), ("sm121a", 121), ("12.1", 121), ("sm", None),
     ("80.12", None), ("hopper", None), ("8", None), ("sm1234", None), ("", None)],
)  # fmt: skip
def test_architectures(text: str, number: int | None) -> None:
    assert capability(text) == number


# ---- the verb -----------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".env").write_text("")
    return tmp_path


def plan(root: Path, *words: str) -> int:
    return cli.main(["plan", "--published", *words], root=root, environ={})


def test_the_pair_by_its_settings(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert plan(root, "--set", "DSV41_INDEXER_PREFILL_FACTOR=40") == 1
    out = capfd.readouterr().out
    assert "It does not fit" in out and "DSV41_INDEXER_PREFILL_FACTOR=1" in out
    assert plan(root, "--json") == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert found["fits"] and found["kv"]["tokens"] == 1_387_409
    assert found["available_bytes"] == found["memory_bytes"] - sum(
        r["bytes"] for r in found["rows"]
    )


def test_another_machine(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert plan(root, "--machine", "a100-80", "--gpus", "4") == 0
    out = capfd.readouterr().out
    assert "TP4: refused" in out and "TP2 x PP2 (20, 20 layers)" in out
    assert plan(root, "--gpus", "1", "--memory", "24", "--arch", "sm86", "--json") == 1
    assert json.loads(capfd.readouterr().out)["layouts"][0]["fits"] is False
    assert plan(root, "--machine", "h200") == 0
    assert "2: TP" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "0"], "'0' is not a number from 1 to 64"),
        (["--gpus", "4"], "without their memory"),
        (["--memory", "nan"], "'nan' is not GiB"),
        (["--memory", "-1"], "is not GiB"),
        (["--memory", "80", "--arch", "sm75"], "need sm80 or newer"),
        (["--memory", "80", "--arch", "volta"], "no architecture"),
        (["--machine", "dgx"], "invalid choice: 'dgx'"),
        (["--machine", "h200", "--gpus", "5", "--layers", "20,20"], "share evenly"),
        (["--machine", "h200", "--layers", "20,20"], "--gpus not given"),
        (["--machine", "h200", "--gpus", "2", "--layers", "20,,20"], "is not numbers of layers"),
        (["--model", "/nowhere"], "not allowed with"),
    ],
)
def test_what_cannot_be_planned(
    root: Path, capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert plan(root, *words) == 2
    assert said in capfd.readouterr().err


def test_what_does_not_go_together(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "/nowhere"], root=root, environ={}) == 1
    assert "/nowhere/config.json cannot be read" in capfd.readouterr().err
    assert plan(root, "--machine", "h200", "--gpus", "2", "--layers", "1,2") == 1
    assert "sum to 40" in capfd.readouterr().err
    assert plan(root, "--set", "KV_BLOCK_SIZE=33") == 1
    assert "KV pages of 33 tokens" in capfd.readouterr().err
