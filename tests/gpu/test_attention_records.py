"""Gathered records and index rows, bit for bit: ``bash tests/gpu/attention.sh`` on the GPU host; no
vLLM. Outputs are poisoned first; what nobody asked for holds NaN bytes, or lies beyond 2^31."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu import attention_cases as cases  # noqa: E402
from gpu import late  # noqa: E402
from spark_overlay.attention import format as fmt  # noqa: E402
from spark_overlay.attention import kernels  # noqa: E402
from spark_overlay.attention.kernels import reference  # noqa: E402
from spark_overlay.early import starts_early  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = "cuda"
POISON = 123456789
TOKENS = (0, 1, 4, 6, 12, 16, 17, 32, 33, 256, 2048)


def test_every_code_with_every_scale() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32, device=GPU)
    lengths = torch.tensor([256], dtype=torch.int32, device=GPU)
    out = torch.full((1, 256, 512), 7.0, dtype=torch.bfloat16, device=GPU)
    kernels.gather(out, cases.every_number(), lengths, None, table)
    codes = torch.arange(448, device=GPU) % 256
    values = fmt.e4m3_values(codes.to(torch.uint8)).double()
    scales = fmt.ue8m0_values(torch.arange(256, device=GPU).to(torch.uint8)).double()
    right = (scales[:, None] * values[None, :]).float().bfloat16()
    assert torch.equal(cases.bits(out[0, :, :448]), cases.bits(right))


@pytest.mark.parametrize("block", [32, 64, 128])
def test_gather(block: int) -> None:
    cache = cases.cache(50, block, block, pad=0 if block == 64 else 208)
    made = cases.made(3)
    table = torch.randint(0, 50, (5, 9), device=GPU, generator=made).int()
    lengths = torch.tensor([9 * block, 0, 1, 3 * block - 1, 200], dtype=torch.int32, device=GPU)
    counts = torch.tensor([100, 0, 1, 3 * block - 9, 64], dtype=torch.int32, device=GPU)
    table[1] = 1 << 30  # of a request without records: never looked at
    for some in (None, counts):
        for offset, width in ((0, 512), (17, 528)):
            whole = torch.full((5, 9 * block + 40, width), math.nan, device=GPU).bfloat16()
            right = whole.clone()
            kernels.gather(whole[..., :512], cache, lengths, some, table, offset)
            reference.gather(right[..., :512], cache, lengths, some, table, offset)
            assert torch.equal(cases.bits(whole), cases.bits(right))


def test_gather_reads_no_more_than_it_is_asked_for() -> None:
    """Pages beyond 2^31 bytes; everything else in the cache is NaN, in codes and scales alike."""
    pages, stride = 62000, 37440  # 2.3 GB
    whole = torch.full((pages * stride,), 0xFF, dtype=torch.uint8, device=GPU)
    far = whole.as_strided((pages, 64, 584), (stride, 584, 1))
    near = cases.cache(8, 64, 3)
    far[-8:] = near
    table = torch.tensor([[7, 2, 5, 0]], dtype=torch.int32, device=GPU)
    lengths = torch.tensor([4 * 64 - 9], dtype=torch.int32, device=GPU)
    out = {n: torch.full((1, 300, 512), math.nan, device=GPU).bfloat16() for n in ("near", "far")}
    kernels.gather(out["near"], near, lengths, None, table)
    kernels.gather(out["far"], far, lengths, None, table + (pages - 8))
    assert (
        out["far"][0, : 4 * 64 - 9].isfinite().all() and out["far"][0, 4 * 64 - 9 :].isnan().all()
    )
    assert torch.equal(cases.bits(out["near"]), cases.bits(out["far"]))


class Numbers:
    """All that a gather reads, in one tensor of int32: ``[64]`` and 50 pages of 64 records."""

    def __init__(self, seed: int, lengths: list[int], counts: list[int]) -> None:
        pages = cases.cache(50, 64, seed, GPU).reshape(-1).view(torch.int32)
        table = torch.randint(0, 50, (27,), device=GPU, generator=cases.made(seed, GPU)).int()
        ours = torch.zeros(64, dtype=torch.int32, device=GPU)
        ours[:27], ours[32:35] = table, torch.tensor(lengths, device=GPU)
        ours[40:43] = torch.tensor(counts, device=GPU)
        self.all = torch.cat([ours, pages])

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Cache, lengths, counts, table."""
        cache = self.all[64:].view(torch.uint8).view(50, 64, 584)
        return cache, self.all[32:35], self.all[40:43], self.all[:27].view(3, 9)


class Follows:
    """Gathers behind launches that let them start at once and end late. First such a launch writes
    all that two gathers read, then another reads what a gather writes."""

    def __init__(self) -> None:
        self.fresh = Numbers(5, [576, 1, 200], [300, 1, 64])
        self.stale = Numbers(6, [200, 70, 3], [150, 70, 3])
        self.held = Numbers(7, [1, 1, 1], [1, 1, 1])
        self.clock = torch.zeros(1, dtype=torch.int32, device=GPU)
        self.out, self.again, self.seen = (
            torch.zeros(3, 400, 512, dtype=torch.bfloat16, device=GPU) for _ in range(3)
        )
        self.peeked = torch.zeros(late.WORDS, dtype=torch.int32, device=GPU)

    def work(self) -> None:
        self.held.all.copy_(self.stale.all)
        late.copy(self.held.all, self.fresh.all, self.clock)
        late.peek(self.peeked, self.held.all)
        self.held.all.copy_(self.stale.all)
        for out in (self.out, self.again, self.seen):
            out.fill_(math.nan)
        late.copy(self.held.all, self.fresh.all, self.clock)
        kernels.gather(self.out, *self.held.parts())
        kernels.gather(self.again, *self.held.parts(), 17)
        words = (one.view(torch.int32).view(-1) for one in (self.seen, self.out))
        late.copy(*words, self.clock)
        kernels.gather(self.out, *self.stale.parts())

    def judge(self) -> None:
        right = torch.full_like(self.out, math.nan)
        again = right.clone()
        reference.gather(right, *self.fresh.parts())
        reference.gather(again, *self.fresh.parts(), 17)
        assert torch.equal(cases.bits(self.seen), cases.bits(right))
        assert torch.equal(cases.bits(self.again), cases.bits(again))
        reference.gather(right, *self.stale.parts())
        assert torch.equal(cases.bits(self.out), cases.bits(right))


def test_gather_waits_for_the_launch_before_it() -> None:
    case = Follows()
    case.work()
    case.judge()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.work()
    for _ in range(3):
        graph.replay()
        case.judge()
    # Where launches start early one that does not wait must have seen what was there before.
    early = starts_early(case.out.device)
    before = case.stale.all if early else case.fresh.all
    assert torch.equal(case.peeked, before[: late.WORDS]), "no launch started early: nothing shown"


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("base", [0, 7])
def test_combine(ratio: int, base: int) -> None:
    starts = torch.tensor([0, 5, 5, 300, 301, 417], dtype=torch.int32) + base
    lengths = torch.tensor([5, 9, 700, 2, 60], dtype=torch.int32)  # the last one: positions below 0
    gathered = torch.tensor([5, 9, 420, 1, 60], dtype=torch.int32)
    topk = torch.randint(-2, 500, (417, 512), dtype=torch.int32)
    args = (128, ratio, 512 if ratio else 0, 2000, 400)
    right = reference.combine(topk, starts, lengths, gathered, *args)
    out = tuple(torch.full_like(x, POISON, device=GPU) for x in right)
    given = (x.to(GPU) for x in (topk, starts, lengths, gathered))
    for found in (kernels.combine(*given, *args, out=out), out):
        for a, b in zip(found, right, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("tokens", TOKENS)
def test_combine_of_any_number_of_tokens(tokens: int, ratio: int) -> None:
    """Two requests, the second one with a long past; then one."""
    for first in {tokens // 3, tokens}:
        starts = torch.tensor([0, first, tokens], dtype=torch.int32)
        lengths = torch.tensor([first, tokens - first + 3000], dtype=torch.int32)
        gathered = torch.minimum(lengths, starts.diff() + 127).int()
        topk = torch.randint(-1, 1500, (tokens, 512), dtype=torch.int32)
        args = (128, ratio, 512 if ratio else 0, 9000, 4000)
        right = reference.combine(topk, starts, lengths, gathered, *args)
        out = tuple(torch.full_like(x, POISON, device=GPU) for x in right)
        kernels.combine(*(x.to(GPU) for x in (topk, starts, lengths, gathered)), *args, out=out)
        for a, b in zip(out, right, strict=True):
            assert torch.equal(a.cpu(), b)


def test_combine_of_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int32, device=GPU)
    topk = torch.zeros(0, 512, dtype=torch.int32, device=GPU)
    start = torch.zeros(1, dtype=torch.int32, device=GPU)
    rows, lengths = kernels.combine(topk, start, none, none, 128, 1, 512, 10, 5)
    assert rows.shape == (0, 640) and lengths.shape == (0,)


def test_chosen_slots() -> None:
    topk = torch.randint(-2, 600, (70, 512), device=GPU).int()
    table = torch.randint(-1, 99, (3, 7), device=GPU).int()
    for request in (torch.randint(-1, 3, (80,), device=GPU), torch.zeros(70, device=GPU).int()):
        for states in (32, 64):
            out = torch.full_like(topk, 77)
            kernels.chosen_slots(topk, table, request, states, out)
            assert torch.equal(out, reference.chosen_slots(topk, table, request, states))
