"""What the overlay is told of Engram, and the line of statistics it writes."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _tables import small_config, small_layout, write_tables

from spark_overlay.engram.reporting import Reporter, line
from spark_overlay.engram.source import locate_tables
from spark_overlay.engram.store import FileRowStore, StoreStats
from spark_overlay.settings import OverlaySettings


def test_what_is_not_said_is_the_default() -> None:
    assert OverlaySettings.parse({}) == OverlaySettings()
    told = {
        "engram_dir": "/engram-src",
        "engram_store": "plain",
        "engram_packed_dir": "/packed",
        "weights_prepared_dir": "/packed",
        "engram_io_threads": 96,
        "engram_cache_gib": 1.5,
        "engram_stats_seconds": 60,
    }
    settings = OverlaySettings.parse(told)
    assert {name: getattr(settings, name) for name in told} == told
    assert OverlaySettings.parse({"engram_cache_gib": 2}).engram_cache_gib == 2


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("engram_store", "disk", "one of file, plain, memory"),
        ("engram_io_threads", 0, "a whole number of at least 1"),
        ("engram_io_threads", 1.5, "a whole number"),
        ("engram_io_threads", True, "a whole number"),
        ("engram_cache_gib", -0.5, "a number of at least 0"),
        ("engram_cache_gib", float("nan"), "a number of at least 0"),
        ("engram_cache_gib", "1", "a number of at least 0"),
        ("engram_stats_seconds", -1, "a whole number of at least 0"),
    ],
)
def test_a_value_that_cannot_be_is_named(key: str, value: Any, needed: str) -> None:
    with pytest.raises(ValueError, match=rf"spark_overlay\.{key}: found .*; needed {needed}"):
        OverlaySettings.parse({key: value})


def test_a_line_says_what_was_read_since_the_last_one() -> None:
    before = StoreStats(lookups=2, ids=24, rows=20, reads=40, bytes=1 << 20, seconds=0.5)
    now = StoreStats(lookups=12, ids=264, rows=120, reads=140, bytes=3 << 20, seconds=0.75)
    assert line("layer 14", before, now, 60) == (
        "Engram layer 14: 10 lookups of 240 ids in 60 s, 100 distinct rows, "
        "100 reads (2.0 MiB), 25.00 ms a lookup"
    )
    assert line("layer 14", now, now, 60) == ""


def test_a_report_has_each_store_that_was_asked_and_no_other(tmp_path: Path) -> None:
    write_tables(tmp_path, small_config())
    sources = locate_tables(tmp_path, small_layout())
    stores = {f"layer {layer}": FileRowStore(s, 0, s.rows) for layer, s in sources.items()}
    told: list[str] = []
    times = iter((0.0, 60.0, 120.0))
    reporter = Reporter(0, clock=lambda: next(times), write=told.append)
    for name, store in stores.items():
        reporter.watch({name: store})
    stores["layer 3"].lookup(np.array([1, 1, -1], np.int64))
    reporter.report()
    reporter.report()
    assert len(told) == 1 and told[0].startswith("Engram layer 3: 1 lookups of 3 ids in 60 s, 1 d")
    for store in stores.values():
        store.close()
