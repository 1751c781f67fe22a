"""The CUDA kernels of sparse attention on this CPU (tests/emulated). Shows where every value
goes; a GPU shows the rest."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulation
import pytest
import torch
from gpu import attention_cases as cases

from spark_overlay.attention.kernels import Source, library, plan, reference, sparse

pytestmark = pytest.mark.rehearsal


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulation.built("attention", tmp_path_factory.mktemp("emulated"))


@pytest.fixture(params=[0, 1], ids=["forwards", "backwards"])
def emulate(request: pytest.FixtureRequest, built: Path) -> Iterator[Any]:
    """Threads take turns in either order: who forgets a barrier finds other values in one."""
    loaded = library.Library(built)
    torch.manual_seed(1)  # of few values: other ones come as near as 0.9 of what is allowed
    ctypes.CDLL(str(built)).run_backwards(request.param)
    with emulation.no_gpu() as patch:
        patch.setattr(library, "load", lambda: loaded)
        yield sparse.launch_cuda


@pytest.mark.parametrize(
    ("keys", "many", "heads", "width", "picks", "scales"),
    [
        (32, False, 20, 33, 0, 118),
        (64, False, 12, 20, 60, 118),
        (32, False, 12, 30, 0, 132),
        (64, True, 20, 40, 90, 118),
        (64, True, 36, 30, 0, 132),
    ],
)
def test_the_kernel(
    emulate: Any, keys: int, many: bool, heads: int, width: int, picks: int, scales: int
) -> None:
    """Two sources, absent slots, heads that fill no tile, rotation; scales of one factor and of
    two. With ``many``, CTAs take tokens of several tiles, of one and without records."""
    tokens = 5 if many else 1
    window = cases.cache(5, 32, 1, "cpu", pad=64, scales=scales)
    slots = cases.slots(tokens, width, 5 * 32, 2, "cpu")
    slots[0, 3] = -1
    lengths = torch.tensor([width - 1, 7, 0, width, 1], dtype=torch.int32)[:tokens]
    sources = [Source(window, slots, lengths)]
    if picks:
        chosen = cases.slots(tokens, picks, 3 * 48, 3, "cpu")
        chosen[0, ::5] = -1
        chosen[2:3] = -1
        sources.append(Source(cases.cache(3, 48, 2, "cpu"), chosen))
    q = cases.queries(tokens, heads, 3, "cpu") * 2.0 ** (118 - scales)
    sink = torch.randn(heads)
    turn = (torch.randn(40, 64), torch.tensor([7, 0, 39, 2, 5])[:tokens])
    out = torch.full_like(q, math.nan)
    emulate(q, sources, sink, 0.03, out, turn, plan.Cuda(keys, 1, many))
    right = reference.sparse_mla(q, sources, sink, 0.03, unrotate=turn)
    assert (out.double() - right).abs().max() <= cases.tolerance(right)
    assert not out[2:3].any()


@pytest.mark.parametrize("many", [False, True])
def test_a_nan_code_makes_the_token_nan(emulate: Any, many: bool) -> None:
    for code in (0x7F, 0xFF):
        window = cases.cache(2, 32, 1, "cpu")
        window.view(2, -1)[0, 5 * 576 + 200] = code
        slots = torch.arange(10, dtype=torch.int32)[None]
        q, sink = cases.queries(1, 8, 3, "cpu"), torch.zeros(8)
        out, shape = torch.zeros_like(q), plan.Cuda(64 if many else 32, 1, many)
        emulate(q, [Source(window, slots)], sink, 0.03, out, None, shape)
        assert out.isnan().all()


@pytest.mark.parametrize("many", [False, True])
def test_every_code_is_what_it_says(emulate: Any, many: bool) -> None:
    """A token of one record and no logit beside it: its value, each finite code, at scales of one
    factor and of two."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    q, sink = torch.zeros(1, 8, 512).bfloat16(), torch.full((8,), -math.inf)
    slots = torch.tensor([[1]], dtype=torch.int32)
    for scale in (1, 100, 134, 135, 140):
        window = torch.zeros(1, 32, 584, dtype=torch.uint8)
        records, scales = window.view(-1)[: 32 * 576].view(32, 576), window.view(-1)[32 * 576 :]
        records[1, :448] = codes.repeat(2)[:448]
        scales.view(32, 8)[:, :7] = scale
        out, shape = torch.full_like(q, math.nan), plan.Cuda(64 if many else 32, 1, many)
        emulate(q, [Source(window, slots)], sink, 0.03, out, None, shape)
        right = reference.sparse_mla(q, [Source(window, slots)], sink, 0.03)
        assert torch.equal(out, right.to(out.dtype))


@pytest.mark.parametrize("many", [False, True])
def test_records_beyond_two_gibibytes(emulate: Any, many: bool) -> None:
    """A page that far from the first; of what lies between nothing is touched."""
    near, stride = cases.cache(2, 32, 1, "cpu"), (1 << 31) + (1 << 20)
    whole = torch.empty(stride + 32 * 584, dtype=torch.uint8)
    far = whole.as_strided((2, 32, 584), (stride, 584, 1))
    far.copy_(near)
    slots = torch.arange(0, 64, 3, dtype=torch.int32)[None]
    q, sink = cases.queries(1, 20, 3, "cpu"), torch.zeros(20)
    out = [torch.full_like(q, math.nan) for _ in range(2)]
    for cache, to in zip((near, far), out, strict=True):
        shape = plan.Cuda(64 if many else 32, 1, many)
        emulate(q, [Source(cache, slots)], sink, 0.03, to, None, shape)
    assert out[0].isfinite().all() and torch.equal(*out)
