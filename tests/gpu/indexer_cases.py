"""Steps of several requests over a paged index-key cache, and what must be chosen of them.

``exact`` draws are small integers, every sum of which float32 holds: scores tie by the hundred and
the choice must be the reference's, place by place. ``real`` draws are random e4m3: float32 sums in
another order may swap neighbours, so a choice must be as good as the reference's within ``CLOSE``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spark_overlay.indexer.format import KEY_DIM, STATE_BYTES
from spark_overlay.indexer.kernels.launch import Step
from spark_overlay.indexer.reference import candidate_blocks, keep_candidates, top_positions

#: Of a row's sum of |weight| x |score of a head|: what float32 sums of 128 and 32 terms may move.
CLOSE = 2e-6


@dataclass
class Case:
    """``visible [T]``; rows of request ``i`` are ``spans[i]``; ``keys[i] [N, 128]`` float64."""

    q: Tensor
    weights: Tensor
    cache: Tensor
    step: Step
    ratio: int
    rows: int
    visible: Tensor
    spans: list[tuple[int, int]]
    keys: list[Tensor] = field(default_factory=list)


def make(
    requests: Sequence[tuple[int, int]],
    *,
    ratio: int = 1,
    states: int = 64,
    heads: int = 32,
    padding: int = 0,
    gap: int = 0,
    exact: bool = False,
    bound: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """``requests``: (rows, tokens with them) each. ``padding``: rows of no request behind them;
    ``gap``: bytes between pages; ``bound``: what the host says the longest is."""
    draw = torch.Generator(device).manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw, device=device)

    rows = sum(count for count, _ in requests)
    total = rows + padding
    pages = [-(-(length // ratio) // states) for _, length in requests]
    blocks = sum(pages) + 3
    order = torch.randperm(blocks, generator=draw, device=device).int()
    columns = max([*pages, 1]) + 2
    # What lies behind a request's pages is another's, or nothing's.
    table = numbers(-1, blocks, max(len(requests), 1), columns).int()
    stride = states * STATE_BYTES + gap
    storage = torch.full((blocks * stride,), 0xFF, dtype=torch.uint8, device=device)
    cache = storage.as_strided((blocks, states, STATE_BYTES), (stride, STATE_BYTES, 1))
    page = storage.view(blocks, stride)
    case = Case(
        q=_bytes(draw, (max(total, 1), heads, KEY_DIM), exact, 2, device),
        weights=_weights(draw, (max(total, 1), heads), exact, device),
        cache=cache,
        step=Step(
            request=torch.zeros(max(total, 1), dtype=torch.int32, device=device),
            starts=torch.zeros(len(requests) + 1, dtype=torch.int32, device=device),
            lengths=torch.zeros(max(len(requests), 1), dtype=torch.int32, device=device),
            table=table,
            longest=max([count for count, _ in requests], default=1),
            bound=max([length for _, length in requests], default=1) if bound is None else bound,
        ),
        ratio=ratio,
        rows=rows,
        visible=torch.zeros(total, dtype=torch.int64, device=device),
        spans=[],
    )
    used = first = 0
    for index, (count, length) in enumerate(requests):
        last, seen = first + count, length // ratio
        mine = order[used : used + pages[index]]
        table[index, : len(mine)] = mine
        used += len(mine)
        bytes_ = _bytes(draw, (max(seen, 1), KEY_DIM), exact, 1, device)[:seen]
        scale = torch.exp2(numbers(-3, 3, max(seen, 1)).float())[:seen]
        at = torch.arange(seen, device=device)
        row = mine[at // states].long()
        for low in range(0, seen, 1 << 18):  # an index of 128 a key is large
            part = slice(low, low + (1 << 18))
            place = (at[part] % states)[:, None]
            page[row[part, None], place * KEY_DIM + torch.arange(KEY_DIM, device=device)] = bytes_[
                part
            ]
            page[row[part, None], states * KEY_DIM + place * 4 + torch.arange(4, device=device)] = (
                scale[part, None].view(torch.uint8)
            )
        case.keys.append(_value(bytes_) * scale[:, None].double())
        case.step.request[first:last] = index
        case.step.starts[index + 1] = last
        at = torch.arange(length - count, length, device=device)
        case.step.lengths[index] = length
        case.visible[first:last] = (at + 1) // ratio
        case.spans.append((first, last))
        first = last
    return case


def _bytes(
    draw: torch.Generator, shape: tuple[int, ...], exact: bool, most: int, device: str
) -> Tensor:
    if exact:
        value = torch.randint(-most, most + 1, shape, generator=draw, device=device)
        return value.float().to(torch.float8_e4m3fn).view(torch.uint8)
    value = torch.randint(0, 256, shape, generator=draw, device=device, dtype=torch.uint8)
    # No NaN, and few of the largest: a normalised key's values lie about 1.
    value = torch.where((value & 0x7F) == 0x7F, value ^ 0x08, value)
    return torch.where((value & 0x7F) > 0x50, value ^ 0x40, value)


def _weights(draw: torch.Generator, shape: tuple[int, ...], exact: bool, device: str) -> Tensor:
    if exact:
        return torch.randint(-4, 5, shape, generator=draw, device=device).float() / 4
    return torch.randn(shape, generator=draw, device=device)


def _value(byte: Tensor) -> Tensor:
    return byte.view(torch.float8_e4m3fn).float().double()


def scores(case: Case, index: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Float64 ``[rows, N]`` of some rows of a request, -inf where not visible, and how far a
    float32 sum may be from each row's."""
    q = _value(case.q[rows])
    weights = case.weights[rows].double()
    heads = torch.einsum("thd,nd->thn", q, case.keys[index]).relu()
    found = torch.einsum("th,thn->tn", weights, heads)
    slack = torch.einsum("th,thn->tn", weights.abs(), heads)
    slack = torch.cat((slack, slack.new_zeros(slack.shape[0], 1)), -1).amax(-1) * CLOSE
    position = torch.arange(found.shape[1], device=found.device)
    return found.masked_fill(position >= case.visible[rows, None], float("-inf")), slack


def wrong(
    case: Case,
    final: Tensor,
    count: int,
    *,
    exact: bool,
    limit: tuple[Tensor, int] | None = None,
    blocks: tuple[int, int] | None = None,
    at_once: int = 64,
) -> list[str]:
    """What is not right about ``final [T, count]``. ``limit``: (chosen blocks, their size) that the
    choice is confined to; ``blocks``: (count, size), and ``final`` holds blocks."""
    found = []
    if (final[case.rows :] != -1).any():
        found.append("padding has a choice")
    for index, (begin, end) in enumerate(case.spans):
        for first in range(begin, end, at_once):
            rows = slice(first, min(first + at_once, end))
            value, slack = scores(case, index, rows)
            if limit is not None:
                value = keep_candidates(value, limit[0][rows].long(), limit[1])
            if blocks is not None:
                right = candidate_blocks(value, case.visible[rows], *blocks)
                value = _best(value, case.visible[rows], blocks[1])
            elif exact:
                right = top_positions(value, count)
            else:
                right = None
            text = _row_faults(final[rows].long(), value, slack, count, right if exact else None)
            found += [f"rows {rows.start}..{rows.stop}: {text}"] if text else []
    return found


def _best(value: Tensor, visible: Tensor, size: int) -> Tensor:
    tops = -(-value.shape[1] // size)
    padded = torch.nn.functional.pad(value, (0, tops * size - value.shape[1]), value=float("-inf"))
    best = padded.view(value.shape[0], tops, size).amax(-1)
    seen = (visible > 0).nonzero()[:, 0]
    best[seen, (visible[seen] - 1) // size] = float("inf")
    return best


def _row_faults(
    final: Tensor, value: Tensor, slack: Tensor, count: int, right: Tensor | None
) -> str:
    there = final >= 0
    wanted = (value > float("-inf")).sum(-1).clamp_max(count)
    if (there.sum(-1) != wanted).any():
        return f"{there.sum(-1).tolist()[:8]} chosen, not {wanted.tolist()[:8]}"
    if (there[:, 1:] & ~there[:, :-1]).any():
        return "padding before a choice"
    if ((final[:, 1:] <= final[:, :-1]) & there[:, 1:]).any():
        return "not ascending"
    if not value.shape[1] or not there.any():
        return ""
    if (final >= value.shape[1]).any():
        return "a position that is not there"
    if right is not None:
        large = torch.iinfo(torch.int32).max
        ordered = torch.where(right >= 0, right.long(), large).sort(-1).values
        if not torch.equal(ordered, torch.where(there, final, large)):
            return "not the reference's choice"
        return ""
    picked = value.gather(1, final.clamp_min(0))
    lowest = torch.where(there, picked, float("inf")).amin(-1)
    best = value.topk(min(count, value.shape[1]), -1).values
    kth = best.gather(1, (wanted - 1).clamp_min(0)[:, None])[:, 0]
    bad = (wanted > 0) & (lowest < kth - slack)
    return f"chosen {lowest[bad][:3].tolist()} below {kth[bad][:3].tolist()}" if bad.any() else ""
