"""overlay/benchmarks/engram.py runs, its rows are right, its streams are the published hash's."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from _native import OVERLAY, library
from gpu import results

SCRIPT = OVERLAY / "benchmarks" / "engram.py"


@pytest.fixture(scope="module")
def inputs() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "engram_inputs", SCRIPT.with_name("engram_inputs.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_quick_run_measures_every_row(tmp_path: Path) -> None:
    made = tmp_path / "result.json"
    argv = [sys.executable, str(SCRIPT), "--quick", "--library", str(library())]
    argv += ["--folder", str(tmp_path), "--depths", "16", "--json", str(made)]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    result = results.read(made)
    rows = {row["name"]: row["values"] for row in result.rows}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert rows["raw packed, pool, depth 16"]["iops"]["median"] > 0
    assert rows["memory, pool, depth 16"]["MiB"] < 64
    assert rows["stream random, rank 0 of 2, cache 0"]["distinct"] == pytest.approx(24, abs=0.01)
    alone = rows["n-grams random"]
    assert alone["in chunk"]["gain"] == {"rank 0": 1.0, "rank 1": 1.0, "even": 1.0}
    for name in ("code", "prose"):
        shares = rows[f"n-grams {name}"]["in chunk"]
        for rank, (one, two) in enumerate((("2-grams", "3-grams"), ("4-grams", "3-grams"))):
            read = 2 * (8 * shares[one] + 4 * shares[two])
            found = rows[f"stream {name}, rank {rank} of 2, cache 0"]["distinct"]
            # The first tokens of a text make n-grams with what is before it.
            assert found == pytest.approx(read, rel=0.01)
            assert shares["gain"][f"rank {rank}"] == pytest.approx(24 / read, abs=0.01)
        fed = [rows[f"stream {name}, rank {rank} of 2, cache 0"]["fed"] for rank in (0, 1)]
        assert rows[f"stream {name}, pair, cache 0"]["fed"] == min(fed)
        for rank in (0, 1):
            assert rows[f"stream {name}, rank {rank} of 2, cache 0"]["distinct"] < 22
            assert f"stream {name}, rank {rank} of 2, cache 1" in rows


def test_texts_are_of_the_length_asked_for_and_their_tokens_are_all_of_them(inputs) -> None:
    for text in (inputs.code(20_000), inputs.prose(20_000)):
        assert len(text) == 20_000
        assert "".join(inputs.pieces(text)) == text
    ids = inputs.compressed(["the", " The", "cat", "the"], 1000)
    assert ids.tolist() == [0, 0, 1, 0]


def test_fresh_counts_what_is_new(inputs) -> None:
    chunk = inputs.CHUNK
    ids = np.array([1, 2] * chunk, np.int64)  # two chunks of two kinds of 2-grams
    inside, ever = inputs.fresh(ids, 2)
    count = 2 * chunk - 1
    assert inside == pytest.approx(4 / count) and ever == pytest.approx(2 / count)


def test_chunks_are_the_hash_of_the_whole_text(inputs) -> None:
    """What a chunk looks up is not changed by where the chunk begins."""
    own = inputs.layout()
    ids = inputs.random_tokens(2 * inputs.CHUNK, own.compressed_vocab_size)
    whole = own.hash_ids(ids, np.arange(own.compressed_vocab_size))
    first, second = inputs.chunks(own, ids, 1, 2)
    for layer in range(2):
        both = np.concatenate([first[layer], second[layer]]).reshape(-1, 12)
        assert np.array_equal(both, whole[:, layer, 12:])
