"""What a prefill's experts call needs; no chunk of V4.1 needs more than is said. No GPU."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import re
from pathlib import Path

import pytest

from spark_overlay.exl3.cuda import plan, plan_prefill
from spark_overlay.exl3.cuda.plan_prefill import PrefillPlan, prefill_need, prefill_shared

SOURCES = Path(__file__).resolve().parents[1] / "overlay" / "csrc" / "exl3"
TABLES = [plan.read(path) for path in sorted(plan.TABLES.glob("*.json"))]
#: MiB of scratch for any chunk of 128 to 8192 tokens (README says it).
BOUND = 474
SHAPE = (5120, 1152, 384)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_scratch_stays_under_its_bound(table: plan.Table) -> None:
    for tokens in range(128, 8193, 7):
        chosen = table.prefill_plan(6 * tokens, 384)
        for shared in (False, True):
            need = prefill_need(*SHAPE, tokens, 6, shared, chosen)
            assert need.scratch_bytes <= BOUND << 20, tokens
            assert need.waves * need.strips <= 25


def test_what_a_call_needs_by_hand() -> None:
    # 8 tokens of 2 experts of 3, 256 -> 128: (16 + 21) // 8 groups, 3 and the shared one's.
    need = prefill_need(256, 128, 3, 8, 2, True, PrefillPlan(0, 1))
    inputs = 2 * (5 + 16) * 2 * 2048 + 512  # 64 bytes of sums a group, rounded up
    outputs = 24 * 2 * 512
    rest = (5 + 16) * 2048 + 256 + 256 + 256 + 256 + 512
    assert need.scratch_bytes == max(inputs, outputs) + rest and (need.waves, need.strips) == (1, 1)


def test_a_smaller_pool_takes_more_waves_and_strips_until_it_is_refused() -> None:
    seen = [prefill_need(*SHAPE, 2048, 6, False, PrefillPlan(1, pool)) for pool in (400, 100, 40)]
    assert [need.waves for need in seen] == sorted(need.waves for need in seen)
    assert seen[0].strips == 1 < seen[1].strips < seen[2].strips
    with pytest.raises(ValueError, match="too small"):
        prefill_need(*SHAPE, 2048, 6, False, PrefillPlan(1, 5))


def test_the_table_chooses_by_rows_of_an_expert() -> None:
    (table,) = (table for table in TABLES if table.name == "sm_90")
    at = table.prefill_small * 384
    assert [table.prefill_plan(n, 384).variant for n in (at, at + 1)] == [0, 1]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_two_ctas_share_an_sm(table: plan.Table) -> None:
    for variant in table.prefill_variants:
        shared = prefill_shared(variant, 10, down=False)
        room = (table.shared_kb << 10) // (shared + plan.STATIC_SHARED + plan.CHARGED)
        assert room >= 2 and shared + plan.STATIC_SHARED <= plan.MOST_SHARED


def test_every_rate_has_room_in_shared_memory() -> None:
    for variant in range(len(plan_prefill.VARIANTS)):
        for k2 in range(2, 17):
            for down in (False, True):
                assert prefill_shared(variant, k2, down=down) <= 97 << 10, (variant, k2)


def test_a_tile_read_ahead_lies_within_the_warps_own_part() -> None:
    """A fast rate reads one tile past its last, in any launch that takes it."""
    for variant, v in enumerate(plan_prefill.VARIANTS):
        for most in range(2, 17):
            for k2 in (4, 6, 8, 10):
                needed = (v.tiles * v.columns + 1) * 16 * k2
                assert k2 > most or needed <= plan_prefill.warp_bytes(variant, most), (v, most, k2)
    text = (SOURCES / "multiply.cuh").read_text()
    assert "own = KT * CT * k2, ahead = (KT * CT + 1) * (k2 < 10 ? k2 : 10)" in text


def test_the_headers_numbers_are_ours() -> None:
    text = "".join(
        (SOURCES / name).read_text() for name in ("route.cuh", "grouped.cuh", "multiply.cuh")
    )
    for name in ("MAX_ENTRIES", "MAX_WAVES", "SPARE_GROUPS"):
        (found,) = re.findall(rf"constexpr int {name} = (\d+);", text)
        assert int(found) == getattr(plan_prefill, name), name
    for number, mine in enumerate(plan_prefill.VARIANTS):
        (sizes,) = re.findall(rf"struct Pick<{number}> \{{\s*using C = Config<([^>]*)>;", text)
        columns, tiles, stages, _, *groups = map(int, sizes.split(","))
        assert mine == plan_prefill.Variant(columns, tiles, stages, groups[-1])
