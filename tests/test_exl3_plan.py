"""The launch tables: legal for every shape, alike for like calls, and said to be what they are."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_overlay.exl3.cuda import plan
from spark_overlay.exl3.cuda.plan import GroupPlan, Part, PlanError, Shape
from spark_overlay.exl3.format import LEGAL_K2

NAMES = sorted(path.stem for path in plan.TABLES.glob("*.json"))
BLOCKS = st.integers(1, 64).map(lambda n: 128 * n)
SHAPES = st.lists(
    st.builds(Shape, BLOCKS, BLOCKS, st.sampled_from(LEGAL_K2)), min_size=1, max_size=16
)


def table(name: str) -> plan.Table:
    return plan.read(plan.TABLES / f"{name}.json")


def test_each_gpu_the_kernels_are_for_has_a_table_that_says_what_it_is() -> None:
    assert NAMES == ["sm_121", "sm_80", "sm_86", "sm_90"]
    for name in NAMES:
        found = table(name)
        assert found.name == name and found.how
        # A modelled table is the rule alone: an entry in it would look measured.
        assert bool(found.group or found.experts) == (found.origin == "measured")
    assert {name for name in NAMES if table(name).origin == "measured"} <= {"sm_90"}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(shapes=SHAPES, rows=st.integers(1, 64))
def test_every_group_has_a_legal_plan(name: str, shapes: list[Shape], rows: int) -> None:
    found = table(name).group_plan(shapes, rows)
    plan.check_group(found, shapes)
    assert plan.group_shared(shapes, rows, found) <= plan.MOST_SHARED
    for shape, part in zip(shapes, found.parts, strict=True):
        splits = -(-shape.kblocks // part.kblocks)
        assert (splits - 1) * part.kblocks < shape.kblocks  # none is empty


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(hidden=BLOCKS, inter=st.integers(1, 32).map(lambda n: 128 * n), tokens=st.integers(1, 21))
def test_every_expert_layer_has_a_legal_plan(
    name: str, hidden: int, inter: int, tokens: int
) -> None:
    for k2 in (6, 16):
        found = table(name).experts_plan(hidden, inter, tokens, 6, k2)
        plan.check_experts(found, inter)
        assert max(plan.experts_shared(inter, k2, found)) <= plan.MOST_SHARED


@settings(max_examples=25)
@given(shapes=SHAPES, rows=st.integers(1, 64))
def test_rows_of_one_step_share_a_plan(shapes: list[Shape], rows: int) -> None:
    step = next(s for s in plan.ROW_STEPS if rows <= s)
    found = table("sm_90")
    assert found.group_plan(shapes, rows) == found.group_plan(shapes, step)


def test_the_rule_fills_the_gpu_where_the_work_suffices() -> None:
    for name in NAMES:
        found = table(name)
        for shapes in ([Shape(5120, 1280, 10), Shape(5120, 512, 10)], [Shape(4096, 5120, 10)]):
            chosen = found.group_plan(shapes, 4)
            ctas = sum(
                s.chunks * -(-s.kblocks // p.kblocks)
                for s, p in zip(shapes, chosen.parts, strict=True)
            )
            units = sum(s.chunks * s.kblocks for s in shapes)
            # A CTA on most SMs, or every warp has no more than one k-block.
            assert ctas >= 0.8 * found.sms or ctas * chosen.warps >= units


#: V4.1 on one of two ranks: groups by K2, and experts of K = 3 with a shared one of K = 5.
GROUPS = {
    "wq_a + wkv": [Shape(5120, 1280, 10), Shape(5120, 512, 10)],
    "wq_b": [Shape(1280, 16384, 10)],
    "wo_a": [Shape(4096, 1024, 10)] * 4,
    "wo_b": [Shape(4096, 5120, 10)],
    "gate + up": [Shape(5120, 1152, 10)] * 2,
    "down": [Shape(1152, 5120, 10)],
    "head": [Shape(5120, 64640, 12)],
    "draft": [Shape(5120, 1280, 8), Shape(5120, 512, 8)],
}


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", NAMES)
def test_two_ctas_of_a_group_share_an_sm_and_keep_it_busy(name: str, group: str, rows: int) -> None:
    found, shapes = table(name), GROUPS[group]
    chosen = found.group_plan(shapes, rows)
    shared = plan.group_shared(shapes, rows, chosen)
    assert_room(found, shared, chosen.warps, shapes[0].k2)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 21])
@pytest.mark.parametrize("name", NAMES)
def test_ctas_of_the_experts_share_an_sm_and_keep_it_busy(name: str, tokens: int) -> None:
    """Two on an SM, whatever the tokens: an expert's rows go by eights."""
    found = table(name)
    for k2, most in ((6, 10), (4, 10), (8, 8)):
        chosen = found.experts_plan(5120, 1152, tokens, 6, most)
        first, second = plan.experts_shared(1152, most, chosen)
        assert_room(found, first, chosen.a_warps, k2)
        assert_room(found, second, chosen.b_warps, k2)


def assert_room(found: plan.Table, shared: int, warps: int, k2: int) -> None:
    """Two CTAs on an SM by shared memory, 128 registers a thread (compile_check.py holds the
    kernels to that) and threads; 8 KB of weights in flight, which a GB10 needs at 240 GB/s."""
    each = shared + plan.STATIC_SHARED + plan.CHARGED
    assert 2 * each <= found.shared_kb << 10 and shared + plan.STATIC_SHARED <= plan.MOST_SHARED
    assert 2 * warps * 32 * 128 <= 65536 and 2 * warps * 32 <= 1536
    assert 2 * warps * plan.flight_bytes(k2) >= 8 << 10


def test_an_entry_of_a_table_comes_before_the_rule(tmp_path: Path) -> None:
    shapes, chosen = (Shape(5120, 1280, 10),), GroupPlan(6, (Part(2, 9),))
    value = plan.show(table("sm_90")) | {"origin": "measured"}
    value["group"] = [{"shapes": [[5120, 1280, 10]], "rows": 8, "warps": 6, "parts": [[2, 9]]}]
    value["experts"] = [{"hidden": 5120, "inter": 1152, "slots": 8, "plan": [4, 2, 10, 6, 3, 5]}]
    file = tmp_path / "own.json"
    file.write_text(json.dumps(value))
    found = plan.read(file)
    assert found.group_plan(shapes, 5) == chosen != found.group_plan(shapes, 9)
    assert found.experts_plan(5120, 1152, 1, 6, 6) == plan.ExpertsPlan(4, 2, 10, 6, 3, 5)
    assert plan.parse(plan.show(found), "again") == found


@pytest.mark.parametrize(
    "changed",
    [
        {"origin": "guessed"},
        {"sms": "many"},
        {"dense_rows": 65},
        {"group": [{"shapes": [[128, 128, 6]], "rows": 8, "warps": 8, "parts": [[3, 1]]}]},
        {"group": [{"shapes": [[128, 128, 6]], "rows": 8, "warps": 9, "parts": [[1, 1]]}]},
        {"group": [{"shapes": [[128, 128, 6]], "rows": 8, "warps": 8, "parts": [[1, 17]]}]},
        {"experts": [{"hidden": 128, "inter": 8192, "slots": 8, "plan": [8, 1, 1, 8, 1, 9]}]},
        {"experts": [{"hidden": 128, "inter": 128, "slots": 8, "plan": [8, 1, 1, 8, 1]}]},
    ],
)
def test_a_file_that_is_no_table_is_named(changed: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=r"^mine: no launch table"):
        plan.parse(plan.show(table("sm_90")) | changed, "mine")


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_86"),
                             ((9, 0), "sm_90"), ((12, 0), "sm_121"), ((12, 1), "sm_121"),
                             ((13, 0), "sm_121")]
)  # fmt: skip
def test_a_gpu_finds_its_table(capability: tuple[int, int], name: str) -> None:
    assert plan.for_capability(*capability).name == name


def test_a_gpu_that_is_too_old_is_refused() -> None:
    with pytest.raises(PlanError, match="sm_75: the EXL3 kernels need sm_80"):
        plan.for_capability(7, 5)


@pytest.mark.parametrize("rows", [0, 65])
def test_rows_beyond_a_launch_are_refused(rows: int) -> None:
    with pytest.raises(PlanError, match=f"{rows} rows: a launch takes 1 to 64"):
        table("sm_90").group_plan([Shape(128, 128, 6)], rows)


def test_what_a_call_needs_by_hand() -> None:
    # 5 splits of 8 of 40 k-blocks; 10 chunks; 8 rows of 128 fp32 each.
    one = plan.group_need([Shape(5120, 1280, 10)], 4, GroupPlan(8, (Part(1, 8),)))
    assert one == plan.Need(10 * 5 * 8 * 512, 10)
    # Two passes of 16 rows, two chunks a CTA.
    two = plan.group_need([Shape(5120, 1280, 10)], 20, GroupPlan(8, (Part(2, 8),)))
    assert two == plan.Need(2 * 10 * 5 * 16 * 512, 2 * 5)
    whole = plan.group_need([Shape(1024, 1280, 10)], 4, GroupPlan(8, (Part(1, 8),)))
    assert whole == plan.Need(0, 10)
    chosen = plan.ExpertsPlan(8, 1, 8, 5, 1, 5)
    needed = plan.experts_need(5120, 1152, 4, 24, True, chosen)
    assert needed.counters == 25 * 9 + 40
    assert needed.scratch_bytes == 28 * 2 * 5 * 1152 * 4 + 28 * 1152 * 2 + 28 * 2 * 5120 * 4
