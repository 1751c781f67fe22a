"""The indexer's kernels against float64: ``bash tests/gpu/indexer_kernels.sh`` on the GPU host;
torch and Triton only.

Row counts at their limits, requests of ragged lengths, pages that are not the request's, NaN in
what nobody may read, candidate layers, a workspace of few rows, and graphs that serve other
requests than they were captured with.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from gpu import indexer_cases as cases  # noqa: E402  (after torch is known to be there)
from gpu.indexer_cases import Case  # noqa: E402
from spark_overlay.indexer.kernels import e4m3, library  # noqa: E402
from spark_overlay.indexer.kernels.launch import Candidates, Selection  # noqa: E402
from spark_overlay.indexer.kernels.sizes import Tuning  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = "cuda"
COUNT, BLOCKS, SIZE = 512, 2048, 8
NUMBERS = 64 << 20  # 256 MiB


@pytest.fixture(scope="module")
def workspace() -> Tensor:
    return torch.empty(NUMBERS, dtype=torch.int32, device=GPU)


def ragged(rows: int, context: int) -> list[tuple[int, int]]:
    """(rows, tokens) of requests with ``rows`` rows in all, the longest of ``context`` tokens."""
    found, left, share = [], rows, [1, 4, 2, 6, 3, 1, 5]
    while left:
        count = min(left, share[len(found) % len(share)] if rows <= 64 else -(-rows // 3))
        length = max(count, context * (1 + len(found) % 4) // (1 + len(found) % 3) // 4)
        found.append((count, max(length, count)))
        left -= count
    if found:
        found[0] = (found[0][0], max(context, found[0][0]))
    return found


def run(
    case: Case,
    workspace: Tensor,
    candidates: Candidates | None = None,
    tuning: Tuning | None = None,
    count: int = COUNT,
) -> Tensor:
    workspace.fill_(0x7FC00000)
    final = torch.full((len(case.visible), count), 99, dtype=torch.int32, device=GPU)
    Selection(case.ratio, count, workspace, tuning)(
        case.q, case.weights, case.cache, case.step, final, candidates
    )
    torch.cuda.synchronize()
    return final


def written(case: Case) -> Candidates:
    shape = (len(case.visible), BLOCKS)
    return Candidates(torch.full(shape, 99, dtype=torch.int32, device=GPU), SIZE, True)


def test_decode() -> None:
    """Each of 256 bytes, packed as the kernels take it."""
    import triton
    import triton.language as tl

    @triton.jit
    def decode(word, out):
        at = tl.arange(0, 64)
        words = tl.load(word + at)
        tl.store(out + 4 * at, e4m3.halves(words, 0, True))
        tl.store(out + 4 * at + 1, e4m3.halves(words, 1, True))
        tl.store(out + 4 * at + 2, e4m3.halves(words, 2, True))
        tl.store(out + 4 * at + 3, e4m3.halves(words, 3, True))

    byte = torch.arange(256, dtype=torch.uint8, device=GPU)
    out = torch.empty(256, dtype=torch.float16, device=GPU)
    decode[(1,)](byte.view(torch.int32), out)
    right = byte.view(torch.float8_e4m3fn).float()
    number = ~right.isnan()
    assert torch.equal(out.float()[number] * 256, right[number])


@pytest.mark.parametrize("tokens", [0, 1, 6, 300])
def test_queries(tokens: int) -> None:
    """Byte by byte as torch has them, but where a rotation rounds otherwise (fused products)."""
    from spark_overlay.indexer.kernels.queries import quantise_queries
    from spark_overlay.indexer.reference import quantise_queries as reference

    draw = torch.Generator(GPU).manual_seed(tokens)
    size = torch.exp2(torch.randint(-30, 6, (tokens, 32, 1), generator=draw, device=GPU).float())
    q = torch.randn(tokens, 32, 128, generator=draw, device=GPU) * size
    weights = torch.randn(tokens, 32, generator=draw, device=GPU).bfloat16()
    positions = torch.randint(0, 500, (tokens,), generator=draw, device=GPU)
    table = torch.randn(500, 64, generator=draw, device=GPU)
    given = (q.bfloat16(), weights, positions, table, 128**-0.5, 32**-0.5)
    found, right = quantise_queries(*given), reference(*given)
    same = found[0].view(torch.uint8) == right[0].view(torch.uint8)
    assert same[..., :64][found[1] == right[1]].all()
    assert same.float().mean() > 0.999 if tokens else True
    assert (found[1] == right[1]).float().mean() > 0.999 if tokens else True


@pytest.mark.parametrize("rows", [0, 1, 4, 6, 17, 33, 256, 2048])
@pytest.mark.parametrize("ratio,states,gap", [(1, 64, 0), (1, 128, 576), (2, 32, 100)])
def test_choice(rows: int, ratio: int, states: int, gap: int, workspace: Tensor) -> None:
    """Exact scores, ties by the hundred; then random e4m3."""
    context = 5000 if rows > 64 else 30000
    for exact in (True, False):
        case = cases.make(
            ragged(rows, context),
            ratio=ratio,
            states=states,
            padding=3,
            gap=gap,
            exact=exact,
            seed=rows,
            device=GPU,
        )
        assert not cases.wrong(case, run(case, workspace), COUNT, exact=exact)


@pytest.mark.parametrize("rows", [1, 6, 17, 256])
@pytest.mark.parametrize("exact", [True, False])
def test_candidates(rows: int, exact: bool, workspace: Tensor) -> None:
    """Layer 20 writes its blocks and is not bound by them; 24 to 36 are."""
    case = cases.make(ragged(rows, 40000), padding=2, exact=exact, seed=rows, device=GPU)
    candidates = written(case)
    final = run(case, workspace, candidates)
    assert not cases.wrong(case, final, COUNT, exact=exact)
    blocks = (BLOCKS, SIZE)
    assert not cases.wrong(case, candidates.chosen, BLOCKS, exact=exact, blocks=blocks)
    assert (candidates.chosen[case.rows :] == -1).all()
    case.q = case.q.flip(0).contiguous()  # another layer's queries
    final = run(case, workspace, replace(candidates, write=False))
    limit = (candidates.chosen, SIZE)
    assert not cases.wrong(case, final, COUNT, exact=exact, limit=limit)


@pytest.mark.parametrize("context", [131072, 600000])
def test_far(context: int, workspace: Tensor) -> None:
    """A few rows that see very far, beside one that sees little."""
    case = cases.make(
        [(4, context), (1, 700), (2, 20000)], gap=576, exact=False, seed=1, device=GPU
    )
    candidates = written(case)
    final = run(case, workspace, candidates)
    assert not cases.wrong(case, final, COUNT, exact=False, at_once=2)
    blocks = (BLOCKS, SIZE)
    assert not cases.wrong(case, candidates.chosen, BLOCKS, exact=False, blocks=blocks, at_once=2)
    final = run(case, workspace, replace(candidates, write=False))
    limit = (candidates.chosen, SIZE)
    assert not cases.wrong(case, final, COUNT, exact=False, limit=limit, at_once=2)


def test_equal_scores(workspace: Tensor) -> None:
    """Every score is the same zero, of either sign: the earliest positions are chosen."""
    case = cases.make([(3, 50000), (1, 600)], exact=True, device=GPU)
    case.weights.zero_()
    case.weights[1].fill_(-0.0)
    final = run(case, workspace)
    right = torch.arange(COUNT, dtype=torch.int32, device=GPU)
    assert (final == right).all()


@pytest.mark.parametrize("rows", [8, 33, 256])
def test_rows_at_once(rows: int, workspace: Tensor) -> None:
    """However many of a request's rows the library scores at once, prompts' too: the same choice,
    near ties and all, for each row's sums are added in the same order."""
    if not library.present():
        pytest.skip("the library's kernel, and there is no library")
    case = cases.make(ragged(rows, 30000), padding=3, seed=rows, device=GPU)
    one = Tuning(enough=0, prompt_width=0, together=1)
    right = run(case, workspace, tuning=one)
    assert not cases.wrong(case, right, COUNT, exact=False)
    for together, held in ((2, 3), (3, 1), (4, 3), (4, 1), (8, 3), (8, 1)):
        tuning = replace(one, together=together, held=held)
        assert torch.equal(run(case, workspace, tuning=tuning), right), (together, held)


@pytest.mark.parametrize("length", [16385, 22498, 30003, 131071])
def test_scores_below_zero(length: int, workspace: Tensor) -> None:
    """Nothing that is not there goes before them, whatever a request's last quad holds."""
    for exact in (True, False):
        case = cases.make([(1, length), (4, length - 7)], exact=exact, seed=3, device=GPU)
        case.weights.abs_().neg_()
        for _ in range(8):
            assert not cases.wrong(case, run(case, workspace), COUNT, exact=exact)


def test_few_rows_at_once(workspace: Tensor) -> None:
    """A workspace that holds the scores of five rows gives the same as one for all."""
    case = cases.make(ragged(33, 20000), padding=2, seed=5, device=GPU)
    candidates = written(case)
    small = workspace[: 5 * 30000]
    assert torch.equal(run(case, workspace), run(case, small))
    whole = run(case, workspace, candidates)
    chosen = candidates.chosen.clone()
    candidates.chosen.fill_(99)
    assert torch.equal(whole, run(case, small, candidates))
    assert torch.equal(chosen, candidates.chosen)
    with pytest.raises(ValueError, match="workspace"):
        run(case, workspace[:1000])


def test_page_that_is_not_there(workspace: Tensor) -> None:
    """Positions whose page id is none, or none of the cache's, are never chosen."""
    case = cases.make([(2, 9000)], device=GPU)
    case.step.table[0, 3] = -1
    case.step.table[0, 5] = case.cache.shape[0]
    final = run(case, workspace)
    states = case.cache.shape[1]
    assert not torch.isin(final // states, torch.tensor([3, 5], device=GPU)).any()
    assert (final >= 0).all()


def test_short_context(workspace: Tensor) -> None:
    """Where nobody sees more than is chosen, everything is, and nothing is scored."""
    case = cases.make([(3, 500), (1, 1), (2, 512)], padding=2, device=GPU)
    case.cache.fill_(0xFF)
    final = run(case, workspace)
    column = torch.arange(COUNT, device=GPU)
    seen = torch.where(column < case.visible[:, None], column, -1)
    assert torch.equal(final.long(), seen)


@pytest.mark.parametrize("fan,last", [(8, 4096), (8, 8192), (16, 8192), (16, 16384), (32, 16384)])
def test_blocks_of_the_choice(fan: int, last: int, workspace: Tensor) -> None:
    """Blocks, and blocks of blocks, of any size: the same choice."""
    for context in (9000, 70000, 600000):
        case = cases.make([(2, context), (1, 5000)], exact=True, seed=2, device=GPU)
        final = run(case, workspace, tuning=Tuning(fan=fan, last=last))
        assert not cases.wrong(case, final, COUNT, exact=True, at_once=1)


def test_graph_serves_other_requests(workspace: Tensor) -> None:
    """Captured with one request's length and the host's bound; replayed with several requests,
    other lengths, other pages, and fewer rows than were captured."""
    bound = 60000
    batches = [
        [(2, 100), (2, 60000)],
        [(4, 40000)],
        [(1, 3), (1, 59999), (1, 512)],
        [(3, 33000)],
        [(1, 20000), (3, 45000)],
    ]
    made = [
        cases.make(b + [(0, 0)] * (3 - len(b)), padding=4 - sum(r for r, _ in b), bound=bound,
                   seed=n, exact=True, device=GPU)
        for n, b in enumerate(batches)
    ]  # fmt: skip
    blocks = max(case.cache.shape[0] for case in made)
    columns = max(case.step.table.shape[1] for case in made)
    held = replace(
        made[0],
        q=made[0].q.clone(),
        weights=made[0].weights.clone(),
        cache=torch.zeros(blocks, *made[0].cache.shape[1:], dtype=torch.uint8, device=GPU),
        step=replace(
            made[0].step,
            request=torch.zeros(4, dtype=torch.int32, device=GPU),
            starts=torch.zeros(4, dtype=torch.int32, device=GPU),
            lengths=torch.zeros(3, dtype=torch.int32, device=GPU),
            table=torch.zeros(3, columns, dtype=torch.int32, device=GPU),
            longest=4,
            bound=bound,
        ),
    )

    def fill(case: Case) -> None:
        held.q.copy_(case.q)
        held.weights.copy_(case.weights)
        held.cache[: case.cache.shape[0]].copy_(case.cache)
        for name in ("request", "starts", "lengths"):
            getattr(held.step, name).copy_(getattr(case.step, name))
        held.step.table.fill_(-1)
        held.step.table[:, : case.step.table.shape[1]].copy_(case.step.table)

    final = torch.empty(4, COUNT, dtype=torch.int32, device=GPU)
    later = torch.empty(4, COUNT, dtype=torch.int32, device=GPU)
    candidates = Candidates(torch.empty(4, BLOCKS, dtype=torch.int32, device=GPU), SIZE, True)
    layer = Selection(1, COUNT, workspace)

    def step() -> None:
        arguments = (held.q, held.weights, held.cache, held.step)
        layer(*arguments, final, candidates)
        layer(*arguments, later, replace(candidates, write=False))

    fill(made[0])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in [*made, made[0]]:
        fill(case)
        for tensor in (final, later, candidates.chosen):
            tensor.fill_(99)
        workspace.fill_(0x7FC00000)
        graph.replay()
        torch.cuda.synchronize()
        assert not cases.wrong(case, final, COUNT, exact=True)
        blocks_ = (BLOCKS, SIZE)
        assert not cases.wrong(case, candidates.chosen, BLOCKS, exact=True, blocks=blocks_)
        limit = (candidates.chosen, SIZE)
        assert not cases.wrong(case, later, COUNT, exact=True, limit=limit)
