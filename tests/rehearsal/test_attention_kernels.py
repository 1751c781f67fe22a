"""The attention kernels in Triton, run by the mended interpreter: against their torch references,
against vLLM's own, and, compiled, within what every GPU has."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gpu import attention_cases as cases
from torch import Tensor

from spark_overlay import early
from spark_overlay.attention import kernels
from spark_overlay.attention.kernels import Source, plan, records, reference

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]
ROOT = Path(__file__).resolve().parents[2]
SCALE = 512**-0.5


@pytest.fixture(scope="module", autouse=True)
def mended(vllm: ModuleType) -> None:
    from spark_overlay.cpu import glue

    glue.prepare()


def ragged(tokens: int, width: int, picks: int, seed: int) -> list[Source]:
    window, chosen = cases.cache(5, 32, seed, "cpu", pad=96), cases.cache(3, 64, seed + 1, "cpu")
    made = cases.made(seed, "cpu")
    lengths = torch.randint(0, width + 1, (tokens,), generator=made).int()
    wanted = cases.slots(tokens, max(picks, 1), 3 * 64, seed + 2, "cpu")
    wanted[torch.rand(wanted.shape, generator=made) < 0.3] = -1
    lengths[0], lengths[-1], wanted[-1] = width, 0, -1
    sources = [Source(window, cases.slots(tokens, width, 5 * 32, seed, "cpu"), lengths)]
    return [*sources, Source(chosen, wanted)] if picks else sources


def agree(q: Tensor, sources: Sequence[Source], chosen: plan.Shape, **more: Any) -> Tensor:
    heads = q.shape[1]
    sink = torch.linspace(-1, 2, heads)
    out = torch.full_like(q, math.nan)
    kernels.sparse_mla(q, sources, sink, SCALE, out, chosen=chosen, **more)
    right = reference.sparse_mla(q, sources, sink, SCALE, **more)
    assert (out.double() - right).abs().max() <= cases.tolerance(right)
    return out


@pytest.mark.parametrize(
    ("heads", "width", "picks", "keys", "splits"),
    [(8, 20, 0, 16, 1), (16, 33, 20, 16, 2), (20, 16, 16, 16, 1), (33, 5, 40, 32, 3)],
)
def test_attention(heads: int, width: int, picks: int, keys: int, splits: int) -> None:
    q = cases.queries(2, heads, 1, "cpu")
    chosen = plan.Shape(16 if heads <= 16 else 32, keys, splits, 4, 1)
    out = agree(q, ragged(2, width, picks, heads), chosen)
    assert not out[1].any() and out[0].any()


@pytest.mark.parametrize("splits", [1, 2])
def test_the_output_is_turned_back(splits: int) -> None:
    turn = (torch.randn(9, 64), torch.tensor([8, 3]))
    q = cases.queries(2, 16, 2, "cpu")
    agree(q, ragged(2, 20, 0, 4), plan.Shape(16, 16, splits, 4, 1), unrotate=turn)


def test_bytes_nobody_asked_for_do_not_matter() -> None:
    (source,) = ragged(2, 20, 0, 4)
    spoiled = source.cache.clone()
    used = torch.zeros(5 * 32, dtype=torch.bool)
    used[source.slots[0].long()] = True
    page = spoiled.as_strided((5, 32 * 584), (spoiled.stride(0), 1))
    page[:, : 32 * 576].unflatten(1, (32, 576))[~used.view(5, 32)] = 0xFF
    page[:, 32 * 576 :].unflatten(1, (32, 8))[~used.view(5, 32)] = 0xFF
    q, shape = cases.queries(2, 16, 2, "cpu"), plan.Shape(16, 16, 1, 4, 1)
    right = agree(q, [source], shape)
    slots = source.slots.clone()
    slots[0, 3] = slots[1, :] = -1
    clean = agree(q, [Source(source.cache, slots, source.lengths)], shape)
    found = agree(q, [Source(spoiled, slots, source.lengths)], shape)
    assert torch.equal(found, clean) and not torch.equal(found, right)


def test_no_tokens_and_wrong_ones() -> None:
    q, sources = cases.queries(2, 16, 2, "cpu"), ragged(2, 20, 0, 4)
    sink = torch.zeros(16)
    none = [Source(s.cache, s.slots[:0], None) for s in sources]
    kernels.sparse_mla(q[:0], none, sink, SCALE, q[:0].clone())
    with pytest.raises(ValueError, match="slots"):
        kernels.sparse_mla(q, none, sink, SCALE, torch.empty_like(q))
    with pytest.raises(ValueError, match="float32, one for each head"):
        kernels.sparse_mla(q, sources, sink[:3], SCALE, torch.empty_like(q))


def bits(x: Tensor) -> Tensor:
    """Any NaN is like any other."""
    return torch.where(x.isnan(), 0x7FC0, x.contiguous().view(torch.int16).int() & 0xFFFF)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_gather_every_code_with_every_scale() -> None:
    raw = torch.zeros(256 * 584, dtype=torch.uint8)
    raw[: 256 * 576].view(256, 576)[:, :448] = (torch.arange(448) % 256).to(torch.uint8)
    raw[256 * 576 :].view(256, 8)[:, :7] = torch.arange(256).to(torch.uint8)[:, None]
    cache, table = raw.view(1, 256, 584), torch.zeros(1, 1, dtype=torch.int32)
    lengths = torch.tensor([256], dtype=torch.int32)
    found = torch.full((1, 256, 512), 7.0).bfloat16()
    right = found.clone()
    kernels.gather(found, cache, lengths, None, table)
    reference.gather(right, cache, lengths, None, table)
    assert torch.equal(bits(found), bits(right))
    assert found[0, 127, 0x38] == 1 and found[0, 0, 0x38] == 2.0**-127 and found[0, 255].isnan()[0]


def test_gather_is_vllms_bit_for_bit() -> None:
    from vllm.models.deepseek_v41.common.ops import cache_utils as stock

    cache = cases.cache(9, 32, 3, "cpu", pad=16)
    table = torch.randint(0, 9, (2, 4), dtype=torch.int32)
    lengths = torch.tensor([100, 0], dtype=torch.int32)
    counts = torch.tensor([70, 0], dtype=torch.int32)
    whole = torch.full((2, 90, 528), math.nan).bfloat16()
    theirs = whole.clone()
    kernels.gather(whole[..., :512], cache, lengths, counts, table, 5)
    stock.dequantize_and_gather_k_cache_triton(
        theirs[..., :512], cache, lengths, counts, table, 32, 5
    )
    assert torch.equal(bits(whole), bits(theirs)) and whole[1].isnan().all()


@pytest.mark.parametrize(("counts", "offset"), [(None, 0), ((70, 0, 1, 37, 9), 5)])
def test_gather_of_ragged_requests(counts: tuple[int, ...] | None, offset: int) -> None:
    """Full, empty, of one record, and two with stale entries behind their own; the table is a part
    of a wider one."""
    cache = cases.cache(9, 32, 4, "cpu", pad=16)
    lengths = torch.tensor([96, 0, 1, 65, 32], dtype=torch.int32)
    table = torch.randint(0, 9, (6, 5), dtype=torch.int32)
    table[:, 3:] = 1 << 30
    table[1, :3], table[2, 1:3], table[4, 1], table[4, 2] = -1, 1 << 30, -1, 1 << 30
    found = torch.full((5, 110, 528), math.nan).bfloat16()
    right = found.clone()
    some = None if counts is None else torch.tensor(counts, dtype=torch.int32)
    most = 96 if counts is None else 70
    kernels.gather(found[..., :512], cache, lengths, some, table[:, :3], offset, most)
    reference.gather(right[..., :512], cache, lengths, some, table[:, :3], offset)
    assert torch.equal(bits(found), bits(right)) and found[0, offset : offset + most].any()


@pytest.mark.parametrize(
    ("capability", "asked", "does"),
    [
        (None, "1", False),
        ((8, 9), "1", False),
        ((9, 0), None, True),
        ((9, 0), "0", False),
        ((12, 1), None, False),
        ((12, 1), "1", True),
    ],
)
def test_where_the_gather_starts_early(
    capability: tuple[int, int] | None,
    asked: str | None,
    does: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.delenv(early.ASKED, raising=False)
    if asked is not None:
        monkeypatch.setenv(early.ASKED, asked)
    device = torch.device("cpu" if capability is None else "cuda:7")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(early, "starts_early", early.starts_early.__wrapped__)
    monkeypatch.setattr(records, "starts_early", lambda _: early.starts_early(device))
    monkeypatch.setattr(records, "_gather", {(1, 2): lambda *_, **named: given.update(named)})
    one, table = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    out, cache = torch.zeros(1, 9, 512).bfloat16(), cases.cache(1, 32, 1, "cpu")
    records.gather(out, cache, one, None, table)
    named = {"EARLY": True, "launch_pdl": True}
    assert given["ROWS"] == records.ROWS
    assert named.items() <= given.items() if does else not named.keys() & given.keys()


def combined(ratio: int) -> tuple[Any, ...]:
    """Ragged, an empty request, a base, stale entries, a window that replay cut, positions below
    zero."""
    starts = torch.tensor([0, 5, 5, 30, 39], dtype=torch.int32) + 7
    lengths = torch.tensor([5, 9, 300, 4], dtype=torch.int32)
    gathered = torch.tensor([5, 9, 120, 4], dtype=torch.int32)
    topk = torch.randint(-2, 300, (39, 256), dtype=torch.int32)
    return topk, starts, lengths, gathered, 128, ratio, 256 if ratio else 0, 2000, 200


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_combine(ratio: int) -> None:
    args = combined(ratio)
    for ours, plain in zip(kernels.combine(*args), reference.combine(*args), strict=True):
        assert torch.equal(ours, plain)


def test_combine_is_vllms_bit_for_bit() -> None:
    """Its grid is 256 programs a request, which the interpreter runs one by one: one ratio."""
    from vllm.models.deepseek_v41.common.ops import cache_utils as stock

    args = combined(2)
    for ours, theirs in zip(
        kernels.combine(*args), stock.combine_topk_swa_indices(*args), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_chosen_slots() -> None:
    topk = torch.randint(-2, 600, (9, 40), dtype=torch.int32)
    table = torch.randint(-1, 99, (3, 7), dtype=torch.int32)
    request = torch.tensor([0, 1, 2, -1, 1, 1, 0, 0, -1, 5])
    out = torch.full_like(topk, 77)
    kernels.chosen_slots(topk, table, request, 64, out)
    assert torch.equal(out, reference.chosen_slots(topk, table, request, 64))
    assert (out[3] == -1).all()


def test_the_table_gives_every_split_something_to_do() -> None:
    for capability in ((8, 0), (8, 6), (9, 0), (12, 1)):
        for tokens in (1, 2, 3, 5, 8, 24, 33, 200, 5000):
            for heads, width in ((8, 128), (32, 640), (64, 640), (32, 1), (32, 4096)):
                for by_library in (False, True):
                    one = plan.shape(capability, tokens, heads, width, by_library)
                    tiles = -(-width // one.keys)
                    each = -(-tiles // one.splits)
                    assert 1 <= one.splits <= 64 and (one.splits - 1) * each < tiles
                    if capability != (9, 0) and capability != (8, 0):
                        assert one.keys == 32


def test_whole_tokens_are_taken_one_after_the_other_where_a_cta_has_room_for_it() -> None:
    """215 KB of shared memory, which SM90 and SM100 have; 32 heads to multiply a record by."""
    for capability in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 1)):
        for heads in (8, 16, 20, 32, 64):
            for tokens in (1, 24, 67, 5000):
                one = plan.shape(capability, tokens, heads, 640, True)
                assert isinstance(one, plan.Cuda)
                expected = capability[0] in (9, 10) and heads > 16 and tokens > 24
                assert one == plan.Cuda(64, 1, many=True) if expected else not one.many


COMPILED = """
import json, sys
from dataclasses import asdict
sys.path.insert(1, {folder!r})
import triton_check
from spark_overlay.attention.kernels.compiled import kernels
found = triton_check.check([86], [{name!r}], 1)
rows = [{{**asdict(one), "faults": one.faults()}} for one in found]
(early,) = (one for one in kernels() if one.name == "gather, early")
print(json.dumps({{"rows": rows, "early": triton_check.build(early, 90).asm["ptx"]}}))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Every kernel for SM86, and the PTX of the gather that starts early, for SM90."""
    code = COMPILED.format(folder=str(ROOT / "overlay/benchmarks"), name="attention.kernels")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    return dict(json.loads(ran.stdout))


def test_they_compile_for_the_smallest_gpu(compiled: dict[str, Any]) -> None:
    """SM86: no fp8 instruction, few spills, at most 99 KB of shared memory. All GPUs:
    overlay/benchmarks/triton_check.py."""
    found = compiled["rows"]
    assert not any(one["faults"] for one in found)
    assert [one["kernel"] for one in found] == ["attend", "reduce", "gather", "combine", "chosen"]


def test_a_gather_that_starts_early_touches_nothing_before_it_has_waited(
    compiled: dict[str, Any],
) -> None:
    found = re.findall(
        r"griddepcontrol\.\w+|\b(?:ld|st|prefetch|cp|red|atom)\.\S*global", compiled["early"]
    )
    assert found[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"], found
    assert found.count("griddepcontrol.wait") == 1 and any(o.startswith("st") for o in found[2:])
