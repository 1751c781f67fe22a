"""The indexer's CUDA kernels on this CPU (tests/emulated). Shows where every value goes; a GPU
shows the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import emulation
import pytest
import torch
from gpu import indexer_cases

from spark_overlay.indexer.kernels import launch_cuda, library, select
from spark_overlay.indexer.kernels.launch import Candidates, Rows, Selection
from spark_overlay.indexer.kernels.sizes import Tuning

pytestmark = pytest.mark.rehearsal
COUNT, BLOCKS, SIZE = 512, 2048, 8


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    loaded = library.Library(emulation.built("indexer", tmp_path_factory.mktemp("emulated")))
    with emulation.no_gpu() as patch:
        patch.setattr(library, "load", lambda: loaded)
        patch.setattr(launch_cuda, "serves", lambda *_: True)
        yield ctypes.CDLL(str(loaded.path))


def choice(case: indexer_cases.Case, candidates: Candidates | None = None) -> torch.Tensor:
    workspace = torch.full((1 << 20,), 0x7FC00000, dtype=torch.int32)
    final = torch.full((len(case.visible), COUNT), 99, dtype=torch.int32)
    layer = Selection(case.ratio, COUNT, workspace, Tuning(enough=0))
    layer(case.q, case.weights, case.cache, case.step, final, candidates)
    return final


@pytest.mark.parametrize(
    ("requests", "how"),
    [
        ([(1, 900), (1, 700)], {"padding": 1}),
        ([(1, 1500)], {"exact": True}),
        ([(1, 900), (1, 50), (1, 800)], {"padding": 2, "gap": 144}),
        ([(1, 2900)], {"ratio": 2, "states": 32, "exact": True}),
        ([(1, 16600)], {}),
        ([(1, 16501)], {"exact": True, "below": True}),
    ],
)
def test_what_the_indexer_chooses(
    emulate: Any, requests: list[tuple[int, int]], how: dict[str, Any]
) -> None:
    """Requests of a row each, pages of 64 and 32, ties by the hundred, scores below zero, and
    contexts of which blocks are chosen first."""
    how = dict(how)
    below = how.pop("below", False)
    case = indexer_cases.make(requests, seed=len(requests), **how)
    if below:
        case.weights.abs_().neg_()
    exact = how.get("exact", False)
    assert not indexer_cases.wrong(case, choice(case), COUNT, exact=exact)


@pytest.mark.parametrize("exact", [True, False])
def test_candidate_blocks_and_what_is_chosen_of_them(emulate: Any, exact: bool) -> None:
    case = indexer_cases.make([(1, 16600)], exact=exact, seed=5)
    chosen = torch.full((len(case.visible), BLOCKS), 99, dtype=torch.int32)
    candidates = Candidates(chosen, SIZE, True)
    assert not indexer_cases.wrong(case, choice(case, candidates), COUNT, exact=exact)
    blocks = (BLOCKS, SIZE)
    assert not indexer_cases.wrong(case, chosen, BLOCKS, exact=exact, blocks=blocks)
    case.q = case.q.flip(1).contiguous()
    final = choice(case, replace(candidates, write=False))
    assert not indexer_cases.wrong(case, final, COUNT, exact=exact, limit=(chosen, SIZE))


def test_equal_scores(emulate: Any) -> None:
    """Every score is a zero: the first positions are chosen."""
    case = indexer_cases.make([(1, 16400)], exact=True)
    case.weights.zero_()
    assert torch.equal(choice(case), torch.arange(COUNT, dtype=torch.int32)[None])


@pytest.mark.parametrize("kind", [select.POSITIONS.value, select.BLOCKS.value])
@pytest.mark.parametrize("values", ["ties", "any", "few"])
def test_values_kept_in_shared_memory(emulate: Any, kind: int, values: str) -> None:
    """More than registers hold: read in each pass, where they may not be kept or not all, and
    kept. Ties by the thousand, values below zero, and fewer than are wanted."""
    width, fan = 132_997, 8
    blocks = -(-width // fan)
    draw = torch.Generator().manual_seed(kind)
    scores = torch.randn((1, blocks * fan), generator=draw)
    if values == "ties":
        scores = (scores * 8).round() / 8 - 4
    elif values == "few":
        scores[torch.rand(scores.shape, generator=draw) < 0.997] = float("-inf")
    scores[:, width:] = float("-inf")
    tops = torch.full((1, blocks + 7), float("nan"))
    tops[:, :blocks] = scores.view(blocks, fan).amax(-1)
    of, count = scores[0, :width], COUNT
    candidates = None
    if kind == select.BLOCKS.value:
        of, count = tops[0, :blocks].clone(), BLOCKS
        of[-1] = float("inf")  # the newest is chosen
        candidates = Candidates(torch.zeros((1, BLOCKS), dtype=torch.int32), fan, True)
    best = of.sort(descending=True, stable=True).indices[:count]
    best = best[of[best] > float("-inf")].sort().values
    right = torch.nn.functional.pad(best, (0, count - len(best)), value=-1).int()[None]
    assert (len(best) < count) == (values == "few")
    step = indexer_cases.make([(1, 64)]).step
    step = replace(step, lengths=torch.tensor([width], dtype=torch.int32), bound=width)
    rows = Rows(step, 0, 1, width, scores, tops, scores, True, True)
    enough = -(-blocks // 128) * 128
    for room, kept in ((0, 0), (enough - 128, 0), (enough, enough)):
        final = torch.full((1, count), 99, dtype=torch.int32)
        emulate.keep(room)
        try:
            entries = width if kind == select.POSITIONS.value else blocks
            launch_cuda.choose(rows, final, kind, entries, fan, 1, candidates)
        finally:
            emulate.keep(0)
        assert torch.equal(final, right), room
        assert emulate.kept() == kept


def test_what_few_blocks_have_is_chosen(emulate: Any) -> None:
    """A long row of which only the first positions are there: fewer blocks than positions are
    wanted, so that no block's best bounds what is chosen."""
    width, fan, there = 20_000, 16, 64
    scores = torch.full((1, width), float("-inf"))
    scores[0, :there] = torch.randn(there, generator=torch.Generator().manual_seed(1))
    step = indexer_cases.make([(1, 64)]).step
    step = replace(step, lengths=torch.tensor([width], dtype=torch.int32), bound=width)
    rows = Rows(step, 0, 1, width, scores, scores.view(1, -1, fan).amax(-1), scores, True, True)
    final = torch.full((1, COUNT), 99, dtype=torch.int32)
    launch_cuda.choose(rows, final, select.POSITIONS.value, width, fan, 1, None)
    assert final[0, :there].tolist() == list(range(there)) and (final[0, there:] == -1).all()


NAN = 0x7FC00000
RAGGED = [(3, 150), (1, 40), (0, 0), (4, 17), (2, 129), (9, 300), (5, 68)]


def scored(
    case: indexer_cases.Case,
    together: int,
    *,
    fan: int = 16,
    multiprocessors: int = 1,
    held: int = 3,
    first: int = 0,
    last: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of all scores and of the best of each ``fan``; NaN where nothing was written."""
    rows, width = len(case.visible), case.step.bound // case.ratio
    last = rows if last is None else last
    scores, tops = (torch.full((rows, n + 32), NAN, dtype=torch.int32) for n in (width, width // 8))
    views = [one[first:last].view(torch.float32) for one in (scores, tops)]
    taken = Rows(case.step, first, last, width, *views, scores, True, True)
    arguments = (case.q, case.weights, case.cache, taken, fan, case.ratio)
    launch_cuda.scores(*arguments, multiprocessors, together, held)
    return scores, tops


@pytest.mark.parametrize(("ratio", "fan"), [(1, 16), (2, 8)])
def test_rows_at_once_score_as_one_row_does(
    emulate: Any, ratio: int, fan: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, what is left alone, too: groups that a request's rows fill, do not fill and are
    more than, rows before and behind those asked for, pages that are not there, and more CTAs
    than the keys give work to."""
    monkeypatch.setattr(launch_cuda, "shared_memory", lambda _: 228 << 10)
    case = indexer_cases.make(RAGGED, ratio=ratio, states=32, padding=2, gap=144, seed=7)
    case.step.table[5, 2], case.step.table[0, 1] = -1, case.cache.shape[0]
    for chips, part in ((1, {}), (3, {}), (12, {}), (1, {"first": 5, "last": 21})):
        right = scored(case, 1, fan=fan, multiprocessors=chips, **part)
        for together in (2, 3, 8) if chips == 1 and not part else (4,):
            held = 1 if together in (3, 4) and chips != 3 else 3
            found = scored(case, together, fan=fan, multiprocessors=chips, held=held, **part)
            assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True)), together


def test_a_request_may_have_more_rows_than_the_host_says(emulate: Any) -> None:
    case = indexer_cases.make([(9, 100), (3, 50)], seed=9)
    right = scored(case, 1)
    case.step = replace(case.step, longest=3)
    assert all(torch.equal(a, b) for a, b in zip(scored(case, 3), right, strict=True))


@pytest.mark.parametrize("exact", [True, False])
def test_scores_of_rows_at_once(emulate: Any, exact: bool) -> None:
    """Against float64, and the best of each 16."""
    case = indexer_cases.make([(4, 300), (1, 90), (3, 200)], exact=exact, seed=2)
    scores, tops = (one.view(torch.float32) for one in scored(case, 4))
    for index, (begin, end) in enumerate(case.spans):
        right, slack = indexer_cases.scores(case, index, slice(begin, end))
        for row in range(begin, end):
            seen = int(case.visible[row])
            value, each = scores[row, :seen], right[row - begin, :seen]
            assert (value - each).abs().max() <= (0 if exact else slack[row - begin])
            padded = torch.full((-(-seen // 16) * 16,), float("-inf"))
            padded[:seen] = value
            best = padded.view(-1, 16).amax(-1)
            assert torch.equal(tops[row, : len(best)], best)
            assert scores[row, seen:].isnan().all() and tops[row, len(best) :].isnan().all()


@pytest.mark.parametrize(
    ("requests", "how"),
    [([(4, 900), (2, 700)], {"padding": 1}), ([(3, 1500)], {"exact": True, "states": 32})],
)
def test_what_is_chosen_of_several_rows(
    emulate: Any, requests: list[tuple[int, int]], how: dict[str, Any]
) -> None:
    case = indexer_cases.make(requests, seed=4, **how)
    assert not indexer_cases.wrong(case, choice(case), COUNT, exact=how.get("exact", False))


def test_who_scores() -> None:
    """The library one row and what is much; of candidates a decode step's, however few."""
    step = indexer_cases.make([(3, 900), (2, 700)]).step

    def library(longest: int, width: int, limited: bool = False, **how: int) -> bool:
        return launch_cuda.scores_too(replace(step, longest=longest), limited, width, Tuning(**how))

    assert library(1, 600)
    assert library(4, 65536) and not library(4, 65535) and library(4, 65535, enough=0)
    assert library(9, 16384) and not library(9, 16383) and not library(2048, 9000)
    assert library(8, 600, limited=True) and not library(9, 65536, limited=True)


def test_how_rows_and_keys_are_shared() -> None:
    """On an H200, an A100 and a GB10: rows at once as shared memory holds them, in even groups;
    splits that fill the GPU once, or in rounds that end together."""

    def of(
        *numbers: int, together: int = 8, held: int = 3, chip: tuple[int, int] = (132, 228)
    ) -> tuple[int, ...]:
        found = launch_cuda.shares(*numbers, together, held, chip[0], chip[1] << 10)
        assert found.held == (1 if held == 1 and found.group > 1 else 3)
        return found.group, found.parts, found.splits

    # Requests, rows of all, of one; positions.
    assert of(1, 4, 4, 131072) == (4, 1, 396)
    assert of(4, 16, 4, 131072) == (4, 1, 99)
    assert of(4, 7, 4, 131072) == (4, 1, 99)
    assert of(1, 6, 6, 131072) == (6, 1, 396)
    assert of(1, 8, 8, 131072) == (4, 2, 198)
    assert of(1, 4, 4, 131072, together=2) == (2, 2, 198)
    assert of(1, 4, 4, 131072, together=1) == (1, 4, 99)
    assert of(1, 4, 4, 131072, held=1) == (4, 1, 132)
    assert of(4, 16, 4, 131072, held=1) == (4, 1, 33)
    assert of(1, 6, 6, 131072, held=1) == (6, 1, 132)
    assert of(1, 2048, 2048, 16384, held=1) == (8, 256, 1)
    assert of(1, 8, 8, 131072, held=1, chip=(48, 100)) == (4, 2, 24)
    assert of(1, 1, 1, 131072) == (1, 1, 396)
    assert of(8, 8, 1, 32768) == (1, 1, 49)
    assert of(1, 4, 4, 4096) == (4, 1, 128)
    assert of(1, 2048, 2048, 16384) == (7, 293, 4)
    assert of(1, 900, 2048, 65536) == (7, 129, 3)
    assert of(4, 2051, 2048, 16384) == (7, 293, 4)
    assert of(150, 600, 4, 131072) == (4, 1, 5)
    assert of(1, 6, 6, 131072, chip=(108, 164)) == (3, 2, 162)
    assert of(1, 4, 4, 131072, chip=(48, 100)) == (4, 1, 96)
    assert of(1, 8, 8, 131072, chip=(48, 100)) == (4, 2, 48)
