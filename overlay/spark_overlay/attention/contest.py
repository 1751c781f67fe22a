"""vLLM's sparse MLA for SM12x (FlashInfer) and ours on the same input: are both right, which is
faster.

A rank tries FlashInfer on a small case before it serves with it; ``./start.sh tune`` times both and
records the choice for both ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from spark_overlay.attention.format import HEAD_DIM, RECORD_BYTES
from spark_overlay.attention.kernels import Source, sparse_mla
from spark_overlay.attention.reference import insert_kv, read_records, sparse_attention
from spark_overlay.attention.select import Kind

#: Of the whole output, |found - right| / |right|. FlashInfer multiplies in e4m3; what is broken
#: lies far beyond.
CLOSE: Mapping[Kind, float] = {"portable": 0.01, "stock": 0.05}
#: Ours must be so much faster, over all sizes, to take the place of the default.
GAIN = 0.97
#: Steps of one and two requests with three drafted tokens, and a chunk of a prompt.
SIZES = (1, 4, 8, 512)
WORKSPACE = 128 << 20  # as vLLM has it


@dataclass(frozen=True)
class Case:
    """``q`` bf16 [T, H, 512]; window and chosen records, as a layer of ratio 1 has them."""

    q: Tensor
    sink: Tensor
    window: Source
    chosen: Source

    @property
    def scale(self) -> float:
        return HEAD_DIM**-0.5


def case(device: torch.device, tokens: int, heads: int = 32, width: int = 512) -> Case:
    """Of a model that prefers some records to others; pages of 32 and 64, lengths that differ."""
    made = torch.Generator().manual_seed(tokens)

    def source(page: int, slots: int, lengths: Tensor) -> Source:
        pages = 4 * -(-slots // page)
        records = pages * page
        cache = torch.zeros(pages, page, RECORD_BYTES, dtype=torch.uint8, device=device)
        kv = 2 * torch.randn(records, HEAD_DIM, generator=made).bfloat16()
        table = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), -1).to(device)
        where = torch.arange(records, device=device)
        insert_kv(kv.to(device), cache, where, torch.zeros_like(where), table, page)
        rows = torch.stack([torch.randperm(records, generator=made)[:slots] for _ in range(tokens)])
        absent = torch.arange(slots) >= lengths[:, None]
        rows = rows.masked_fill(absent, -1).int().to(device)
        return Source(cache, rows, lengths.int().to(device))

    near = torch.randint(width // 8, width // 4 + 1, (tokens,), generator=made)
    far = torch.randint(width // 2, width + 1, (tokens,), generator=made)
    q = torch.randn(tokens, heads, HEAD_DIM, generator=made).bfloat16().to(device)
    sink = torch.linspace(-2, 2, heads).to(device)
    return Case(q, sink, source(32, width // 4, near), source(64, width, far))


def right(given: Case) -> Tensor:
    """The torch reference, float32."""
    keys, valid = [], []
    for source in (given.window, given.chosen):
        valid.append(source.slots >= 0)
        keys.append(read_records(source.cache, source.slots.clamp_min(0).long()))
    return sparse_attention(
        given.q, torch.cat(keys, 1), torch.cat(valid, 1), given.sink, given.scale
    )


def portable(given: Case, out: Tensor) -> None:
    sparse_mla(given.q, [given.window, given.chosen], given.sink, given.scale, out)


def stock(given: Case, out: Tensor) -> None:
    """As vLLM's class for SM12x calls it."""
    from vllm.utils.flashinfer import flashinfer_trtllm_batch_decode_sparse_mla_dsv4 as call

    call(
        query=given.q,
        swa_kv_cache=given.window.cache.unsqueeze(-2),
        workspace_buffer=_workspace(given.q.device),
        sparse_indices=given.window.slots.unsqueeze(1),
        compressed_kv_cache=given.chosen.cache.unsqueeze(-2),
        out=out,
        bmm1_scale=given.scale,
        sinks=given.sink,
        kv_layout="NHD",
        swa_topk_lens=given.window.lengths,
        extra_sparse_indices=given.chosen.slots.unsqueeze(1),
        extra_sparse_topk_lens=given.chosen.lengths,
    )


Contender = Callable[[Case, Tensor], None]
CONTENDERS: Mapping[Kind, Contender] = {"portable": portable, "stock": stock}


def fault(kind: Kind, given: Case, call: Contender | None = None) -> str:
    """What is wrong with a contender on a case, in words; empty: nothing."""
    out = torch.full_like(given.q, torch.nan)
    try:
        (call or CONTENDERS[kind])(given, out)
        expected = right(given)
        off = float((out.float() - expected).norm() / expected.norm())
    except Exception as error:  # whatever a library raises, it cannot serve
        return f"{kind} attention cannot compute a small case: {type(error).__name__}: {error}"
    if off <= CLOSE[kind]:
        return ""
    return (
        f"{kind} attention differs from the reference by {off:.3g} of the result; needed is at "
        f"most {CLOSE[kind]}"
    )


def pick(times: Mapping[Kind, Mapping[int, float]]) -> Kind:
    """Of two that are right, by seconds at each size: ours where it is plainly faster overall."""
    mine, theirs = times["portable"], times["stock"]
    ratio = math.prod(mine[size] / theirs[size] for size in mine) ** (1 / len(mine))
    return "portable" if ratio < GAIN else "stock"


def contest(
    device: torch.device, seconds: Callable[[Callable[[], None]], float], say: Callable[[str], None]
) -> Kind:
    """Both on the present GPU; one that is wrong loses. Raises RuntimeError if both are."""
    times: dict[Kind, dict[int, float]] = {"portable": {}, "stock": {}}
    wrong: dict[Kind, str] = {}
    for size in SIZES:
        given = case(device, size)
        out = torch.empty_like(given.q)
        for kind, call in CONTENDERS.items():
            if kind in wrong:
                continue
            if found := fault(kind, given):
                wrong[kind] = found
                say(found)
                continue
            times[kind][size] = seconds(partial(call, given, out))
            say(f"{kind} attention, {size} tokens: {times[kind][size] * 1e6:.1f} us")
    if len(wrong) == len(CONTENDERS):
        raise RuntimeError("; ".join(wrong.values()))
    if wrong:
        return "stock" if "portable" in wrong else "portable"
    return pick(times)


_held: dict[torch.device, Tensor] = {}


def _workspace(device: torch.device) -> Tensor:
    if device not in _held:
        _held[device] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    return _held[device]
