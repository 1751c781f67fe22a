"""The indexer's choice by CUDA on this CPU (tests/emulated), of scores made for it: each way that
csrc/indexer/choose.cu goes, where it must leave one for another, and what is beside a row."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import emulation
import pytest
import torch
from gpu import indexer_cases

from spark_overlay.indexer.kernels import launch_cuda, library, select
from spark_overlay.indexer.kernels.launch import Candidates, Rows

pytestmark = pytest.mark.rehearsal
COUNT, BLOCKS, SIZE, DIRECT = 512, 2048, 8, 16384
NOTHING = float("-inf")
#: Lanes' quads: a warp of the 16 has a run of quads, a lane each 32nd of it.
WARPS = 16


@pytest.fixture(scope="module", params=[0, 1], ids=["forwards", "backwards"])
def emulate(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Threads take turns in either order: what one leaves to another must have been waited for."""
    loaded = library.Library(emulation.built("indexer", tmp_path_factory.mktemp("emulated")))
    with emulation.no_gpu() as patch:
        patch.setattr(library, "load", lambda: loaded)
        emulated = ctypes.CDLL(str(loaded.path))
        emulated.run_backwards(request.param)
        yield emulated


@dataclass
class Choice:
    places: torch.Tensor
    kept: int  # keys in shared memory: by bits, where lists do not hold what reaches the bound


def choose(
    emulate: Any,
    scores: torch.Tensor,
    *,
    kind: int = select.POSITIONS.value,
    fan: int = 16,
    count: int = COUNT,
    room: int = DIRECT,
    chosen: torch.Tensor | None = None,
) -> Choice:
    """Of one row; what lies behind its scores is larger than they are."""
    width = len(scores)
    blocks = -(-width // fan)
    held = torch.full((1, blocks * fan + 32), float("inf"))
    held[0, :width] = scores
    padded = torch.full((blocks * fan,), NOTHING)
    padded[:width] = scores
    tops = torch.full((1, blocks + 32), float("inf"))
    tops[0, :blocks] = padded.view(blocks, fan).amax(-1)
    candidates, seen, entries = None, width, width
    if kind == select.BLOCKS.value:
        candidates, entries = (
            Candidates(torch.zeros((1, count), dtype=torch.int32), fan, True),
            blocks,
        )
    if chosen is not None:
        candidates = Candidates(chosen[None], SIZE, False)
        seen = (int(chosen.max()) + 1) * SIZE
    step = indexer_cases.make([(1, 64)]).step
    step = replace(step, lengths=torch.tensor([seen], dtype=torch.int32), bound=seen)
    rows = Rows(step, 0, 1, seen, held, tops, held, True, True)
    final = torch.full((1, count), 99, dtype=torch.int32)
    emulate.keep(room)
    try:
        launch_cuda.choose(rows, final, kind, entries, fan, 1, candidates)
    finally:
        emulate.keep(0)
    return Choice(final[0], emulate.kept())


def best(scores: torch.Tensor, count: int = COUNT) -> torch.Tensor:
    """Of equals the first; ascending, -1 padded."""
    found = scores.sort(descending=True, stable=True).indices[:count]
    found = found[scores[found] > NOTHING].sort().values
    return torch.nn.functional.pad(found, (0, count - len(found)), value=-1).int()


def normal(width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def in_one_group(width: int, lanes: int) -> torch.Tensor:
    """Places of the first value of each quad that so many lanes hold: many quads of few groups."""
    quad = torch.arange(width // 4)
    run = -(-len(quad) // WARPS)
    return 4 * quad[quad // run * 32 + quad % run % 32 < lanes]


def tied(width: int, above: int, equal: int) -> torch.Tensor:
    """The last of those chosen is one of ``equal`` that are the same, anywhere."""
    scores = 0.1 + normal(width).sigmoid() * 0.3
    places = torch.randperm(width, generator=torch.Generator().manual_seed(1))
    scores[places[:above]] = 1 + torch.rand(above, generator=torch.Generator().manual_seed(2))
    scores[places[above : above + equal]] = 0.5
    return scores


def blocks_of(tops: torch.Tensor, fan: int = 16) -> torch.Tensor:
    """Scores of which the best of each ``fan`` are these."""
    scores = normal(len(tops) * fan, 3).view(-1, fan) * 1e-3 - 9
    where = torch.arange(len(tops)) * 7 % fan
    scores[torch.arange(len(tops)), where] = tops
    return scores.flatten()


def apart(scores: torch.Tensor, where: torch.Tensor | slice, by: float = 10.0) -> torch.Tensor:
    scores = scores.clone()
    scores[where] += by
    return scores


SAME = torch.tensor([-0.0, 0.0]).repeat(3000)
#: Scores, and whether what reaches the bound is more than lists hold.
ROWS: dict[str, tuple[torch.Tensor, bool]] = {
    # At once.
    "one": (torch.tensor([3.0]), False),
    "fewer than are wanted": (normal(301), False),
    "as many as are wanted": (normal(COUNT), False),
    "one more": (normal(COUNT + 1), False),
    "a row's end within a quad": (normal(4099), False),
    "all that are held": (normal(DIRECT), False),
    "all but one": (normal(DIRECT - 1), False),
    "far from zero": (normal(9000) * 1e-3 + 100, False),
    "below zero": (-normal(9000).abs() - 1, False),
    "one above": (apart(normal(9000), slice(7777, 7778), 1e3), False),
    "one far above": (apart(normal(9000), slice(7777, 7778), 1e30), True),
    "ascending": (torch.arange(6000.0), False),
    "descending": (-torch.arange(1.0, 6001.0), False),
    "across zero": (20 - torch.arange(6000.0), True),
    "together": (apart(normal(DIRECT), slice(5003, 7003)), False),
    "more quads than a list holds": (apart(normal(DIRECT), in_one_group(DIRECT, 500)), True),
    "few ties": (tied(9000, 450, 100), False),
    "ties between others": (tied(9000, 500, 13), False),
    "more ties than are compared": (tied(9000, 300, 400), True),
    "zeros of either sign": (SAME, True),
    "few equals": (torch.zeros(700), True),
    "nothing": (torch.full((5000,), NOTHING), False),
    "nothing but one": (apart(torch.full((5000,), NOTHING), slice(0, 0)), False),
    # In two rounds.
    "two rounds": (normal(40_001), False),
    "blocks together": (blocks_of(apart(normal(8192), slice(3001, 4201))), False),
    "more quads of blocks": (blocks_of(apart(normal(8192), in_one_group(8192, 500))), True),
    "many blocks of few groups": (blocks_of(apart(normal(1500), in_one_group(1500, 400))), False),
    "all of a block": (normal(2048, 4).repeat_interleave(16), False),
    "one of each quad": (blocks_of(torch.full((2048,), -9.0)), True),
    "smooth": (normal(50_000, 5).cumsum(0) / 99, False),
    "equal blocks": (blocks_of(torch.zeros(2500)), True),
    "nothing in two rounds": (torch.full((20_000,), NOTHING), False),
    "few blocks have anything": (torch.cat([normal(64, 1), torch.full((19_936,), NOTHING)]), False),
    # More blocks than are held.
    "many blocks": (normal(16 * DIRECT + 77), False),
    "many equal blocks": (blocks_of(torch.ones(DIRECT + 5)), True),
}
ROWS["nothing but one"][0][4321] = -7.0
ROWS["one of each quad"][0][::4] = normal(2048, 6).abs().repeat_interleave(4)


@pytest.mark.parametrize("name", ROWS)
def test_a_row(emulate: Any, name: str) -> None:
    scores, much = ROWS[name]
    found = choose(emulate, scores)
    assert torch.equal(found.places, best(scores))
    if len(scores) <= 16 * DIRECT:
        assert (found.kept > 0) == much


@pytest.mark.parametrize("kind", [select.POSITIONS.value, select.BLOCKS.value])
@pytest.mark.parametrize("values", ["ties", "any", "few"])
def test_values_kept_in_shared_memory(emulate: Any, kind: int, values: str) -> None:
    """More than registers hold: read in each pass, where they may not be kept or not all, and
    kept. Ties by the thousand, values below zero, and fewer than are wanted."""
    fan, blocks = 8, 16_625
    scores = normal(blocks * fan - 3, kind)
    if values == "ties":
        scores = (scores * 8).round() / 8 - 4
    elif values == "few":
        draw = torch.Generator().manual_seed(kind)
        scores[torch.rand(scores.shape, generator=draw) < 0.997] = NOTHING
    of, count = scores, COUNT
    if kind == select.BLOCKS.value:
        padded = torch.nn.functional.pad(scores, (0, 3), value=NOTHING)
        of, count = padded.view(-1, SIZE).amax(-1), BLOCKS
        of[-1] = float("inf")  # the newest is chosen
    right = best(of, count)
    assert (right[-1] < 0) == (values == "few")
    enough = -(-(blocks - (kind == select.BLOCKS.value)) // 128) * 128
    for room in (0, enough - 128, enough):
        found = choose(emulate, scores, kind=kind, fan=fan, count=count, room=room)
        assert torch.equal(found.places, right), room
        # All of them, else at most those of the chosen blocks.
        assert (found.kept > enough - 128) == (room == enough)
        assert found.kept == 0 or room


@pytest.mark.parametrize("count", [2, 33, 511])
@pytest.mark.parametrize("width", [700, 12_345, 30_000])
def test_other_counts(emulate: Any, count: int, width: int) -> None:
    scores = normal(width, count)
    assert torch.equal(choose(emulate, scores, count=count, fan=8).places, best(scores, count))


@pytest.mark.parametrize("width", [5, 16_001, 16_396, 131_072])
@pytest.mark.parametrize("room", [0, DIRECT])
@pytest.mark.parametrize("equal", [False, True])
def test_blocks(emulate: Any, width: int, room: int, equal: bool) -> None:
    """The newest is one of them, whatever it has."""
    scores = (normal(width) * 4).round() if equal else normal(width)
    scores[width // SIZE * SIZE :] = NOTHING
    blocks = -(-width // SIZE)
    padded = torch.nn.functional.pad(scores, (0, blocks * SIZE - width), value=NOTHING)
    tops = padded.view(-1, SIZE).amax(-1)
    tops[-1] = float("inf")
    found = choose(emulate, scores, kind=select.BLOCKS.value, fan=SIZE, count=BLOCKS, room=room)
    assert torch.equal(found.places, best(tops, BLOCKS))


@pytest.mark.parametrize("blocks", [3, 100, 2047, 2048])
@pytest.mark.parametrize("much", [False, True])
def test_candidates(emulate: Any, blocks: int, much: bool) -> None:
    """Positions of the blocks that are candidates; there may be fewer, then their scores are
    nothing."""
    draw = torch.Generator().manual_seed(blocks)
    chosen = torch.full((BLOCKS,), -1, dtype=torch.int32)
    chosen[:blocks] = torch.randperm(9000, generator=draw)[:blocks].sort().values.int()
    chosen[blocks - 1] = 9000
    scores = normal(BLOCKS * SIZE, blocks)
    if much:
        scores = scores.mul(2).round()
    scores[blocks * SIZE :] = NOTHING
    found = choose(emulate, scores, kind=select.CANDIDATES.value, chosen=chosen)
    right = best(scores)
    positions = chosen[right.clamp(min=0) // SIZE] * SIZE + right % SIZE
    assert torch.equal(found.places, positions.where(right >= 0, -1))
