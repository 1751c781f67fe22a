"""Stand-ins for vLLM's small kernels around the model, all rows at once in torch.

Under Triton's interpreter they took two thirds of a rehearsal's time. All but the log-probabilities
are integer arithmetic: every element equals the kernel's (tests/rehearsal/test_launches.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Launch:
    """Called as a Triton kernel is: ``kernel[grid](...)``. Tensors carry their own strides."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


def compute_swa_indices_and_lens(
    self: Any,
    swa_indices: Tensor,
    swa_lens: Tensor,
    window_size: int,
    index_width: int,
    left_visible: Tensor,
    right_visible: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    token_to_req_indices: Tensor,
    is_valid_token: Tensor,
    block_table: Tensor,
    block_size: int,
    replay_start: Tensor,
    *,
    num_tokens: int,
    token_offset: int,
    has_image: bool = False,
) -> None:
    """Slots of the cache that each token's window sees.

    ``swa_indices`` [tokens, (1,) >= index_width] and ``swa_lens`` [tokens], int32, are written: -1
    behind a window's end and in the rows of tokens that are padding, whose length is 0.
    """
    if self._warming or num_tokens == 0:
        return  # there is nothing to compile
    token = torch.arange(token_offset, token_offset + num_tokens)
    valid = is_valid_token[token].bool()
    request = token_to_req_indices[token].long().where(valid, 0)
    start = query_start_loc[request].long()
    length = query_start_loc[request + 1].long() - start
    position = seq_lens[request].long() - length + token - start
    left = left_visible[token].long() if has_image else torch.zeros_like(token)
    right = right_visible[token].long() if has_image else torch.zeros_like(token)
    first = position - (window_size - 1) - (left - (window_size - 1)).clamp(min=0)
    first = torch.maximum(first.clamp(min=0), replay_start[request].long())
    seen = (position + right + 1 - first).where(valid, 0)
    offset = torch.arange(index_width)
    inside = offset < seen[:, None]
    at = (first[:, None] + offset).where(inside, 0)
    slot = block_table[request[:, None], at // block_size].long() * block_size + at % block_size
    swa_lens[:num_tokens] = seen.to(swa_lens.dtype)
    rows = swa_indices.view(len(swa_indices), -1)
    rows[:num_tokens, :index_width] = slot.where(inside, -1).to(rows.dtype)


@Launch
def hash_ids(
    input_ids: Tensor,
    token_map: Tensor,
    dead_mask: Tensor,
    positions: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    cache: Tensor | None,
    lookback_token_ids: Tensor,
    lookback_dead_mask: Tensor,
    output: Tensor,
    num_tokens: int,
    num_slots: int,
    pad_id: int,
    *,
    MAX_NGRAM: int,
    dead_id: int,
    lookback_depth: int,
    **_: Any,
) -> None:
    """Ids of the n-grams that end at each token: ``output`` [tokens, layers, (n - 1) heads] int32.

    What precedes a chunk comes from ``lookback_token_ids`` [requests, depth], whose column 0 is the
    token just before it; what is not known there counts as padding.
    """
    if cache is not None:
        raise NotImplementedError(
            "the slot cache is of vLLM's first runner, which no CPU here uses"
        )
    token = torch.arange(num_tokens)
    rows = query_start_loc.numel() - 1
    request = torch.searchsorted(query_start_loc[1:].contiguous(), token, right=True)
    request = request.clamp(max=rows - 1)
    begin = query_start_loc[request].long().clamp(max=num_tokens - 1)
    chunk, position = positions[begin].long(), positions[token].long()
    blocked = torch.zeros(num_tokens, dtype=torch.bool)
    rolling = torch.zeros(num_tokens, multipliers.shape[0], dtype=torch.int64)
    sizes, begins = (
        each.reshape(len(multipliers), MAX_NGRAM - 1, -1) for each in (primes, offsets)
    )
    hashed = output.reshape(num_tokens, len(multipliers), MAX_NGRAM - 1, -1)
    for shift in range(MAX_NGRAM):
        back = position - shift
        in_batch = back >= chunk
        source = _mapped(
            input_ids, dead_mask, ((token - shift).clamp(min=0),), in_batch, token_map, dead_id
        )
        column = chunk - 1 - back
        known = ~in_batch & (column >= 0) & (column < lookback_depth)
        at = (request, column.clamp(0, lookback_depth - 1))
        known &= lookback_token_ids[at] >= 0
        before = _mapped(lookback_token_ids, lookback_dead_mask, at, known, token_map, dead_id)
        source = source.where(in_batch, before.where(known, pad_id))
        blocked |= (back < 0) | (source == dead_id)
        rolling ^= source.where(~blocked, pad_id)[:, None] * multipliers[:, shift]
        if shift:
            prime, offset = sizes[:, shift - 1].long(), begins[:, shift - 1].long()
            # As in C, and so on a GPU: the remainder has the sign of what is divided.
            hashed[:, :, shift - 1] = (rolling[..., None].fmod(prime) + offset).to(output.dtype)


def _mapped(
    ids: Tensor,
    dead: Tensor,
    at: tuple[Tensor, ...],
    there: Tensor,
    token_map: Tensor,
    dead_id: int,
) -> Tensor:
    """Compressed ids of the tokens that are there, the dead ones marked."""
    found = token_map[ids[at].long().where(there, 0)].long()
    return found.where(~dead[at].bool(), dead_id)


def prepare_dflash_inputs(
    input_buffers: Any,
    query_slot_mapping: Tensor,
    context_positions: Tensor,
    context_slot_mapping: Tensor,
    sample_indices: Tensor,
    sample_pos: Tensor,
    sample_idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    input_batch: Any,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    input_temperature: Tensor,
    input_seeds: Tensor,
    block_table: Tensor,
    block_size: int,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
    parallel_drafting_token_id: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    sample_from_anchor: bool = False,
    num_reqs_override: int | None = None,  # from 0.33 on
) -> None:
    """The draft's batch: of each request the target's context rows and its query rows, which are
    the last sampled token and the masks that are to be predicted. Block 0 is never written."""
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    if cp_size != 1:
        raise NotImplementedError("context parallelism does not run on a CPU")
    count = input_batch.num_reqs if num_reqs_override is None else num_reqs_override
    width, kernel = num_query_per_req, speculator._prepare_dflash_inputs_kernel
    marks_padding = "out_is_padding_ptr" in _arguments(kernel)  # from 0.33 on
    targets, starts = input_batch.positions, input_batch.query_start_loc.tolist()
    masks, skip = torch.arange(width), 0 if sample_from_anchor else 1

    def slots(request: int, position: Tensor) -> Tensor:
        block = (position // block_size).clamp(max=block_table.stride(0) - 1)
        number = block_table[request, block].long()
        return (number * block_size + position % block_size).where(number != 0, PAD_SLOT_ID)

    for request in range(count):
        state = int(input_batch.idx_mapping[request])
        first, end = starts[request], starts[request + 1]
        kept = end - int(num_rejected[request])
        context = targets[first:kept].long()
        context_positions[first:kept] = context.to(context_positions.dtype)
        context_slot_mapping[first:kept] = slots(request, context)
        context_positions[kept:end] = 0
        context_slot_mapping[kept:end] = PAD_SLOT_ID
        sampled = last_sampled if int(num_sampled[request]) > 0 else next_prefill_tokens
        base, last = request * width, int(targets[kept - 1])
        query = slice(base, base + width)
        position = last + 1 + masks
        input_buffers.input_ids[query] = parallel_drafting_token_id
        input_buffers.input_ids[base] = sampled.reshape(-1)[state]
        input_buffers.positions[query] = position.clamp(max=max_model_len - 1)
        query_slot_mapping[query] = slots(request, position)
        into = slice(
            request * num_speculative_steps, request * num_speculative_steps + width - skip
        )
        sample_indices[into] = base + masks[skip:]
        sample_pos[into] = position[skip:] + (1 - skip)
        sample_idx_mapping[into] = state
        input_buffers.query_start_loc[request] = base
        input_buffers.seq_lens[request] = min(last + 1 + width, max_model_len)
        temperature[state], seeds[state] = input_temperature[state], input_seeds[state]
    # A captured graph replays for more requests than there are.
    input_buffers.query_start_loc[count : max_num_reqs + 1] = count * width
    input_buffers.seq_lens[count:max_num_reqs] = 0
    padding = slice(count * num_speculative_steps, max_num_reqs * num_speculative_steps)
    sample_indices[padding] = 0
    sample_pos[padding] = 0
    sample_idx_mapping[padding] = -1
    unused = slice(count * width, max_num_tokens)
    query_slot_mapping[unused] = PAD_SLOT_ID
    if marks_padding:
        input_buffers.is_padding[: count * width] = False
        input_buffers.is_padding[unused] = True
        input_buffers.input_ids[unused] = 0
        input_buffers.positions[unused] = 0


def _arguments(kernel: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(kernel, "fn", kernel)).parameters)


def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """``logits`` [rows, vocabulary] to the float32 log-probabilities of ``token_ids`` [rows, n]."""
    values = logits.float()
    most = values.amax(-1, keepdim=True)
    total = (values - most).exp().sum(-1, keepdim=True).log()
    return values.gather(-1, token_ids.long()) - most - total


class _Ranks:
    """Called as a Triton kernel is: how many logits of a row are not below the token's."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(
            output: Tensor, logits: Tensor, stride: int, token_ids: Tensor, *_: Any, **__: Any
        ) -> None:
            rows = grid[0]
            own = logits[:rows].gather(-1, token_ids[:rows, None].long())
            output[:rows] = (logits[:rows] >= own).sum(-1)

        return launch


token_ranks = _Ranks()
