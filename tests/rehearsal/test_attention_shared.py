"""What the layers of one pass share: made once, and never another pass's.

Layers in the order of V4.1's second half on one compressed cache: 20 owns it and chooses, 24
chooses anew, those between choose nothing. Expected is what each layer computes for itself alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]

HEADS, WIDTH, WINDOW, BLOCK, PAGES = 2, 6, 4, 64, 12
SOURCE, OTHER = 20, 24
LAYERS = (20, 21, 22, 24, 25)
CACHE = "layers.20.attn"
MADE = torch.Generator().manual_seed(5)


def records(pages: int, block: int) -> Tensor:
    from spark_overlay.attention import reference

    cache = torch.zeros(pages, block, 584, dtype=torch.uint8)
    count = pages * block
    kv = torch.randn(count, 512, generator=MADE).bfloat16()
    table = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), -1)
    at = torch.zeros(count, dtype=torch.long)
    reference.insert_kv(kv, cache, torch.arange(count), at, table, block)
    return cache


@dataclass
class Bench:
    """Layers as vLLM would make them, without an engine; ``made``: how often slots were made."""

    layers: dict[int, Any]
    topk: Tensor
    made: list[int] = field(default_factory=list)
    context: Any = None


def layer_of(number: int, bench: Bench, source: Tensor) -> Any:
    from spark_overlay.attention.glue import SparkAttention

    layer = SparkAttention.__new__(SparkAttention)
    torch.nn.Module.__init__(layer)
    layer.compress_ratio = 1
    layer.compressed_cache_prefix = CACHE
    layer.is_kv_source = number == SOURCE
    layer.is_index_source = number in (SOURCE, OTHER)
    layer.index_source_layer_id = SOURCE if number < OTHER else OTHER
    layer.topk_indices_buffer = bench.topk
    layer.attn_sink = torch.zeros(HEADS)
    layer.scale = 512**-0.5
    window = SimpleNamespace(kv_cache=records(2, 32), prefix=f"layers.{number}.swa")
    object.__setattr__(layer, "swa_cache_layer", window)
    object.__setattr__(layer, "kv_cache", source)
    layer._static_forward_context = {CACHE: SimpleNamespace(kv_cache=source)}
    return layer


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    from spark_overlay.attention import glue, shared

    made = Bench({}, torch.full((8, WIDTH), -1, dtype=torch.int32))
    source = records(PAGES, BLOCK)
    made.layers = {number: layer_of(number, made, source) for number in LAYERS}
    monkeypatch.setattr(glue, "get_forward_context", lambda: made.context)
    right = shared.slots_of

    def counted(topk: Tensor, where: Any) -> Tensor:
        made.made.append(topk.shape[0])
        return right(topk, where)

    monkeypatch.setattr(shared, "slots_of", counted)
    yield made


@dataclass
class Pass:
    """One step's metadata: ``tokens`` of one request each, on pages of its own; the first
    ``decodes`` of them decode. ``padded`` rows come behind."""

    tokens: int
    pages: Tensor
    decodes: int = 0
    padded: int = 0

    def metadata(self) -> dict[str, Any]:
        count = self.tokens + self.padded
        real = torch.arange(count) < self.tokens
        slots = torch.where(real[:, None], torch.arange(WINDOW) + torch.arange(count)[:, None], -1)
        slots = slots.int()[:, None]
        decodes = count if self.padded else self.decodes
        window = SimpleNamespace(
            num_decode_tokens=decodes,
            num_prefill_tokens=count - decodes,
            is_valid_token=real,
            decode_swa_indices=slots[:decodes],
            decode_swa_lens=torch.where(real, WINDOW, 0).int()[:decodes],
            prefill_swa_indices=slots[decodes:],
            prefill_swa_lens=torch.where(real, WINDOW, 0).int()[decodes:],
        )
        compressed = SimpleNamespace(
            block_table=self.pages[:, None].int(),
            # A padded token is said to be the first request's.
            req_id_per_token=torch.where(real, torch.arange(count), 0).int(),
            block_size=BLOCK,
        )
        return {CACHE: compressed, **{f"layers.{n}.swa": window for n in LAYERS}}


def choices(seed: int, rows: int) -> dict[int, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {n: torch.randint(0, BLOCK, (rows, WIDTH), generator=made).int() for n in (20, 24)}


def run(bench: Bench, metadata: Any, seed: int, layers: tuple[int, ...] = LAYERS) -> list[Tensor]:
    """What the layers answer in turn; an index source's indexer runs before it."""
    answers = []
    for number in layers:
        if number in (SOURCE, OTHER):
            rows = metadata[CACHE].req_id_per_token.shape[0]
            bench.topk[:rows] = choices(seed, rows)[number]
        answers.append(answer(bench, metadata, number))
    return answers


def alone(bench: Bench, step: Pass, seed: int, layers: tuple[int, ...] = LAYERS) -> list[Tensor]:
    """What each layer computes with nothing shared: slots and attention anew, by the references."""
    from spark_overlay.attention.reference import read_records, sparse_attention

    count = step.tokens + step.padded
    rows = queries(count)
    found = []
    for number in layers:
        layer = bench.layers[number]
        topk = choices(seed, count)[SOURCE if number < OTHER else OTHER].long()
        out = torch.zeros_like(rows)
        for row in range(step.tokens):
            slots = torch.arange(WINDOW) + row
            far = step.pages[row] * BLOCK + topk[row]
            window = read_records(layer.swa_cache_layer.kv_cache, slots)
            keys = torch.cat((window, read_records(layer.kv_cache, far)))[None]
            valid = torch.ones(keys.shape[:2], dtype=torch.bool)
            one = sparse_attention(rows[row : row + 1], keys, valid, layer.attn_sink, layer.scale)
            out[row] = one[0].to(out.dtype)
        found.append(out)
    return found


def queries(count: int) -> Tensor:
    return torch.randn(count, HEADS, 512, generator=torch.Generator().manual_seed(1)).bfloat16()


def answer(bench: Bench, metadata: Any, number: int) -> Tensor:
    window = metadata[f"layers.{number}.swa"]
    count = window.num_decode_tokens + window.num_prefill_tokens
    bench.context = SimpleNamespace(attn_metadata=metadata)
    q = queries(count)
    out = torch.full_like(q, torch.nan)
    bench.layers[number].forward_mqa(q, q[:, 0], torch.zeros(count, dtype=torch.long), out)
    return out


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


FIRST = Pass(4, torch.tensor([1, 2, 3, 4]), decodes=1)
NEXT = Pass(4, torch.tensor([5, 6, 7, 8]), decodes=1)
REPLAY = Pass(2, torch.tensor([9, 10]))


def test_slots_are_made_once_by_each_index_source(bench: Bench) -> None:
    expected = alone(bench, FIRST, 1)
    assert not same(expected[:1], expected[3:4]), "24 chooses other rows than 20"
    bench.made.clear()
    assert same(run(bench, FIRST.metadata(), 1), expected)
    assert bench.made == [4, 4]


def test_geometry_is_made_once_by_the_cache_s_own_layer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_overlay.attention import shared

    made: list[Any] = []
    right = shared.Geometry
    monkeypatch.setattr(shared, "Geometry", lambda *how: made.append(right(*how)) or made[-1])
    run(bench, FIRST.metadata(), 1)
    assert len(made) == 1


def test_the_next_chunk_has_its_own(bench: Bench) -> None:
    expected = [alone(bench, step, seed) for step, seed in ((FIRST, 1), (NEXT, 2))]
    found = [run(bench, step.metadata(), seed) for step, seed in ((FIRST, 1), (NEXT, 2))]
    assert same(found[0], expected[0]) and same(found[1], expected[1])
    assert not same(found[0], found[1])


def test_a_chunk_that_begins_between_sources_finds_nothing_of_another(bench: Bench) -> None:
    """As on a later stage of a pipeline: no source ran in this pass."""
    run(bench, FIRST.metadata(), 1)
    bench.topk[:4] = choices(2, 4)[SOURCE]
    found = answer(bench, NEXT.metadata(), 21)
    assert same([found], alone(bench, NEXT, 2, (21,)))


def test_a_replay_sub_batch_has_its_own_within_the_step(bench: Bench) -> None:
    """The step's own metadata lives on meanwhile, and what it held stays."""
    expected = alone(bench, REPLAY, 3)
    whole = FIRST.metadata()
    run(bench, whole, 1, (20, 21))
    held = vars(whole[CACHE])["spark_shared"]
    before = {source: slots.clone() for source, slots in held.chosen.items()}
    assert same(run(bench, REPLAY.metadata(), 3), expected)
    assert held.chosen.keys() == before.keys() == {SOURCE}
    assert torch.equal(held.chosen[SOURCE], before[SOURCE])


def test_metadata_that_serves_twice_hands_on_nothing_from_before(bench: Bench) -> None:
    """A warm-up, then a capture: the indexer has chosen anew, tokens and pages have moved."""
    metadata = FIRST.metadata()
    run(bench, metadata, 1)
    metadata[CACHE].block_table.copy_(NEXT.pages[:, None])
    metadata[CACHE].req_id_per_token.copy_(torch.arange(4).flip(0))
    found = run(bench, metadata, 2)
    assert same(found, alone(bench, Pass(4, NEXT.pages.flip(0)), 2))


def test_a_padded_row_is_zero_and_asks_nothing(bench: Bench) -> None:
    step = Pass(2, torch.tensor([1, 2]), padded=2)
    rows = run(bench, step.metadata(), 1)
    # Choices stand in its row, too, and it is said to be the first request's.
    assert same(rows, alone(bench, step, 1))
    assert all(torch.count_nonzero(out[2:]) == 0 for out in rows)
    for slots in vars(vars(bench.context)["attn_metadata"][CACHE])["spark_shared"].chosen.values():
        assert (slots[2:] == -1).all() and (slots[:2] >= 0).all()


def test_a_position_beyond_the_table_is_no_record() -> None:
    from spark_overlay.attention.shared import Geometry, slots_of

    where = Geometry(torch.tensor([[3, 5], [7, 9]]).int(), torch.tensor([1, 0, -1]).int(), 32)
    topk = torch.tensor([[0, 33, 64, -1], [63, 2**31 - 1, 31, 5], [0, 1, 2, 3]]).int()
    assert slots_of(topk, where).tolist() == [
        [7 * 32, 9 * 32 + 1, -1, -1],
        [5 * 32 + 31, -1, 3 * 32 + 31, 3 * 32 + 5],
        [-1, -1, -1, -1],
    ]


def test_the_kernel_makes_the_same_slots() -> None:
    """Under the interpreter, stale entries and padded rows among them."""
    from spark_overlay.attention.kernels import chosen_slots
    from spark_overlay.attention.shared import Geometry, slots_of

    made = torch.Generator().manual_seed(2)
    table = torch.randint(0, 50, (3, 4), generator=made).int()
    where = Geometry(table, torch.tensor([2, 0, -1, 1]).int(), 32)
    topk = torch.randint(-3, 4 * 32 + 9, (4, 16), generator=made).int()
    out = torch.full_like(topk, 77)
    chosen_slots(topk, where.block_table, where.request, where.states, out)
    assert torch.equal(out, slots_of(topk, where))
    assert (out < 0).any() and (out >= 0).any()


def test_the_indexer_is_told_this_call_s_positions_within_the_break() -> None:
    """A replayed graph runs its breaks with this step's tensors and no other Python: positions
    told outside were an earlier pass's, whose memory was another's by then."""
    from spark_overlay.attention.glue import SparkAttention

    heard: list[Any] = []

    class Op:
        positions: Any = None

        def __call__(self, *given: Any) -> None:
            heard.append(self.positions)

    layer = SparkAttention.__new__(SparkAttention)
    torch.nn.Module.__init__(layer)
    layer.indexer = SimpleNamespace(indexer_op=Op())
    layer.forward_mqa = lambda *given: None
    x = torch.zeros(2, 4)
    for positions in (torch.tensor([7, 8]), torch.tensor([0, 1])):
        layer._sparse_indexer_and_attn(x, x, None, x, x, x, positions, x)
        assert heard[-1] is positions
