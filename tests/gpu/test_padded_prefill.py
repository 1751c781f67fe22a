"""FlashMLA's prefill with heads padded to 64, as hooks.py has it on SM90: what it changes.

At TP2 a rank has 32 heads. Needs vLLM's FlashMLA and an SM90; ``pytest -m gpu -s`` prints times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
HEADS, PADDED, WIDTH, ROWS = 32, 64, 640, 16384
#: How much faster it must be at least at 2048 tokens.
GAIN = 1.3


def ulps(found: Any, expected: Any) -> float:
    """The largest difference, in steps of bf16 at the size of its row's largest value: a sum of
    products is as uncertain as its largest, whatever is left of it."""
    import torch

    found, expected = found.float(), expected.float()
    step = torch.exp2(expected.abs().amax(-1, keepdim=True).log2().floor() - 7)
    return float(((found - expected).abs() / step).max())


def prefills(tokens: int, whole_rows: bool) -> tuple[dict[int, Any], dict[int, Callable[[], None]]]:
    """Outputs (poisoned) and calls with 32 and with 64 heads, on the same inputs; rows of 640
    records, or of any number up to that."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs an SM90")
    flashmla = pytest.importorskip("vllm.v1.attention.ops.flashmla")
    made = torch.Generator("cuda").manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device="cuda").bfloat16()

    kv = normal(ROWS, 1, 512)
    q = torch.zeros(tokens, PADDED, 512, dtype=torch.bfloat16, device="cuda")
    q[:, :HEADS] = normal(tokens, HEADS, 512)
    indices = torch.randint(0, ROWS, (tokens, 1, WIDTH), generator=made, device="cuda").int()
    lengths = torch.randint(1, WIDTH + 1, (tokens,), generator=made, device="cuda").int()
    if whole_rows:
        lengths.fill_(WIDTH)
    sink = torch.full((PADDED,), -torch.inf, device="cuda")
    sink[:HEADS] = torch.linspace(-4, 4, HEADS)
    out = {n: torch.full_like(q, torch.nan) for n in (HEADS, PADDED)}

    def prefill(heads: int) -> Callable[[], None]:
        return lambda: flashmla.flash_mla_sparse_fwd(
            q=q[:, :heads],
            kv=kv,
            indices=indices,
            sm_scale=512**-0.5,
            attn_sink=sink[:heads],
            topk_length=lengths,
            out=out[heads][:, :heads],
        )

    return out, {heads: prefill(heads) for heads in (HEADS, PADDED)}


@pytest.mark.parametrize("tokens", [1, 7, 256, 2048])
def test_padded_heads_change_a_result_by_at_most_one_ulp(tokens: int) -> None:
    out, calls = prefills(tokens, False)
    for call in calls.values():
        call()
    worst = ulps(out[PADDED][:, :HEADS], out[HEADS][:, :HEADS])
    print(f"\nT={tokens}: {worst:.2f} ulp")
    assert worst <= 1
    assert out[PADDED].isfinite().all()


def test_padded_heads_are_faster() -> None:
    _, calls = prefills(2048, True)
    times = microseconds(calls)
    print(f"\n{times[HEADS]:.0f} us with 32 heads, {times[PADDED]:.0f} with 64")
    assert times[HEADS] > GAIN * times[PADDED], "the hook gains nothing here"


def microseconds(calls: Mapping[int, Callable[[], None]]) -> dict[int, float]:
    """The least of many single calls in turns: other work on the GPU only adds to a call's time."""
    import torch

    found = dict.fromkeys(calls, float("inf"))
    for turn in range(33):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                found[name] = min(found[name], start.elapsed_time(end) * 1000)
    return found
