"""Lookups on a GPU's stream, as far as a CPU shows them: what is queued and where it reads.

The device's memory is the host's here and the driver's call is made at once; the native store, its
host function and the kernel (under Triton's interpreter) are the real ones. On a GPU: tests/gpu.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from _native import installed
from _tables import small_config, write_tables

from spark_overlay.engram.cuda import CudaLookup, SyncLookup
from spark_overlay.engram.layout import EngramError, EngramLayout
from spark_overlay.engram.native import NativeRowStore
from spark_overlay.engram.packed import attach
from spark_overlay.engram.reference import dequantize_rows
from spark_overlay.engram.source import locate_tables
from spark_overlay.engram.store import FileRowStore
from spark_overlay.engram.stores import open_store
from spark_overlay.settings import OverlaySettings

pytestmark = pytest.mark.rehearsal
CPU = torch.device("cpu")
#: 9 columns: of two ranks the last owns one less.
CONFIG = small_config(engram_n_heads=3)
MOST = 40


class Queue(CudaLookup):
    """Runs at once what a stream would run in this order."""

    def _begin(self) -> int:
        return 0

    def _end(self) -> None:
        pass

    def _launch_host(self, stream: int, function: int, data: int) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write_tables(folder, CONFIG)
    return folder


@pytest.fixture(scope="module")
def layout() -> EngramLayout:
    found = EngramLayout.from_config(CONFIG)
    assert found is not None
    return found


def ids(layout: EngramLayout, tokens: int, seed: int) -> torch.Tensor:
    """int32 ``[tokens, layers, columns]`` as vLLM's hash gives them; a third of them dead."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(layout.primes)
    found = torch.randint(0, 1 << 30, (tokens, *sizes.shape), generator=generator) % sizes
    found += torch.tensor(layout.offsets)
    dead = torch.rand(tokens, generator=generator) < 1 / 3
    return found.masked_fill(dead[:, None, None], -1).int()


def plain(root: Path, layout: EngramLayout, layer: int, asked: torch.Tensor) -> torch.Tensor:
    """bf16 ``[tokens, columns, dim]`` by plain reads of the whole table."""
    source = locate_tables(root, layout)[layer]
    with FileRowStore(source, 0, source.rows) as store:
        rows = store.lookup(asked.reshape(-1).long().numpy())
    weights = torch.from_numpy(rows.weights).view(torch.float8_e4m3fn)
    dense = dequantize_rows(weights, torch.from_numpy(rows.scales))
    return dense.view(*asked.shape, layout.dim)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    nan = expected.isnan()
    return torch.equal(found.isnan(), nan) and torch.equal(
        found.view(torch.int16).masked_fill(nan, 0), expected.view(torch.int16).masked_fill(nan, 0)
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("index", [0, 1])
def test_ranks_together_give_every_row_as_plain_reads_do(
    root: Path, native: Path, layout: EngramLayout, tp: int, index: int
) -> None:
    layer = layout.layer_ids[index]
    source, width = locate_tables(root, layout)[layer], -(-layout.columns // tp)
    ranks = []
    for rank in range(tp):
        part = layout.rank_range(layer, rank, tp)
        store = NativeRowStore(source, *part.rows, library=native)
        ranks.append(Queue(store, slice(*part.columns), width, layout.dim, MOST, CPU))
    # Fewer tokens, then more, then fewer: nothing of an earlier lookup may be seen.
    for seed, tokens in enumerate((MOST, 3, 17, 1, 3)):
        asked = ids(layout, tokens, seed)[:, index]
        staged = torch.full((tp, MOST, width, layout.dim), 7.0, dtype=torch.bfloat16)
        for lookup, rows in zip(ranks, staged, strict=True):
            lookup(asked, rows[:tokens])
        assert (staged[:, tokens:] == 7).all()
        # vLLM gathers the ranks' heads and cuts off those that no rank owns: zeros, not rubbish.
        gathered = torch.cat(tuple(staged[:, :tokens]), dim=1)
        assert (gathered[:, layout.columns :] == 0).all()
        assert same_bits(gathered[:, : layout.columns], plain(root, layout, layer, asked))


def test_what_a_graph_holds_stays_where_it_is(
    root: Path, native: Path, layout: EngramLayout
) -> None:
    source = locate_tables(root, layout)[1]
    store = NativeRowStore(source, 0, source.rows, library=native)
    lookup = Queue(store, slice(0, 9), 9, layout.dim, MOST, CPU)
    out = torch.empty(MOST, 9, layout.dim, dtype=torch.bfloat16)
    held: dict[int, tuple[Any, ...]] = {}
    for tokens in (4, 8, 4, 1, 8):
        lookup(ids(layout, tokens, 1)[:, 0], out[:tokens])
        work = lookup._works[tokens * 9]
        now = (ctypes.addressof(work), work.ids, work.n, work.weights, work.scales, work.store)
        assert held.setdefault(tokens, now) == now
    lookup(ids(layout, 0, 1)[:, 0], out[:0])
    assert sorted(lookup._works) == [9, 36, 72]


def test_what_does_not_fit_is_refused(root: Path, native: Path, layout: EngramLayout) -> None:
    source = locate_tables(root, layout)[1]
    store = NativeRowStore(source, 0, source.rows, library=native)
    lookup = Queue(store, slice(0, 9), 9, layout.dim, 4, CPU)
    asked, out = ids(layout, 5, 0)[:, 0], torch.empty(5, 9, layout.dim, dtype=torch.bfloat16)
    with pytest.raises(EngramError, match="5 tokens asked of buffers for 4"):
        lookup(asked, out)
    with pytest.raises(EngramError, match="expected bfloat16"):
        lookup(asked[:2], torch.empty(2, 9, layout.dim + layout.dim // 32, dtype=torch.uint8))
    with pytest.raises(EngramError, match=r"expected bfloat16 \[3, 9, 64\]"):
        lookup(asked[:3], out[:2])


def test_a_row_that_cannot_be_is_the_end_of_the_rank(root: Path, native: Path) -> None:
    """The host function has nobody to raise to; a step with made-up rows must not go on."""
    code = f"""
import ctypes, sys
import numpy as np
from pathlib import Path
from spark_overlay.engram.native import NativeRowStore, Work
from spark_overlay.engram.source import locate_tables
source = locate_tables(Path({str(root)!r}))[3]
store = NativeRowStore(source, 0, source.rows, library=Path({str(native)!r}))
ids, rows = np.array([0, source.rows], np.int64), np.zeros(1000, np.uint8)
work = Work(store.handle, ids.ctypes.data, 2, rows.ctypes.data, rows.ctypes.data + 200)
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(store.host_function)(ctypes.addressof(work))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == -6, ran
    assert "layer 3" in ran.stderr and "This rank ends" in ran.stderr


def test_a_store_in_python_answers_alike_and_refuses_a_graph(
    root: Path, layout: EngramLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    source = locate_tables(root, layout)[3]
    for rank in (0, 1):
        part = layout.rank_range(3, rank, 2)
        store = FileRowStore(source, *part.rows)
        lookup = SyncLookup(store, "plain", slice(*part.columns), 5, layout.dim)
        asked = ids(layout, 6, 2)[:, 1]
        out = torch.full((6, 5, layout.dim), 7.0, dtype=torch.bfloat16)
        lookup(asked, out)
        expected = plain(root, layout, 3, asked)[:, slice(*part.columns)]
        assert same_bits(out[:, : expected.shape[1]], expected)
        assert (out[:, expected.shape[1] :] == 0).all()
    capturing = True
    with pytest.raises(EngramError, match=r"ENGRAM_STORE=plain .* ENFORCE_EAGER=1"):
        lookup(asked, out)


def test_the_settings_choose_the_store(root: Path, layout: EngramLayout, tmp_path: Path) -> None:
    source = locate_tables(root, layout)[1]
    kinds = {}
    for kind in ("file", "plain", "memory"):
        raw = {"engram_store": kind, "engram_packed_dir": str(tmp_path), "engram_io_threads": 3}
        try:
            with_settings = open_store(OverlaySettings.parse(raw), source, layout, 1, 2)
        except EngramError as error:
            assert kind == "file" and "ENGRAM_STORE=plain" in str(error)
            continue
        kinds[kind] = type(with_settings).__name__
        assert (with_settings.lo, with_settings.hi) == layout.rank_range(1, 1, 2).rows
    assert {k: kinds[k] for k in ("plain", "memory")} == {
        "plain": "FileRowStore",
        "memory": "MemoryRowStore",
    }
    assert kinds.get("file", "NativeRowStore") == "NativeRowStore"


def test_a_packed_file_that_is_not_this_ranks_is_refused_before_anything_else(
    root: Path, layout: EngramLayout, tmp_path: Path
) -> None:
    source = locate_tables(root, layout)[1]
    (tmp_path / "engram-l1-r0of2.bin").write_bytes(b"rows of something else")
    settings = OverlaySettings(engram_packed_dir=str(tmp_path))
    with pytest.raises(EngramError, match=r"engram-l1-r0of2\.bin"):
        open_store(settings, source, layout, 0, 2)
    assert attach(tmp_path, source, layout, 1, 2) is None


def test_our_embedding_has_all_that_vllms_layer_asks_of_it(
    vllm: ModuleType, root: Path, layout: EngramLayout
) -> None:
    from vllm.models.deepseek_v41.common import engram as stock

    from spark_overlay.engram.glue import SparkEngramEmbedding

    text = inspect.getsource(stock.Engram) + inspect.getsource(stock.EngramBatch)
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    asked = set(re.findall(r"\b(?:embed_tokens|table)\.(\w+)", text))
    part = layout.rank_range(1, 0, 2)
    store = FileRowStore(locate_tables(root, layout)[1], *part.rows)
    ours = SparkEngramEmbedding(layout, part, store, 2, "plain", MOST, CPU)
    assert {"dp_size", "tp_size", "part_n_hash_cols", "cpu_offload", "lookup"} <= asked
    assert not {name for name in asked if not hasattr(ours, name)}
    assert list(inspect.signature(ours.lookup).parameters) == [
        name
        for name in inspect.signature(stock.ParallelEngramEmbedding.lookup).parameters
        if name != "self"
    ]
    assert not list(ours.parameters()) and not list(ours.buffers())
    # On a GPU vLLM then prefetches beside the decoder's stream, into rows that stay in place.
    assert ours.dp_size == 1 and not ours.cpu_offload
    assert "cpu_offload" in inspect.getsource(stock.Engram._init_staging)


def test_the_gpu_checks_see_one_bit_of_one_token() -> None:
    """A comparison is only worth something if it can fail."""
    from gpu.bits import differ

    one = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    one[1, 1, 1] = float("nan")
    other = one.clone()
    assert not differ(one, other).any()
    other.view(torch.int16)[3, 2, 1] ^= 1
    assert differ(one, other).tolist() == [False, False, False, True, False]
