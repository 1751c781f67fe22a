"""The attention kernels against float64: ``bash tests/gpu/attention.sh`` on the GPU host; no vLLM.

Both implementations, the CUDA library and Triton, over every shape; sources ragged, with absent and
stale slots, pages far apart, beyond 2^31 bytes, and NaN in all bytes that no slot names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from gpu import attention_cases as cases  # noqa: E402
from spark_overlay.attention import kernels  # noqa: E402
from spark_overlay.attention.kernels import Source, library, plan, reference  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU, SCALE = "cuda", 512**-0.5
TOKENS = (0, 1, 4, 6, 12, 16, 17, 32, 33, 256, 2048)
HEADS = (8, 12, 16, 32, 40, 64)
#: The library's form for many tokens, where a CTA has room for it.
MANY = plan.Cuda(64, 1, many=True)
BOTH = pytest.mark.parametrize("by_library", [True, False], ids=["cuda", "triton"])


def shape_of(by_library: bool, tokens: int, heads: int, width: int) -> plan.Shape | plan.Cuda:
    """What the table says for this GPU."""
    if by_library and not library.present():
        pytest.fail(f"{library.LIBRARY} is not built: bash tests/gpu/attention.sh builds it")
    return plan.shape(torch.cuda.get_device_capability(), max(tokens, 1), heads, width, by_library)


def roomy() -> bool:
    return torch.cuda.get_device_capability()[0] in (9, 10)


def run(
    q: Tensor,
    sources: Sequence[Source],
    chosen: plan.Shape | plan.Cuda,
    sink: Tensor | None = None,
    turn: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Into a poisoned output whose rows lie apart."""
    tokens, heads, _ = q.shape
    whole = torch.full((tokens, heads + 3, 520), math.nan, dtype=torch.bfloat16, device=GPU)
    out = whole[:, :heads, :512]
    sink = torch.zeros(heads, device=GPU) if sink is None else sink
    kernels.sparse_mla(q, sources, sink, SCALE, out, unrotate=turn, chosen=chosen)
    assert whole[:, heads:].isnan().all() and whole[..., 512:].isnan().all()
    return out.contiguous()


def agree(
    q: Tensor,
    sources: Sequence[Source],
    chosen: plan.Shape | plan.Cuda,
    sink: Tensor | None = None,
    turn: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    found = run(q, sources, chosen, sink, turn)
    sink = torch.zeros(q.shape[1], device=GPU) if sink is None else sink
    right = reference.sparse_mla(q, sources, sink, SCALE, unrotate=turn)
    assert found.isfinite().all()
    if q.shape[0]:
        worst = (found.double() - right).abs().max().item()
        assert worst <= cases.tolerance(right), (worst, cases.tolerance(right), chosen)
    return found


def ragged(tokens: int, seed: int, width: int = 128, picks: int = 512) -> list[Source]:
    """Window rows of any length, choices with absent slots among them."""
    window, chosen = cases.cache(40, 32, seed, pad=96), cases.cache(30, 64, seed + 1)
    made = cases.made(seed)
    recent = cases.slots(tokens, width, 40 * 32, seed)
    lengths = torch.randint(0, width + 1, (tokens,), device=GPU, generator=made).int()
    wanted = cases.slots(tokens, picks, 30 * 64, seed + 2)
    wanted[torch.rand(wanted.shape, device=GPU, generator=made) < 0.3] = -1
    if tokens > 2:
        lengths[1], wanted[1] = 0, -1  # nothing at all
        lengths[2] = 0
    return [Source(window, recent, lengths), Source(chosen, wanted)]


@BOTH
@pytest.mark.parametrize("tokens", TOKENS)
def test_tokens(tokens: int, by_library: bool) -> None:
    q = cases.queries(tokens, 32, tokens)
    sink = torch.randn(32, device=GPU)
    sources = ragged(tokens, tokens)
    if tokens == 2048:  # the oracle of all of them is large
        keep = slice(1000, 1200)
        out = run(q, sources, shape_of(by_library, tokens, 32, 640), sink)
        part = [
            Source(s.cache, s.slots[keep], None if s.lengths is None else s.lengths[keep])
            for s in sources
        ]
        right = reference.sparse_mla(q[keep], part, sink, SCALE)
        assert out.isfinite().all()
        assert (out[keep].double() - right).abs().max() <= cases.tolerance(right)
        return
    out = agree(q, sources, shape_of(by_library, tokens, 32, 640), sink)
    if tokens > 2:
        assert not out[1].any() and out[2].any()


@BOTH
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads: int, by_library: bool) -> None:
    for tokens in (3, 40):
        q = cases.queries(tokens, heads, heads)
        sink = torch.randn(heads + 2, device=GPU)  # vLLM keeps more than this rank's
        agree(q, ragged(tokens, heads), shape_of(by_library, tokens, heads, 640), sink[:heads])


@pytest.mark.parametrize("heads", [12, 20, 40, 64])
@pytest.mark.parametrize("tokens", [1, 33, 131, 133, 265, 700])
def test_the_form_for_many_tokens_takes_any_number(tokens: int, heads: int) -> None:
    """Of a CTA each: none, one, several, and one more than all have; most tokens end in the middle
    of a tile, some have none."""
    if not roomy():
        pytest.skip("needs 215 KB of shared memory")
    sources = ragged(tokens, tokens)
    sources[1].slots[::3, 200:] = -1
    sources[1].slots[5::7] = -1
    turn = (torch.randn(50, 64, device=GPU), torch.arange(tokens, device=GPU) % 50)
    agree(cases.queries(tokens, heads, 7), sources, MANY, torch.randn(heads, device=GPU), turn)


@BOTH
@pytest.mark.parametrize(("width", "picks"), [(128, 0), (1, 0), (33, 7), (65, 64), (128, 512)])
def test_widths(width: int, picks: int, by_library: bool) -> None:
    """Without compression (ratio 0) there is the window alone."""
    for tokens in (3, 70):
        sources = ragged(tokens, width, width, max(picks, 1))[: 2 if picks else 1]
        agree(
            cases.queries(tokens, 32, 1),
            sources,
            shape_of(by_library, tokens, 32, width + picks),
        )


@BOTH
def test_any_split_gives_the_answer_and_always_the_same(by_library: bool) -> None:
    q, sources = cases.queries(5, 32, 1), ragged(5, 3)
    if by_library and roomy():
        first = agree(q, sources, MANY)
        assert torch.equal(first, run(q, sources, MANY))
    for splits in (1, 2, 3, 7, 20, 25):
        for keys in (32, 64):
            one = plan.Cuda(keys, splits) if by_library else plan.Shape(32, keys, splits, 8, 1)
            if not by_library and keys == 64 and splits not in (1, 3):
                continue
            first = agree(q, sources, one)
            again = run(q, sources, one)
            assert torch.equal(first.view(torch.int16), again.view(torch.int16)), one


@BOTH
def test_output_turned_back(by_library: bool) -> None:
    for dtype, index in ((torch.float32, torch.int64), (torch.bfloat16, torch.int32)):
        table = torch.randn(500, 64, device=GPU).to(dtype)
        for tokens, shape in ((6, None), (300, None)):
            positions = torch.randint(0, 500, (tokens + 2,), device=GPU).to(index)
            chosen = shape or shape_of(by_library, tokens, 32, 640)
            agree(cases.queries(tokens, 32, 2), ragged(tokens, 5), chosen, turn=(table, positions))


@BOTH
def test_rows_of_the_query_may_lie_apart(by_library: bool) -> None:
    whole = cases.queries(9, 48, 4)
    q = whole[2:7, 8:40]
    agree(q, ragged(5, 8), shape_of(by_library, 5, 32, 640))


@BOTH
@pytest.mark.parametrize("scales", [0, 1, 100, 126, 131, 133])
def test_scales(scales: int, by_library: bool) -> None:
    """Also those beyond which one bf16 factor is not enough (134)."""
    q = cases.queries(5, 32, 1) * 2.0**-9
    window = cases.cache(9, 32, 3, scales=scales)
    source = Source(window, cases.slots(5, 100, 9 * 32, 4))
    for keys in (32, 64):
        for splits in (1, 2):
            one = plan.Cuda(keys, splits) if by_library else plan.Shape(32, 32, splits, 8, 1)
            agree(q, [source], one)
    if by_library and roomy():
        agree(q, [source], MANY)


@BOTH
def test_sinks(by_library: bool) -> None:
    q, sources = cases.queries(4, 32, 1), ragged(4, 6)
    for value in (-math.inf, -1e4, 0.0, 30.0, 300.0):
        sink = torch.full((32,), value, device=GPU)
        for chosen in (shape_of(by_library, 4, 32, 640), shape_of(by_library, 400, 32, 640)):
            found = run(q, sources, chosen, sink)
            right = reference.sparse_mla(q, sources, sink, SCALE)
            assert found.isfinite().all()
            bar = cases.tolerance(right) + 1e-30  # outputs vanish under the largest
            assert (found.double() - right).abs().max() <= bar, value
            assert not found[1].any()


@BOTH
def test_nan_bytes_where_no_slot_points(by_library: bool) -> None:
    window = cases.cache(12, 32, 1, pad=64)
    used = torch.arange(0, 12 * 32, 3, device=GPU).int()
    page = window.as_strided((12, window.stride(0)), (window.stride(0), 1))
    keep = torch.zeros(12, 32, dtype=torch.bool, device=GPU)
    keep.view(-1)[used.long()] = True
    data = page[:, : 32 * 576].unflatten(1, (32, 576))
    data[~keep] = 0xFF
    page[:, 32 * 576 : 32 * 584].unflatten(1, (32, 8))[~keep] = 0xFF
    page[:, 32 * 576 : 32 * 584].unflatten(1, (32, 8))[..., 7] = 0xFF  # the scale nobody has
    rows = used[torch.randint(0, len(used), (6, 128), device=GPU)]
    rows[:, 5::7] = -1
    rows[3, 60:] = 7  # stale: beyond the length, and NaN
    lengths = torch.full((6,), 128, dtype=torch.int32, device=GPU)
    lengths[3] = 60
    sources = [Source(window, rows, lengths)]
    for tokens in (6, 400):
        agree(cases.queries(6, 32, 3), sources, shape_of(by_library, tokens, 32, 128))


@BOTH
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_in_a_record_shows_in_its_tokens_and_no_others(code: int, by_library: bool) -> None:
    window = cases.cache(4, 32, 1)
    rows = torch.arange(64, device=GPU).int().view(2, 32)
    for value in (0, 63, 64, 200, 447):
        spoiled = window.clone()
        spoiled.view(4, -1)[0, 5 * 576 + value] = code
        for chosen in (shape_of(by_library, 2, 32, 32), shape_of(by_library, 400, 32, 32)):
            out = run(cases.queries(2, 32, 3), [Source(spoiled, rows)], chosen)
            assert out[0].isnan().all() and out[1].isfinite().all(), (value, chosen)


@BOTH
def test_pages_beyond_two_gibibytes(by_library: bool) -> None:
    pages = 62000  # of 37376 bytes: 2.3 GB
    whole = torch.zeros(pages * 37376, dtype=torch.uint8, device=GPU)
    far = whole.view(pages, 64, 584)
    near = cases.cache(8, 64, 3)
    far[-8:] = near
    slots = cases.slots(5, 200, 8 * 64, 2)
    q = cases.queries(5, 32, 3)
    for tokens in (5, 400):
        chosen = shape_of(by_library, tokens, 32, 200)
        one = run(q, [Source(near, slots)], chosen)
        other = run(q, [Source(far, slots + (pages - 8) * 64)], chosen)
        assert torch.equal(one, other)


def test_triton_takes_pages_at_any_even_stride() -> None:
    window = cases.cache(9, 32, 3, pad=6)
    source = Source(window, cases.slots(5, 100, 9 * 32, 4))
    sink = torch.zeros(32, device=GPU)
    q = cases.queries(5, 32, 1)
    out = torch.full_like(q, math.nan)
    kernels.sparse_mla(q, [source], sink, SCALE, out)  # by itself: the library's copies cannot
    right = reference.sparse_mla(q, [source], sink, SCALE)
    assert (out.double() - right).abs().max() <= cases.tolerance(right)


@BOTH
def test_a_graph_replays_on_new_contents(by_library: bool) -> None:
    q, sources = cases.queries(4, 32, 1), ragged(4, 6)
    out = torch.empty_like(q)
    sink = torch.zeros(32, device=GPU)
    chosen = shape_of(by_library, 4, 32, 640)

    def call() -> None:
        kernels.sparse_mla(q, sources, sink, SCALE, out, chosen=chosen)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in (11, 12):
        q.copy_(cases.queries(4, 32, seed))
        for old, new in zip(sources, ragged(4, seed), strict=True):
            old.slots.copy_(new.slots)
            if old.lengths is not None and new.lengths is not None:
                old.lengths.copy_(new.lengths)
        out.fill_(math.nan)
        graph.replay()
        right = reference.sparse_mla(q, sources, sink, SCALE)
        assert (out.double() - right).abs().max() <= cases.tolerance(right)


def test_wrong_arguments_are_refused() -> None:
    q, sources, sink = cases.queries(2, 32, 1), ragged(2, 1), torch.zeros(32, device=GPU)
    out = torch.empty_like(q)
    for wrong in (
        dict(q=q.half()), dict(out=out[:1]), dict(sink=sink[:8]), dict(sources=[]),
        dict(sources=[dataclasses.replace(sources[0], slots=sources[0].slots.long())]),
    ):  # fmt: skip
        given = dict(q=q, sources=sources, sink=sink, scale=SCALE, out=out) | wrong
        with pytest.raises(ValueError):
            kernels.sparse_mla(**given)  # type: ignore[arg-type]


@BOTH
def test_every_code_with_every_scale_as_a_value(by_library: bool) -> None:
    """One record and no sink: the output is the record."""
    page = cases.every_number()
    page.view(-1)[: 256 * 576].view(256, 576)[:, :448] &= 0x7E  # no NaN
    slots = torch.arange(256, dtype=torch.int32, device=GPU)[:, None]
    q = torch.zeros(256, 32, 512, dtype=torch.bfloat16, device=GPU)
    sink = torch.full((32,), -math.inf, device=GPU)
    for tokens in (1, 400):
        out = run(q, [Source(page, slots)], shape_of(by_library, tokens, 32, 1), sink)
        right = reference.read_records(page, torch.arange(256, device=GPU)).bfloat16()
        # 0 times an infinity is a NaN logit: scales from 247 on overflow.
        assert torch.equal(cases.bits(out[:247, 0]), cases.bits(right[:247])), tokens
        assert out[255].isnan().all()
