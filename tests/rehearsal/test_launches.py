"""vLLM's index kernels under Triton's interpreter against our torch: not one integer differs."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]

SEEDS = range(6)
BLOCK = 4
REPLACED = (
    "ComputeSWAIndicesAndLensKernel.__call__",
    "_hash_ids_kernel",
    "prepare_dflash_inputs",
    "compute_token_logprobs",
    "_ranks_kernel",
)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: Any) -> Tensor:
    return ints([0, *np.cumsum(lengths)])


@pytest.fixture(scope="module")
def stock(vllm: ModuleType) -> SimpleNamespace:
    """The kernels as vLLM has them: in this process no hook is applied."""
    from vllm.models.deepseek_v41.common import engram
    from vllm.v1.attention.backends.mla import sparse_swa
    from vllm.v1.worker.gpu.sample import logprob
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    from spark_overlay.hooks import HOOKS

    hooked = [hook for hook in HOOKS if hook.replacement.startswith("spark_overlay.cpu.launches:")]
    assert tuple(hook.target.partition(":")[2] for hook in hooked) == REPLACED
    for hook in hooked:
        owner, name = hook.locate()
        assert "spark_overlay" not in str(getattr(getattr(owner, name), "__module__", ""))
    return SimpleNamespace(
        window=sparse_swa._compute_swa_indices_and_lens_kernel,
        hashes=engram._hash_ids_kernel,
        state=engram.NgramHashState,
        draft=speculator.prepare_dflash_inputs,
        logprobs=logprob.compute_token_logprobs,
        ranks=logprob._ranks_kernel,
    )


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("seed", SEEDS)
def test_window_indices(stock: Any, seed: int, image: bool) -> None:
    from spark_overlay.cpu.launches import compute_swa_indices_and_lens

    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 3)
    computed = rng.integers(0, 30, 3)
    tokens, window, skipped = int(lengths.sum()), 8, int(rng.integers(0, 3))
    width = window + (6 if image else 0)
    table = ints(rng.permutation(3 * 16).reshape(3, 16))
    valid = torch.tensor(rng.random(tokens) < 0.85)
    left, right = ints(rng.integers(0, 12, tokens)), ints(rng.integers(0, 3, tokens))
    replay = ints(rng.integers(0, 1 + computed))
    request = ints(np.repeat(np.arange(3), lengths))
    given = (left, right, starts(lengths), ints(computed + lengths), request, valid, table, BLOCK)
    rows = tokens - skipped
    theirs, mine = torch.full((2, rows, width + 2), 99, dtype=torch.int32)
    their_lens, my_lens = torch.full((2, rows), 99, dtype=torch.int32)
    *before, blocks, size = given
    stock.window[(rows,)](
        theirs, theirs.stride(0), their_lens, window, width, *before, blocks, blocks.stride(0),
        size, replay, skipped, HAS_IMAGE=image, TRITON_BLOCK_SIZE=1024,
    )  # fmt: skip
    compute_swa_indices_and_lens(
        SimpleNamespace(_warming=False), mine.unsqueeze(1) if image else mine, my_lens,
        window, width, *given, replay,
        num_tokens=rows, token_offset=skipped, has_image=image,
    )  # fmt: skip
    assert torch.equal(my_lens, their_lens) and torch.equal(mine, theirs)
    assert (my_lens[~valid[skipped:]] == 0).all() and (my_lens[valid[skipped:]] > 0).all()
    assert (mine[:, width:] == 99).all(), "only the row's width is written"


@pytest.mark.parametrize("seed", SEEDS)
def test_ngram_hashes(stock: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.common import engram

    from spark_overlay.cpu.launches import hash_ids

    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(1, 50, 3)]
    tokens, vocabulary, layers, ngram, heads = sum(lengths), 40, 2, 4, 3
    begin = rng.integers(0, 6, 3)
    positions = np.concatenate([at + np.arange(n) for at, n in zip(begin, lengths, strict=True)])
    lookback = rng.integers(-1, vocabulary, (3, ngram - 1))
    state = SimpleNamespace(
        use_slot_cache=False,
        _cache=None,
        block_size=1,
        pad_id=2,
        token_map=ints(rng.permutation(vocabulary)),
        primes=torch.tensor(rng.integers(2, 10_000, (layers, ngram - 1, heads))),
        offsets=torch.tensor(rng.integers(0, 10_000, (layers, ngram - 1, heads))),
        # Some products do not fit 64 bits: both must wrap, and divide, alike.
        multipliers=torch.tensor(rng.integers(1, 2**61, (layers, ngram)) | 1),
    )
    given = (
        ints(rng.integers(0, vocabulary, tokens)),
        torch.tensor(positions),
        torch.cat([starts(lengths), ints([tokens, tokens])]),  # as padded for a graph
        torch.tensor(rng.random(tokens) < 0.2),
        ints(np.concatenate([lookback, np.full((2, ngram - 1), -1)])),
        torch.tensor(rng.random((5, ngram - 1)) < 0.2),
        None,
        None,
    )
    theirs = stock.state.forward(state, *given)
    monkeypatch.setattr(engram, "_hash_ids_kernel", hash_ids)
    mine = stock.state.forward(state, *given)
    assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert len(mine.unique()) > tokens


@pytest.mark.parametrize("anchor", [True, False], ids=["dspark", "dflash"])
@pytest.mark.parametrize("seed", SEEDS)
def test_draft_inputs(stock: Any, seed: int, anchor: bool) -> None:
    from spark_overlay.cpu.launches import prepare_dflash_inputs

    found = []
    for prepare in (stock.draft, prepare_dflash_inputs):
        rng = np.random.default_rng(seed)
        most, requests, width = 5, 3, 4
        steps = width if anchor else width - 1
        lengths = rng.integers(2, 10, requests)
        limit = 40
        batch = SimpleNamespace(
            num_reqs=requests,
            positions=torch.tensor(np.concatenate([a + np.arange(n) for a, n in zip(
                rng.integers(0, limit - 9, requests), lengths, strict=True)])),
            query_start_loc=starts(lengths),
            idx_mapping=ints(rng.permutation(most)[:requests]),
            num_scheduled_tokens=lengths,
        )  # fmt: skip
        buffers = SimpleNamespace(
            input_ids=ints(np.full(64, 7)), positions=torch.full((64,), 7),
            query_start_loc=ints(np.full(most + 1, 7)), seq_lens=ints(np.full(most, 7)),
            is_padding=torch.zeros(64, dtype=torch.bool),
        )  # fmt: skip
        written = [torch.full((64,), 7) for _ in range(3)] + [ints(np.full(64, 7)) for _ in "123"]
        drawn = [torch.full((most,), 0.5), torch.full((most,), 7)]
        prepare(
            buffers, *written, *drawn, batch,
            ints(rng.integers(0, 2, requests)), ints(rng.integers(0, 2, requests)),
            torch.tensor(rng.integers(0, 99, most)), ints(rng.integers(100, 199, most)),
            torch.tensor(rng.random(most), dtype=torch.float32),
            torch.tensor(rng.integers(0, 1 << 40, most)),
            ints(rng.integers(0, 3, (most, 10))), BLOCK, 0, 1, 1, 511, width, steps, most, 48,
            limit, anchor,
        )  # fmt: skip
        found.append([*vars(buffers).values(), *written, *drawn])
    for theirs, mine in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_and_ranks(stock: Any, dtype: torch.dtype) -> None:
    from spark_overlay.cpu.launches import compute_token_logprobs, token_ranks

    draw = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(7, 3000, generator=draw)).to(dtype)
    logits[:, 5::7] = float("-inf")
    ids = torch.randint(0, 3000, (7, 4), generator=draw)
    ids[:, 0] = 12  # of no probability
    # The kernel counts what pads its last block, too, if the token has none; and the interpreter
    # compares bf16 by its bits. Logits are float32 there.
    ids[:, 1] = 7 * (ids[:, 1] // 7) + 1
    wide = logits.float()
    theirs, mine = stock.logprobs(logits, ids), compute_token_logprobs(logits, ids)
    assert mine.dtype == torch.float32 and torch.isneginf(mine[:, 0]).all()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)
    ranks = torch.zeros(2, 7, dtype=torch.int64)
    for kernel, output in zip((stock.ranks, token_ranks), ranks, strict=True):
        kernel[(7,)](output, wide, wide.stride(0), ids[:, 1].contiguous(), 3000, BLOCK_SIZE=8192)
    assert torch.equal(*ranks) and len(ranks[0].unique()) > 3
