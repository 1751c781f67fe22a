"""Stand-ins for the kernels by which vLLM keeps a batch's books, all rows at once in torch.

Each is a launch a step and a program a row, and under Triton's interpreter they were half of a
rank's time. Integers equal the kernels' (tests/rehearsal/test_batches.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spark_overlay.cpu.launches import Launch


def gather_block_tables(
    self: Any,
    idx_mapping: Tensor,
    num_reqs_padded: int,
    out: tuple[Tensor, ...] | None = None,
    out_ptrs: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,  # from 0.33 on
) -> tuple[Tensor, ...]:
    """The batch's rows of every cache group's table, int32 [padded requests, blocks] each. Rows of
    padding are zero; so is, from 0.33 on, what lies below a window that nobody reads any more."""
    if self.num_kv_cache_groups == 0:
        return ()
    count = len(idx_mapping)
    rows, reaches = num_reqs_padded, getattr(self, "_sliding_window_reach", None)
    if out is None:
        out = tuple(self.input_block_tables)
        if hasattr(self, "_num_dirty_rows"):  # from 0.33 on
            rows = max(rows, self._num_dirty_rows)
            self._num_dirty_rows = count
    states = idx_mapping.tolist()
    done = num_computed_tokens.tolist() if num_computed_tokens is not None else None
    for group, into in enumerate(out):
        table, held = self.block_tables[group].gpu, self.num_blocks.np[group]
        reach = reaches[group] if done is not None and reaches else 0
        for row, state in enumerate(states):
            blocks = int(held[state])
            into[row, :blocks] = table[state, :blocks]
            if reach > 0 and done is not None:
                unread = max(done[state] - reach, 0) // int(self.block_sizes[group])
                into[row, : min(unread, blocks)] = 0
        into[count:rows] = 0
    return tuple(each[:num_reqs_padded] for each in out)


def compute_slot_mappings(
    self: Any,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    num_tokens_padded: int,
    out: Tensor | None = None,
) -> Tensor:
    """int64 [groups, padded tokens]: where each token is written in each group's cache; -1 for
    padding, for requests without a state and in groups that map nothing."""
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID

    if self.cp_size != 1:
        raise NotImplementedError("context parallelism does not run on a CPU")
    slots = self.slot_mappings if out is None else out
    if self.num_kv_cache_groups == 0:
        return slots[:, :num_tokens_padded]
    count = len(idx_mapping)
    starts = query_start_loc[: count + 1].long()
    total = int(starts[-1])
    slots[:, total:] = PAD_SLOT_ID
    state = idx_mapping.long().repeat_interleave(starts.diff())
    token = slice(int(starts[0]), total)
    position, real = positions[token].long(), state >= 0
    for group, size in enumerate(self.block_sizes):
        if not self._slot_mapping_enabled[group]:
            slots[group, token] = PAD_SLOT_ID
            continue
        table = self.block_tables[group].gpu
        block = (position // size).where(real, 0)  # a dummy may stand behind the table's end
        found = table[state.clamp(min=0), block].long() * size + position % size
        slots[group, token] = found.where(real, PAD_SLOT_ID)
    return slots[:, :num_tokens_padded]


def apply_write(self: Any) -> None:
    """What was staged for a table's rows is written to them."""
    first = 0
    for index, start, end in zip(
        self._staged_write_indices,
        self._staged_write_starts,
        self._staged_write_cu_lens,
        strict=True,
    ):
        content = torch.tensor(self._staged_write_contents[first:end], dtype=self.gpu.dtype)
        row = self.gpu[index] if self.gpu.dim() > 1 else self.gpu[index : index + 1]
        row[start : start + end - first] = content
        first = end
    self.clear_staged_writes()


def apply_writes(
    self: Any, tensors: Sequence[Any], output_ptrs: Tensor, output_strides: Tensor
) -> None:
    """The same of several tables."""
    for each in tensors:
        apply_write(each)


@Launch
def prepare_pos_seq_lens(
    pos: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Position of each token, length of each sequence; 0 behind the last request."""
    count = len(idx_mapping)
    starts = query_start_loc[: count + 1].long()
    computed = num_computed_tokens[idx_mapping.long()].long()
    lengths = starts.diff()
    seq_lens[:count] = (computed + lengths).to(seq_lens.dtype)
    seq_lens[count:] = 0
    first, end = int(starts[0]), int(starts[-1])
    shift = (computed - starts[:-1]).repeat_interleave(lengths)
    pos[first:end] = (torch.arange(first, end) + shift).to(pos.dtype)


@Launch
def combine_sampled_and_draft_tokens(
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled_tokens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_len: Tensor,
    draft_tokens: Tensor,
    draft_tokens_stride: int,
    cu_num_logits: Tensor,
    logits_indices: Tensor,
    *,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_: Any,
) -> None:
    """Which rows want logits; the last sampled token and the draft's become inputs."""
    logits, starts = cu_num_logits.tolist(), query_start_loc.tolist()
    for request, state in enumerate(idx_mapping.tolist()):
        wanted, end = logits[request + 1] - logits[request], starts[request + 1]
        first, drafted = end - wanted, wanted - NUM_NEW_SAMPLED_TOKENS
        logits_indices[logits[request] : logits[request + 1]] = torch.arange(first, end)
        length, prefill = int(seq_lens[request]), int(prefill_len[state])
        if length <= prefill:
            continue  # nothing was sampled yet
        if NUM_NEW_SAMPLED_TOKENS > 0 and length - wanted >= prefill:
            input_ids[first] = last_sampled_tokens.reshape(-1)[state]
        if drafted > 0:
            input_ids[end - drafted : end] = draft_tokens[state, :drafted]


@Launch
def prepare_prefill_inputs(
    input_ids: Tensor,
    next_prefill_tokens: Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    prefill_lens: Tensor,
    num_computed_tokens: Tensor,
    **_: Any,
) -> None:
    """A prompt's next tokens, and those that follow them: 0 behind the prompt's end."""
    starts = query_start_loc.tolist()
    for request, state in enumerate(idx_mapping.tolist()):
        prefill, computed = int(prefill_lens[state]), int(num_computed_tokens[state])
        if computed >= prefill:
            continue
        begin, end = starts[request], starts[request + 1]
        upto = computed + end - begin
        input_ids[begin:end] = all_token_ids[state, computed:upto]
        known = all_token_ids[state, upto : min(upto + num_lookahead, max(prefill, upto))]
        next_prefill_tokens[:, state] = 0
        next_prefill_tokens[: len(known), state] = known.to(next_prefill_tokens.dtype)


def compressed_slot_mapping(
    self: Any,
    compressed_slot_mapping: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    compress_ratio: int,
    dcp_world_size: int,
    cp_interleave: int,
) -> None:
    """Slot of the state that a group's last token writes, int64 [tokens]; -1 for the others and for
    tokens that have no slot themselves."""
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID

    if dcp_world_size != 1:
        raise NotImplementedError("context parallelism does not run on a CPU")
    if getattr(self, "_warming", False):
        return  # there is nothing to compile
    count = len(block_table)
    starts = query_start_loc[: count + 1].long()
    lengths = starts.diff().clamp(min=0)
    first, end = int(starts[0]), int(starts[0] + lengths.sum())
    request = torch.arange(count).repeat_interleave(lengths)
    token = torch.arange(first, end)
    position = token + (seq_lens[:count].long() - starts[1:])[request]
    writes = (position + 1) % compress_ratio == 0
    writes &= slot_mapping[first:end] != PAD_SLOT_ID
    state = (position.clamp(min=0) // compress_ratio).where(writes, 0)
    slot = block_table[request, state // block_size].long() * block_size + state % block_size
    compressed_slot_mapping[first:end] = slot.where(writes, PAD_SLOT_ID)


@Launch
def token_request_mapping(
    query_start_loc: Tensor,
    output: Tensor,
    num_reqs: int,
    num_mapped: int,
    num_tokens: int,
    **_: Any,
) -> None:
    """Request of each token, the last one behind their end; 0 for what is not mapped."""
    token = torch.arange(num_tokens)
    ends = query_start_loc[1 : num_reqs + 1].long().contiguous()
    request = torch.searchsorted(ends, token, right=True).clamp(max=num_reqs - 1)
    output[:num_tokens] = request.where(token < num_mapped, 0).to(output.dtype)


@Launch
def gather_lookback(
    lookback: Tensor, idx_mapping: Tensor, *told: Any, DEPTH: int, **_: Any
) -> None:
    """int32 [rows, DEPTH]: the tokens before each request's chunk, the nearest first; -1 where
    there is none. The chunk's place is told by computed tokens, from 0.33 on by positions."""
    *where, all_token_ids, _, count = told
    lookback.fill_(-1)
    for row, state in enumerate(idx_mapping[:count].tolist()):
        if len(where) == 1:
            computed = int(where[0][state])
        else:
            starts, positions = where
            begin, end = starts[row : row + 2].tolist()
            if end <= begin:
                continue
            computed = int(positions[begin])
        known = all_token_ids[state, max(computed - DEPTH, 0) : max(computed, 0)].flip(0)
        lookback[row, : len(known)] = known


@Launch
def post_update(
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens: Tensor,
    sampled_tokens_stride: int,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    total_len: Tensor,
    draft_tokens: Tensor | None = None,  # from 0.33 on
    draft_tokens_out: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """What a step sampled joins each request's tokens; what it computed and kept is counted."""
    kept, rejected = num_sampled.tolist(), num_rejected.tolist()
    starts = query_start_loc.tolist() if query_start_loc is not None else None
    for row, state in enumerate(idx_mapping.tolist()):
        if state < 0:
            continue
        if draft_tokens is not None and draft_tokens_out is not None:
            draft_tokens_out[state] = draft_tokens[row]
        count, length = kept[row], int(total_len[state])
        if count > 0:
            tokens = sampled_tokens[row, :count]
            last_sampled_tokens.reshape(-1)[state] = tokens[-1]
            total_len[state] = length + count
            all_token_ids[state, length : length + count] = tokens.to(all_token_ids.dtype)
            if output_bin_counts is not None:
                for token in tokens.tolist():
                    output_bin_counts[state, token] += 1
        computed = starts[row + 1] - starts[row] if starts is not None else 0
        num_computed_tokens[state] += computed - rejected[row]
