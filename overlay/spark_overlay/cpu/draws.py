"""vLLM's draw of the next token, all rows at once in torch, and a grammar's mask before it.

The noise is counter-based (murmur3 of seed, position and token), so a draft and its verification
draw alike; integers equal the kernel's, the noise its float32 within a rounding
(tests/rehearsal/test_batches.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spark_overlay.cpu.launches import Launch

_LOW = 0xFFFFFFFF
_SECOND = 0x9E3779B9  # domain of the other half of a 64-bit draw


@Launch
def gumbel_sample(
    local_argmax: Tensor,
    local_argmax_stride: int,
    local_max: Tensor,
    local_max_stride: int,
    logits_cache: Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col: Tensor | None,
    logits_cache_source: Tensor | None,
    logits_cache_source_stride: int,
    logits: Tensor,
    logits_stride: int,
    expanded_idx_mapping: Tensor,
    seeds: Tensor,
    pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    **_: Any,
) -> None:
    """The largest noised logit of each block of a row, and its token: ``local_max`` float and
    ``local_argmax`` int64 [tokens, blocks]. No noise where the temperature is 0."""
    from vllm.v1.worker.gpu.sample import gumbel

    state = expanded_idx_mapping.long()
    there = state >= 0
    row = state.clamp(min=0)
    warmth = temp[row].float().where(there, 0.0)
    seed, place = seeds[row].long().where(there, 0), pos.long()
    if logits_cache is not None and logits_cache_col is not None:
        column = logits_cache_col.long().reshape(-1).expand(len(state))
        source = logits_cache_source[:, :vocab_size]  # type: ignore[index]
        logits_cache[row[there], column[there], :vocab_size] = source[there]
        if hasattr(gumbel, "spec_step_seed"):  # from 0.33 on: each step of a draft its own stream
            seed = seed ^ (column << 32)
    values = logits[:, :vocab_size].float()
    hot = warmth != 0
    if APPLY_TEMPERATURE:
        values = values / warmth.where(hot, 1.0)[:, None]
    if USE_FP64:
        values = values.double()
    if hot.any():
        if IS_DRAFTING:
            place = place + int(gumbel._DRAFT_NOISE_SALT.value)
        draw = _noise64 if USE_FP64 else _noise32
        noise = draw(seed[:, None], place[:, None], torch.arange(vocab_size)[None])
        values = torch.where(hot[:, None], values + noise, values)
    blocks = local_max.shape[1]
    padding = blocks * BLOCK_SIZE - vocab_size
    padded = torch.nn.functional.pad(values, (0, padding), value=float("-inf"))
    padded = padded.view(len(values), blocks, BLOCK_SIZE)
    best = padded.argmax(-1)  # the first of equals
    local_max.copy_(padded.gather(-1, best[..., None])[..., 0])
    local_argmax.copy_(best + torch.arange(blocks) * BLOCK_SIZE)


@Launch
def apply_grammar_bitmask(
    logits: Tensor,
    logits_stride: int,
    logits_indices: Tensor,
    cu_num_logits: Tensor,
    bitmask: Tensor,
    bitmask_stride: int,
    vocab_size: int,
    *,
    MASK_STRIDE: int,
    **_: Any,
) -> None:
    """-inf where a grammar's bit is 0: ``bitmask`` int32 [masks, vocabulary / 32], each of one
    position of a request; positions that are not verified are passed over."""
    starts, bits = cu_num_logits.tolist(), torch.arange(32)
    for mask, place in zip(bitmask, logits_indices.tolist(), strict=False):
        request, position = divmod(place, MASK_STRIDE)
        row = starts[request] + position
        if row < starts[request + 1]:
            barred = (mask[:, None] >> bits & 1).reshape(-1)[:vocab_size] == 0
            logits[row, : len(barred)].masked_fill_(barred, float("-inf"))


def _noise32(seed: Tensor, pos: Tensor, token: Tensor) -> Tensor:
    bits = hash32(seed, pos, token)
    uniform = (bits >> 16).float() * 2.0**-16 + ((bits & 0xFFFF).float() + 0.5) * 2.0**-32
    # log(1 - u): its series near 0, where the draws that win lie.
    series = torch.full_like(uniform, 1 / 8)
    for n in range(7, 0, -1):
        series = 1 / n + uniform * series
    direct = (1.0 - uniform).clamp(min=2.0**-24).log()
    return -(-torch.where(uniform < 0.25, -uniform * series, direct)).log()


def _noise64(seed: Tensor, pos: Tensor, token: Tensor) -> Tensor:
    low, high = hash32(seed, pos, token), hash32(seed, pos, token, _SECOND)
    bits = ((high << 32) | low) >> 11 & ((1 << 53) - 1)
    uniform = (bits.double() + 0.5) * 2.0**-53
    uniform = torch.where(uniform == 1.0, uniform - 2.0**-53, uniform)
    return -(-uniform.log()).log()


def hash32(seed: Tensor, pos: Tensor, token: Tensor, domain: int = 0) -> Tensor:
    """murmur3 (x86, 32 bits) of seed, position and token as four words, int64 in 0..2^32 - 1.
    ``seed`` and ``pos`` int64 and ``token`` broadcast against each other."""
    found = torch.full_like(seed, domain)
    for word in (seed & _LOW, (seed >> 32) & _LOW, pos & _LOW, token & _LOW):
        mixed = _turn(word * 0xCC9E2D51 & _LOW, 15) * 0x1B873593 & _LOW
        found = (_turn(found ^ mixed, 13) * 5 + 0xE6546B64) & _LOW
    found = found ^ 16  # bytes hashed
    found = (found ^ found >> 16) * 0x85EBCA6B & _LOW
    found = (found ^ found >> 13) * 0xC2B2AE35 & _LOW
    return found ^ found >> 16


def _turn(word: Tensor, by: int) -> Tensor:
    return (word << by | word >> (32 - by)) & _LOW
