"""vLLM's bookkeeping kernels under Triton's interpreter against our torch, and its draws.

Not one integer differs; noise is float32 and may differ in a rounding.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]

SEEDS = range(2)
STATES, BLOCKS, TOKENS = 6, 9, 64


def ints(values: Any) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def starts(lengths: Any) -> Tensor:
    return ints([0, *np.cumsum(lengths)])


def filled(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, 99, dtype=dtype)


def both(theirs: Any, mine: Any, *arguments: Any) -> list[list[Any]]:
    """What either makes of its own copies of the same arguments."""
    found = []
    for function in (theirs, mine):
        copies = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        found.append([function(*copies), *copies])
    return found


def assert_equal(theirs: list[Any], mine: list[Any]) -> None:
    for one, other in zip(theirs, mine, strict=True):
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.fixture(scope="module")
def book(vllm: ModuleType) -> ModuleType:
    from vllm.v1.worker.gpu import input_batch

    return input_batch


def replaced(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, mine: Any) -> Any:
    """The module's function, with our kernel in the place of its."""
    function = getattr(module, name)

    def call(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(module, f"_{name}_kernel", mine)
            return function(*arguments)

    return call


@pytest.mark.parametrize("seed", SEEDS)
def test_positions_and_lengths(
    book: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    from spark_overlay.cpu.batches import prepare_pos_seq_lens

    rng = np.random.default_rng(seed)
    mine = replaced(monkeypatch, book, "prepare_pos_seq_lens", prepare_pos_seq_lens)
    lengths = rng.integers(1, 9, 3)
    theirs, ours = both(
        book.prepare_pos_seq_lens, mine, ints(rng.permutation(STATES)[:3]), starts(lengths),
        ints(rng.integers(0, 50, STATES)), filled(TOKENS, dtype=torch.int64), filled(STATES),
    )  # fmt: skip
    assert_equal(theirs, ours)
    positions, kept = ours[-2], int(lengths.sum())
    assert (positions[kept:] == 99).all() and (ours[-1][3:] == 0).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("drafted", [0, 3])
def test_sampled_and_drafted_tokens(
    book: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int, drafted: int
) -> None:
    from spark_overlay.cpu.batches import combine_sampled_and_draft_tokens as combine

    rng = np.random.default_rng(seed)
    mine = replaced(monkeypatch, book, "combine_sampled_and_draft_tokens", combine)
    # A prompt's chunk, its end, a reply; a verification if something was drafted.
    lengths, wanted = np.array([6, 5, 1, 1 + drafted]), np.array([1, 1, 1, 1 + drafted])
    state = rng.permutation(STATES)[:4]
    computed, prefill = rng.integers(0, 9, 4), np.zeros(STATES)
    prefill[state] = computed + np.array([9, 5, 0, -1])
    arguments = (
        filled(TOKENS), ints(state), torch.tensor(rng.integers(100, 199, (STATES, 1))),
        starts(lengths), ints(computed + lengths), ints(prefill),
        torch.tensor(rng.integers(200, 299, (STATES, max(drafted, 1)))), starts(wanted),
        int(wanted.sum()),
    )  # fmt: skip
    theirs, ours = both(book.combine_sampled_and_draft_tokens, mine, *arguments)
    assert_equal(theirs, ours)
    assert (ours[1] != 99).sum() == 2 + drafted


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", [1, 5])
def test_a_prompts_tokens_and_those_ahead(
    book: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int, ahead: int
) -> None:
    from spark_overlay.cpu.batches import prepare_prefill_inputs

    rng = np.random.default_rng(seed)
    mine = replaced(monkeypatch, book, "prepare_prefill_inputs", prepare_prefill_inputs)
    lengths, state = np.array([7, 4, 1]), rng.permutation(STATES)[:3]
    computed, prefill = rng.integers(0, 9, STATES), np.zeros(STATES)
    prefill[state] = computed[state] + [9, 4, 0]  # amid a prompt, at its end, behind it
    arguments = (
        filled(TOKENS), filled(ahead, STATES), ints(state), starts(lengths),
        ints(rng.integers(100, 999, (STATES, 32))), ints(prefill), ints(computed),
    )  # fmt: skip
    theirs, ours = both(book.prepare_prefill_inputs, mine, *arguments)
    assert_equal(theirs, ours)
    assert (ours[1] != 99).sum() == 11 and (ours[2] == 0).any() and (ours[2] > 99).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_of_tokens(vllm: ModuleType, seed: int) -> None:
    from vllm.v1.attention.ops.metadata import _token_request_mapping_kernel as kernel

    from spark_overlay.cpu.batches import token_request_mapping

    lengths = np.random.default_rng(seed).integers(1, 9, 4)
    mapped, tokens = int(lengths.sum()) - 1, int(lengths.sum()) + 7
    found = []
    for each in (kernel, token_request_mapping):
        out = filled(TOKENS)
        each[(1,)](starts(lengths), out, 4, mapped, tokens, num_warps=4)
        found.append(out)
    assert torch.equal(*found) and len(found[1].unique()) == 5  # four requests, and what was there


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_before_a_chunk(vllm: ModuleType, seed: int) -> None:
    from vllm.models.deepseek_v41.nvidia.model_state import _gather_lookback_kernel as kernel

    from spark_overlay.cpu.batches import gather_lookback

    rng = np.random.default_rng(seed)
    state, computed = rng.permutation(STATES)[:3], np.array([0, 2, 9])
    positions = np.concatenate([at + np.arange(4) for at in computed])
    by_state = np.zeros(STATES)
    by_state[state] = computed
    takes = inspect.signature(getattr(kernel, "fn", kernel)).parameters
    told = [starts([4, 4, 4]), torch.tensor(positions)]
    if "num_computed_tokens_ptr" in takes:
        told = [ints(by_state)]
    tokens, found = ints(rng.integers(100, 999, (STATES, 32))), []
    for each in (kernel, gather_lookback):
        out = filled(5, 3)
        each[(5,)](out, ints(state), *told, tokens, 32, 3, DEPTH=3, BLOCK_DEPTH=4)
        found.append(out)
    assert torch.equal(*found)
    assert (found[1] > 0).sum(1).tolist() == [0, 2, 3, 0, 0] and (found[1] != 99).all()


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_step_leaves(
    book: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int, counted: bool
) -> None:
    from spark_overlay.cpu.batches import post_update

    rng = np.random.default_rng(seed)
    mine = replaced(monkeypatch, book, "post_update", post_update)
    state = rng.permutation(STATES)[:4]
    state[3] = -1
    drafts: list[Tensor] = []
    if "draft_tokens" in inspect.signature(book.post_update).parameters:
        drafts = [ints(rng.integers(0, 9, (4, 3))), filled(STATES, 3)]
    arguments = (
        ints(state), ints(rng.integers(0, 9, STATES)), filled(STATES, 1, dtype=torch.int64),
        torch.zeros(STATES, 20, dtype=torch.int32) if counted else None,
        torch.tensor(rng.integers(0, 20, (4, 4))), ints([0, 1, 4, 2]), ints([0, 3, 0, 1]),
        starts([5, 4, 4, 3]) if counted else None, filled(STATES, 32),
        ints(rng.integers(0, 20, STATES)), *drafts,
    )  # fmt: skip
    theirs, ours = both(book.post_update, mine, *arguments)
    assert_equal(theirs, ours)
    assert (ours[9] != 99).sum() == 5 and (not counted or ours[4].sum() == 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_grammars_mask(vllm: ModuleType, seed: int) -> None:
    from vllm.v1.worker.gpu.structured_outputs import _apply_grammar_bitmask_kernel as kernel

    from spark_overlay.cpu.draws import apply_grammar_bitmask

    rng = np.random.default_rng(seed)
    vocabulary, stride = 500, 4
    masks = ints(rng.integers(-(1 << 31), 1 << 31, (5, 16)))
    # Of the first request all four positions, of which two are verified; of the third its first.
    places, verified = ints([0, 1, 2, 3, 8]), starts([2, 1, 3])
    given, found = torch.tensor(rng.standard_normal((6, vocabulary)), dtype=torch.float32), []
    for each in (kernel, apply_grammar_bitmask):
        logits = given.clone()
        each[(5, 1)](
            logits, vocabulary, places, verified, masks, 16, vocabulary,
            MASK_STRIDE=stride, BLOCK_SIZE=512,
        )  # fmt: skip
        found.append(logits)
    assert torch.equal(*found)
    assert found[1].isneginf().any(1).tolist() == [True, True, False, True, False, False]


@pytest.fixture
def unpinned(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM finds on a CPU; this process has not asked the platform yet."""
    from vllm.v1.worker.gpu import buffer_utils

    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


def tables(rng: np.random.Generator) -> Any:
    """vLLM's tables of three cache groups, the last of which maps no slots."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    held = rng.integers(1, BLOCKS, (3, STATES))
    made = BlockTables(
        block_sizes=[4, 2, 8], max_num_reqs=STATES, max_num_batched_tokens=TOKENS,
        max_num_blocks_per_group=[BLOCKS] * 3, device=torch.device("cpu"),
        slot_mapping_enabled=[True, True, False],
    )  # fmt: skip
    for state in range(STATES):
        ids = tuple(rng.integers(1, 99, n).tolist() for n in held[:, state])
        made.append_block_ids(state, ids, overwrite=True)
    return made


def content(made: Any) -> list[Tensor]:
    return [
        *(t.gpu.clone() for t in made.block_tables),
        *(t.clone() for t in made.input_block_tables),
    ]


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("seed", SEEDS)
def test_block_tables(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    from vllm.v1.worker.gpu import block_table, buffer_utils

    from spark_overlay.cpu import batches

    found = []
    for ours in (False, True):
        with monkeypatch.context() as patch:
            if ours:
                for owner, name, mine in (
                    (block_table.BlockTables, "gather_block_tables", batches.gather_block_tables),
                    (
                        block_table.BlockTables,
                        "compute_slot_mappings",
                        batches.compute_slot_mappings,
                    ),
                    (buffer_utils.StagedWriteTensor, "apply_write", batches.apply_write),
                    (buffer_utils.FusedStagedWriter, "apply", batches.apply_writes),
                ):
                    patch.setattr(owner, name, mine)
            rng = np.random.default_rng(seed)
            made = tables(rng)
            made.apply_staged_writes()
            made.append_block_ids(2, ([7], [8, 9], []), overwrite=False)
            made.apply_staged_writes()
            found.append(content(made))
            # A full batch, then a smaller one: what the first left is cleared where it is padding.
            for count, padded in ((4, 5), (2, 4)):
                state = ints(rng.permutation(STATES)[:count])
                lengths = np.minimum(made.num_blocks.np[:2].min(0)[state] * 2, 5)
                gathered = made.gather_block_tables(state, num_reqs_padded=padded)
                found[-1] += [t.clone() for t in gathered] + content(made)
                state[-1] = -1  # of a dummy request
                positions = torch.tensor(np.concatenate([np.arange(n) for n in lengths]))
                positions[-int(lengths[-1]) :] += 8 * BLOCKS  # where no request of theirs can be
                slots = made.compute_slot_mappings(state, starts(lengths), positions, TOKENS)
                found[-1].append(slots.clone())
    assert_equal(*found)
    assert (found[1][-1][:2] >= 0).any() and (found[1][-1][2] == -1).all()


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_that_is_staged_alone(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    from spark_overlay.cpu.batches import apply_write

    found = []
    for write in (StagedWriteTensor.apply_write, apply_write):
        rng = np.random.default_rng(seed)
        rows = StagedWriteTensor((4, 30), torch.int32, torch.device("cpu"))
        single = StagedWriteTensor(5, torch.float32, torch.device("cpu"))
        for row in (3, 0):
            begin = int(rng.integers(0, 9))
            rows.stage_write(row, begin, rng.integers(1, 99, 11).tolist())
            single.stage_write_elem(row, float(rng.random()))
        for each in (rows, single, single):
            write(each)
        found.append([rows.gpu, single.gpu])
    assert_equal(*found)
    assert int((found[1][0] != 0).sum()) == 22


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratio", [2, 4])
def test_compressed_slots(vllm: ModuleType, seed: int, ratio: int) -> None:
    from vllm.v1.attention.backends.mla.compressor_utils import CompressedSlotMappingKernel

    from spark_overlay.cpu.batches import compressed_slot_mapping

    rng = np.random.default_rng(seed)
    kernel = CompressedSlotMappingKernel()
    lengths, computed = rng.integers(1, 12, 3), rng.integers(0, 20, 3)
    slots = torch.tensor(rng.integers(0, 99, TOKENS))
    slots[torch.tensor(rng.random(TOKENS) < 0.2)] = -1
    begins = torch.cat([starts(lengths), ints([lengths.sum()])])  # one request of padding
    arguments = (
        filled(TOKENS, dtype=torch.int64), slots, begins, ints([*(computed + lengths), 0]),
        ints(rng.permutation(64).reshape(4, 16)), 4, ratio, 1, 1,
    )  # fmt: skip
    theirs, ours = both(
        lambda *a: kernel(*a), lambda *a: compressed_slot_mapping(kernel, *a), *arguments
    )
    assert_equal(theirs, ours)
    told = ours[1][: int(lengths.sum())]
    assert (told >= 0).any() and (told == -1).any() and (ours[1][len(told) :] == 99).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fp64", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("drafting", [False, True], ids=["target", "draft"])
def test_draws(vllm: ModuleType, seed: int, fp64: bool, drafting: bool) -> None:
    from vllm.v1.worker.gpu.sample import gumbel

    from spark_overlay.cpu.draws import gumbel_sample

    rng, draw = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows, vocabulary = 5, 1500
    logits = 3 * torch.randn(rows, vocabulary, generator=draw)
    logits[0, 7:900:3] = logits[0].max() + 1  # equals: the first is taken
    state = ints([0, 3, 1, -1, 2])
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.5, 0.0, 0.0])
    temperature[2] = 0.0 if seed % 2 else 1.3
    cache = torch.zeros(STATES, 3, vocabulary) if drafting else None
    column = torch.tensor(1) if drafting else None
    seeds = torch.tensor(rng.integers(0, 1 << 62, STATES))
    places = torch.tensor(rng.integers(0, 9999, rows))
    found = []
    for kernel in (gumbel._gumbel_sample_kernel, gumbel_sample):
        kept = cache.clone() if cache is not None else None
        best = torch.zeros(rows, 2, dtype=torch.int64)
        most = torch.zeros(rows, 2, dtype=torch.float64 if fp64 else torch.float32)
        kernel[(rows, 2)](
            best, 2, most, 2, kept, 3 * vocabulary, vocabulary, column,
            logits if drafting else None, vocabulary, logits, vocabulary, state, seeds, places,
            temperature, vocabulary, BLOCK_SIZE=1024, IS_DRAFTING=drafting, APPLY_TEMPERATURE=True,
            USE_FP64=fp64, PER_TOKEN_COL=False,
        )  # fmt: skip
        found.append((best, most, kept))
    (their_best, their_most, theirs), (best, most, mine) = found
    assert torch.equal(best, their_best)
    torch.testing.assert_close(most, their_most, rtol=0, atol=2e-6)
    assert best[0, 0] == 7, "the first of equals"
    cold = [block.argmax() + 1024 * i for i, block in enumerate(logits[3].split(1024))]
    assert best[3].tolist() == cold
    if drafting:
        assert torch.equal(theirs, mine) and (mine[0, 1] == logits[0]).all()
