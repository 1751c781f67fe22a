"""Lookups on a GPU's streams, against plain reads and against the tables themselves."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from _native import installed
from _tables import small_config, table, write_tables
from torch import Tensor

from gpu.engram import FP8, Part, Values, device_seconds, same_bits
from spark_overlay.engram.cuda import CudaLookup, SyncLookup
from spark_overlay.engram.layout import EngramError, EngramLayout
from spark_overlay.engram.native import NativeOptions, NativeRowStore
from spark_overlay.engram.reference import dequantize_rows
from spark_overlay.engram.source import locate_tables
from spark_overlay.engram.store import FileRowStore
from spark_overlay.headers import INDEX_NAME

CONFIG = small_config(
    engram_layer_ids=[1, 14], engram_n_heads=8, engram_head_dim=256, engram_vocab_size=4000
)
MOST = 1536
REPLAYS = 1000


class Tables:
    """Two tables of the real columns and row size, each row a function of its number."""

    def __init__(self, scratch: Path) -> None:
        self.root = scratch / "engram-tables"
        self.scratch = scratch
        layout = EngramLayout.from_config(CONFIG)
        assert layout is not None
        self.layout = layout

    @cached_property
    def sources(self) -> Any:
        if not (self.root / INDEX_NAME).is_file():  # written last
            write_tables(self.root, CONFIG)
        return locate_tables(self.root, self.layout)

    @cached_property
    def native(self) -> Path:
        return installed(self.scratch)

    @cached_property
    def dense(self) -> list[Tensor]:
        """Every row of both tables on the GPU, then one of zeros for dead ids."""
        found = []
        for layer, rows in zip(self.layout.layer_ids, self.layout.num_embeddings, strict=True):
            weights, scales = map(torch.from_numpy, table(layer, rows, self.layout.dim))
            values = dequantize_rows(weights.view(FP8), scales)
            found.append(torch.cat([values, values.new_zeros(1, self.layout.dim)]).cuda())
        return found

    def lookup(self, index: int, rank: int = 0, tp: int = 1, *, direct: bool = False) -> CudaLookup:
        """Through the page cache, but where ``direct``: the host's drive may be a slow one."""
        layer = self.layout.layer_ids[index]
        part = self.layout.rank_range(layer, rank, tp)
        options = NativeOptions(direct=direct)
        store = NativeRowStore(self.sources[layer], *part.rows, None, options, self.native)
        width = -(-self.layout.columns // tp)
        device = torch.device("cuda", torch.cuda.current_device())
        return CudaLookup(store, slice(*part.columns), width, self.layout.dim, MOST, device)

    def ids(self, tokens: int, seed: int) -> Tensor:
        """int32 ``[tokens, layers, columns]`` on the GPU as the hash gives them, some dead."""
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.tensor(self.layout.primes)
        found = torch.randint(0, 1 << 30, (tokens, *sizes.shape), generator=generator) % sizes
        found += torch.tensor(self.layout.offsets)
        dead = torch.rand(tokens, generator=generator) < 0.2
        return found.masked_fill(dead[:, None, None], -1).int().cuda()

    def expected(self, index: int, ids: Tensor) -> Tensor:
        return self.dense[index][ids.long()]

    def out(self, tokens: int, width: int | None = None) -> Tensor:
        shape = (tokens, width or self.layout.columns, self.layout.dim)
        return torch.full(shape, 7.0, dtype=torch.bfloat16, device="cuda")


def differing(found: Tensor, expected: Tensor) -> Tensor:
    """How many values differ in a bit, on the device: nothing waits. Two NaNs are equal."""
    same = (found.view(torch.int16) == expected.view(torch.int16)) | (
        found.isnan() & expected.isnan()
    )
    return (~same).sum()


def eager(tables: Tables, _device: torch.device) -> Values:
    """Both layers, one and two ranks, few and many tokens, against plain reads of the file."""
    wrong, backends = [], set()
    for index, layer in enumerate(tables.layout.layer_ids):
        source = tables.sources[layer]
        with FileRowStore(source, 0, source.rows) as plain:
            for tp in (1, 2):
                ranks = [tables.lookup(index, rank, tp, direct=True) for rank in range(tp)]
                backends |= {lookup.store.backend for lookup in ranks}  # type: ignore[attr-defined]
                for tokens in (MOST, 1, 2, 4, 7, 24, 300, 4, 1024):
                    ids = tables.ids(tokens, tokens + tp)[:, index]
                    outs = [tables.out(tokens, lookup.width) for lookup in ranks]
                    for lookup, out in zip(ranks, outs, strict=True):
                        lookup(ids, out)
                    rows = plain.lookup(ids.reshape(-1).long().cpu().numpy())
                    weights = torch.from_numpy(rows.weights).view(FP8)
                    values = dequantize_rows(weights, torch.from_numpy(rows.scales))
                    found = torch.cat(outs, dim=1).cpu()
                    if not same_bits(found, values.view(found.shape)):
                        wrong.append([layer, tp, tokens])
    return {"ok": not wrong, "wrong": wrong, "backends": sorted(backends)}


#: What captured graphs read and write at every replay, beside what `capture` returns.
_HELD: list[Any] = []


def capture(tables: Tables, lookups: list[CudaLookup], tokens: int) -> Any:
    """As vLLM's step: ids known, both lookups beside the main stream, each waited for by itself."""
    ids = tables.ids(tokens, 0)
    staged = [tables.out(tokens) for _ in lookups]
    used = [torch.zeros_like(rows) for rows in staged]
    busy = torch.randn(512, 512, device="cuda")
    busy = (busy @ busy).clamp(-1, 1)  # cuBLAS is made before the capture
    side = torch.cuda.Stream()
    _HELD.append((staged, busy, side))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        events = []
        with torch.cuda.stream(side):
            for index, lookup in enumerate(lookups):
                lookup(ids[:, index], staged[index])
                events.append(torch.cuda.Event())
                events[-1].record(side)
        for index, event in enumerate(events):
            busy = (busy @ busy).clamp(-1, 1)
            current.wait_event(event)
            used[index].copy_(staged[index])
    return graph, ids, used


def replays(tables: Tables, _device: torch.device) -> Values:
    """1000 replays in a row of graphs of several sizes, ids changed before each; nobody waits in
    between, and eager lookups with the same buffers come before and after."""
    lookups = [tables.lookup(0), tables.lookup(1)]
    sizes = (1, 2, 4, 24)
    graphs = {tokens: capture(tables, lookups, tokens) for tokens in sizes}
    pool = {tokens: [tables.ids(tokens, 1000 + i) for i in range(61)] for tokens in sizes}
    assert tables.dense
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    eager_wrong = torch.zeros_like(wrong)
    chance = random.Random(0)
    began = time.monotonic()
    for number in range(REPLAYS):
        tokens = chance.choice(sizes)
        graph, ids, used = graphs[tokens]
        now = pool[tokens][number % 61]
        ids.copy_(now)
        graph.replay()
        for index, rows in enumerate(used):
            wrong += differing(rows, tables.expected(index, now[:, index]))
        if number % 50 == 0:
            more = tables.ids(300, number)
            out = tables.out(300)
            lookups[1](more[:, 1], out)
            eager_wrong += differing(out, tables.expected(1, more[:, 1]))
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    # The same comparison with the other layer's rows must fail.
    control = int(differing(used[0], tables.expected(1, now[:, 1])))
    values = {"replays": REPLAYS, "values_that_differ": int(wrong), "control": control}
    values |= {"eager_between": int(eager_wrong), "us_a_replay": round(seconds / REPLAYS * 1e6, 1)}
    return {"ok": int(wrong) == int(eager_wrong) == 0 < control, **values}


def two_streams(tables: Tables, _device: torch.device) -> Values:
    """Each layer on a stream of its own; then one layer from both, which take turns."""
    lookups, streams = [tables.lookup(0), tables.lookup(1)], [torch.cuda.Stream() for _ in "ab"]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in "abcd"]
    assert tables.dense
    torch.cuda.synchronize()
    for number in range(200):
        tokens = (1, 4, 24, 300)[number % 4]
        for which, stream in enumerate(streams):
            # The second half asks the first table from both streams.
            index = which if number < 100 else 0
            with torch.cuda.stream(stream):
                ids = tables.ids(tokens, 2 * number + which)[:, index]
                out = tables.out(tokens)
                lookups[index](ids, out)
                place = which + 2 * (number >= 100)
                wrong[place] += differing(out, tables.expected(index, ids))
    torch.cuda.synchronize()
    counts = [int(each) for each in wrong]
    return {"ok": not any(counts), "values_that_differ": counts}


def beside(tables: Tables, _device: torch.device) -> Values:
    """What a computing stream loses while rows are read beside it, and what lookups take."""
    lookup = tables.lookup(0, direct=True)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def compute() -> None:
        for _ in range(20):
            torch.mm(a, a)

    ids, out = tables.ids(MOST, 1)[:, 0], tables.out(MOST)
    side = torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(side):
            lookup(ids, out)
        compute()

    compute()
    both()
    torch.cuda.synchronize()
    alone = device_seconds(compute, 7)
    together = device_seconds(both, 7)
    torch.cuda.synchronize()
    took = {}
    for tokens in (1, 4, 24, 256, MOST):
        some, rows = ids[:tokens], out[:tokens]
        took[str(tokens)] = round(device_seconds(lambda s=some, r=rows: lookup(s, r), 15) * 1e6, 1)
    stats = lookup.store.stats()  # type: ignore[attr-defined]
    return {
        "ok": together < 1.5 * alone,
        "compute_ms": [round(alone * 1e3, 3), round(together * 1e3, 3)],
        "lookup_us_by_tokens": took,
        "reads": stats.reads,
        "direct": stats.direct,
    }


def python_stores(tables: Tables, _device: torch.device) -> Values:
    """Plain reads answer alike eagerly; a capture says what to do instead, and none is left."""
    layer = tables.layout.layer_ids[1]
    source, columns = tables.sources[layer], tables.layout.columns
    store = FileRowStore(source, 0, source.rows)
    lookup = SyncLookup(store, "plain", slice(0, columns), columns, tables.layout.dim)
    ids, out = tables.ids(24, 5)[:, 1], tables.out(24)
    lookup(ids, out)
    equal = int(differing(out, tables.expected(1, ids))) == 0
    said = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            lookup(ids, out)
    except EngramError as error:
        said = str(error)
    torch.cuda.synchronize()
    return {"ok": equal and "ENFORCE_EAGER=1" in said, "equal": equal, "said": said}


def ends(tables: Tables, _device: torch.device) -> Values:
    """An id that no table has ends the process, with the row and the table by name, also when a
    graph is replayed; the step does not go on with other rows."""
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "overlay")]
    code = f"""
import sys
sys.path[:0] = {path!r}
import torch
from pathlib import Path
from gpu.engram_lookup import Tables, capture
tables = Tables(Path({str(tables.scratch)!r}))
lookups = [tables.lookup(0), tables.lookup(1)]
graph, ids, used = capture(tables, lookups, 4)
graph.replay()
torch.cuda.synchronize()
print("replayed", flush=True)
ids[2, 1, 3] = tables.layout.num_embeddings[1]
graph.replay()
torch.cuda.synchronize()
print("went on", flush=True)
"""
    argv = [sys.executable, "-c", code]
    try:
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": "hung for 90 s"}
    said = [line for line in ran.stderr.splitlines() if "Engram" in line][-1:]
    right = ran.returncode == -6 and "replayed" in ran.stdout and "went on" not in ran.stdout
    named = bool(said) and "layer 14" in said[0]
    return {"ok": right and named, "status": ran.returncode, "said": said or ran.stderr[-600:]}


PARTS = (eager, replays, two_streams, beside, python_stores, ends)


def parts(scratch: Path) -> dict[str, Part]:
    tables = Tables(scratch)
    return {part.__name__: partial(part, tables) for part in PARTS}
