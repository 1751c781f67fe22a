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
    for shape, part in zip(shapes, found.parts, strict=True):
        splits = -(-shape.kblocks // part.kblocks)
        assert (splits - 1) * part.kblocks < shape.kblocks  # none is empty


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(hidden=BLOCKS, inter=st.integers(1, 32).map(lambda n: 128 * n), slots=st.integers(1, 128))
def test_every_expert_layer_has_a_legal_plan(
    name: str, hidden: int, inter: int, slots: int
) -> None:
    plan.check_experts(table(name).experts_plan(hidden, inter, slots), inter)


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
            # A CTA on every SM, or every warp has no more than one k-block.
            assert ctas >= found.sms or ctas * chosen.warps >= units


def test_an_entry_of_a_table_comes_before_the_rule(tmp_path: Path) -> None:
    shapes, chosen = (Shape(5120, 1280, 10),), GroupPlan(6, (Part(2, 9),))
    value = plan.show(table("sm_90")) | {"origin": "measured"}
    value["group"] = [{"shapes": [[5120, 1280, 10]], "rows": 8, "warps": 6, "parts": [[2, 9]]}]
    value["experts"] = [{"hidden": 5120, "inter": 1152, "slots": 8, "plan": [4, 2, 10, 9, 3]}]
    file = tmp_path / "own.json"
    file.write_text(json.dumps(value))
    found = plan.read(file)
    assert found.group_plan(shapes, 5) == chosen != found.group_plan(shapes, 9)
    assert found.experts_plan(5120, 1152, 6) == plan.ExpertsPlan(4, 2, 10, 9, 3)
    assert plan.parse(plan.show(found), "again") == found


@pytest.mark.parametrize(
    "changed",
    [
        {"origin": "guessed"},
        {"sms": "many"},
        {"dense_rows": 65},
        {"group": [{"shapes": [[128, 128, 6]], "rows": 8, "warps": 8, "parts": [[3, 1]]}]},
        {"group": [{"shapes": [[128, 128, 6]], "rows": 8, "warps": 10, "parts": [[1, 1]]}]},
        {"group": [{"shapes": [[128, 128, 6]], "rows": 8, "warps": 8, "parts": [[1, 17]]}]},
        {"experts": [{"hidden": 128, "inter": 8192, "slots": 8, "plan": [8, 1, 1, 8, 1]}]},
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
    chosen = plan.ExpertsPlan(8, 1, 8, 9, 1)
    needed = plan.experts_need(5120, 1152, 4, 24, True, chosen)
    assert needed.counters == 25 * 9 + 40
    assert needed.scratch_bytes == 28 * 2 * 5 * 1152 * 4 + 28 * 1152 * 2 + 28 * 5120 * 4
