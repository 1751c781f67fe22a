"""Plain torch counterparts of the kernels, on any device: what they are held against."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from spark_overlay.attention.kernels.sparse import Source
from spark_overlay.attention.reference import read_records


def sparse_mla(
    q: Tensor,
    sources: Sequence[Source],
    sink: Tensor,
    scale: float,
    *,
    unrotate: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``kernels.sparse_mla`` in float64, not rounded: ``[T, H, 512]``."""
    keys, valid = [], []
    for source in sources:
        there = source.slots >= 0
        if source.lengths is not None:
            column = torch.arange(source.slots.shape[1], device=q.device)
            there &= column < source.lengths[:, None]
        keys.append(read_records(source.cache, source.slots.where(there, 0).long()))
        keys[-1].masked_fill_(~there[..., None], 0.0)
        valid.append(there)
    kv, there = torch.cat(keys, 1).double(), torch.cat(valid, 1)
    logits = torch.einsum("thd,twd->thw", q.double(), kv) * scale
    logits = logits.masked_fill(~there[:, None], float("-inf"))
    own = sink[: q.shape[1]].double().view(1, -1, 1).expand(q.shape[0], -1, 1)
    weight = torch.softmax(torch.cat((logits, own), -1), -1)[..., :-1].nan_to_num(0.0)
    found = torch.einsum("thw,twd->thd", weight, kv)
    if unrotate is not None:
        table, positions = unrotate
        found[..., -64:] = _turned(found[..., -64:], table, positions[: q.shape[0]].long())
    return found


def _turned(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    cos, sin = table[positions].double()[:, None].chunk(2, -1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)


def chosen_slots(topk: Tensor, block_table: Tensor, request: Tensor, states: int) -> Tensor:
    """``kernels.chosen_slots``: int32 ``[T, K]``."""
    request = request[: topk.shape[0]].long()
    page = topk.long() // states
    there = (topk >= 0) & (page < block_table.shape[1]) & (request >= 0)[:, None]
    block = block_table[request.clamp_min(0)[:, None], page.where(there, 0)]
    there &= block >= 0
    return (block * states + topk % states).where(there, -1).int()


def combine(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    rows: int,
    compressed: int,
) -> tuple[Tensor, Tensor]:
    """``kernels.combine``, a token after the other; lengths of tokens of no request are 0."""
    tokens = topk_indices.shape[0]
    width = -(-(topk + window) // 128) * 128
    combined = topk_indices.new_full((tokens, width), -1)
    lengths = topk_indices.new_zeros(tokens)
    starts = (query_start_loc - query_start_loc[0]).tolist()
    for request, (begin, end) in enumerate(itertools.pairwise(starts)):
        length, gathered = int(seq_lens[request]), int(gather_lens[request])
        for token in range(begin, end):
            position = length - (end - begin) + token - begin
            count = max(min((position + 1) // ratio, topk), 0) if ratio else 0
            first = max(position - window + 1, 0, length - gathered)
            recent = max(position - first + 1, 0)
            chosen = topk_indices[token, :count]
            valid = (chosen >= 0) & (chosen < compressed)
            combined[token, :count] = torch.where(valid, chosen + rows * request, -1)
            at = rows * request + compressed + first - (length - gathered)
            combined[token, count : count + recent] = torch.arange(at, at + recent)
            lengths[token] = count + recent
    return combined, lengths


def gather(
    out: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    offset: int = 0,
) -> None:
    """``kernels.gather``, a request after the other."""
    block = cache.shape[1]
    counts = seq_lens if gather_lens is None else gather_lens
    for request, (length, count) in enumerate(zip(seq_lens.tolist(), counts.tolist(), strict=True)):
        position = torch.arange(length - count, length, device=cache.device)
        page = block_table[request, position // block].long()
        rows = read_records(cache, page * block + position % block)
        out[request, offset : offset + count] = rows.to(out.dtype)
