"""The rows of attention.py: one case each, with our kernels' calls and the peers' on its inputs.

A case makes its inputs from seeds, so that a peer's own process (attention_beside.py) has the
same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import attention_peers as peers
import timing

Values = dict[str, Any]
Calls = list[Callable[[], Any]]
HEADS, SCALE = 32, 512**-0.5
RECORD, ROW = 584, 1024
#: Replays of a graph where few are asked for.
QUICK = 3


@dataclass
class Case:
    """``ours`` gives what to time, and what a look at its output found; ``peers``: name -> its
    calls and what to look at after one of them."""

    name: str
    nbytes: float
    flops: float
    ours: Callable[[], tuple[Calls, bool, Values]]
    peers: dict[str, Callable[[], tuple[Calls, Callable[[], Values]]]] = field(default_factory=dict)


def median_us(calls: Sequence[Callable[[], Any]], quick: bool) -> float:
    return statistics.median(timing.graph_us(calls, QUICK if quick else timing.RUNS))


def off(found: Any, right: Any) -> float:
    worst = (found.double() - right).abs().nan_to_num(math.inf).max().item()
    return float(f"{worst:.3g}")


def same_bits(one: Any, other: Any) -> bool:
    import torch

    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def sink_of_all() -> Any:
    import torch

    return torch.randn(HEADS, device="cuda", generator=torch.Generator("cuda").manual_seed(5))


def first(sources: Any, count: int) -> list[Any]:
    """The sources of the first tokens alone."""
    from spark_overlay.attention import kernels

    return [
        kernels.Source(s.cache, s.slots[:count], None if s.lengths is None else s.lengths[:count])
        for s in sources
    ]


def attention_case(kind: str, tokens: int) -> Case:
    import torch
    from gpu import attention_cases as cases

    from spark_overlay.attention import kernels
    from spark_overlay.attention.kernels import reference

    few = tokens <= 96
    sets = [cases.real(tokens, 10 * n) for n in range(8 if few else 4)]
    q, sink, head = cases.queries(tokens, HEADS, 3), sink_of_all(), min(tokens, 64)
    right = reference.sparse_mla(q[:head], first(sets[0], head), sink, SCALE)

    def ours() -> tuple[Calls, bool, Values]:
        out = torch.full_like(q, math.nan)
        again = torch.full_like(q, math.nan)
        for into in (out, again):
            kernels.sparse_mla(q, sets[0], sink, SCALE, into)
        found, limit = off(out[:head], right), cases.tolerance(right)
        same = same_bits(out, again)
        values: Values = {"off": found, "bar": float(f"{limit:.3g}"), "same_bits": same}
        calls: Calls = [lambda s=s: kernels.sparse_mla(q, s, sink, SCALE, out) for s in sets]
        return calls * (4 if few else 1), found <= limit and same, values

    def look(made: tuple[Calls, Any]) -> tuple[Calls, Callable[[], Values]]:
        return made[0], lambda: {"off": off(made[1][:head], right)}

    case = Case(
        f"{kind}, {tokens} tokens",
        tokens * (640 * RECORD + 2 * HEADS * ROW),
        4 * tokens * HEADS * 640 * 512,
        ours,
    )
    if kind == "decode":
        for peer in ("flashmla", "triton") if tokens in (1, 4, 24) else ("flashmla",):
            case.peers[peer] = lambda p=peer: look(peers.decode(p, q, sets, sink, SCALE))
    else:
        case.nbytes = sum(s.cache.numel() for s in sets[0]) + tokens * 2 * HEADS * ROW
        for peer in ("flashmla", "flashmla64", "triton"):
            case.peers[peer] = lambda p=peer: look(
                peers.prefill(p, q, *gathered(sets), sink, SCALE)
            )
    return case


def turned_us(tokens: int, quick: bool) -> float:
    """With the output turned back in the same launches."""
    import torch
    from gpu import attention_cases as cases

    from spark_overlay.attention import kernels

    sets = [cases.real(tokens, 10 * n) for n in range(8)]
    q, sink = cases.queries(tokens, HEADS, 3), sink_of_all()
    out = torch.empty_like(q)
    turn = (torch.randn(4096, 64, device="cuda"), torch.arange(tokens, device="cuda"))
    calls: Calls = [
        lambda s=s: kernels.sparse_mla(q, s, sink, SCALE, out, unrotate=turn) for s in sets
    ]
    return median_us(calls * 4, quick)


def gathered(sets: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The first set's records as one bf16 workspace, and every set's rows of it."""
    import torch

    from spark_overlay.attention.reference import read_records

    parts, begins, rows = [], [], 0
    for source in sets[0]:
        count = source.cache.shape[0] * source.cache.shape[1]
        begins.append(rows)
        rows += count
        parts.append(read_records(source.cache, torch.arange(count, device="cuda")).bfloat16())
    places = [
        torch.cat([s.slots + begin for s, begin in zip(one, begins, strict=True)], 1).int()
        for one in sets
    ]
    return torch.cat(parts), [p.contiguous() for p in places]


def gather_case(requests: int, each: int) -> Case:
    import torch
    from gpu import attention_cases as cases

    from spark_overlay.attention import kernels
    from spark_overlay.attention.kernels import reference

    caches = [cases.cache(768, 64, seed) for seed in range(4)]
    order = torch.randperm(768, device="cuda", generator=cases.made(1)).int()
    table = order[: requests * -(-each // 64)].view(requests, -1)
    shape = (requests, each, 512)
    outs = [torch.full(shape, math.nan, dtype=torch.bfloat16, device="cuda") for _ in caches]
    lengths = torch.full((requests,), each, dtype=torch.int32, device="cuda")
    right = torch.empty_like(outs[0])
    reference.gather(right, caches[0], lengths, None, table)

    def ours() -> tuple[Calls, bool, Values]:
        calls: Calls = [
            lambda o=o, c=c: kernels.gather(o, c, lengths, None, table)
            for o, c in zip(outs, caches, strict=True)
        ]
        calls[0]()
        return calls * 3, same_bits(outs[0], right), {}

    def theirs(most: int | None) -> tuple[Calls, Callable[[], Values]]:
        calls = [
            peers.gather(o, c, lengths, table, most) for o, c in zip(outs, caches, strict=True)
        ]
        return calls, lambda: {"same_bits": same_bits(outs[0], right)}

    name = f"gather, {f'{requests} x ' if requests > 1 else ''}{each} rows"
    found = Case(name, requests * each * (RECORD + ROW), 0, ours)
    found.peers = {"bounded": lambda: theirs(each), "unbounded": lambda: theirs(None)}
    return found


def combine_case(ratio: int, tokens: int, context: int = 16384) -> Case:
    import torch
    from gpu import attention_cases as cases

    from spark_overlay.attention import kernels
    from spark_overlay.attention.kernels import reference

    def number(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    topk, width = (512, 640) if ratio else (0, 128)
    args = (number(0, tokens), number(context), number(tokens + 127), 128, ratio, topk, 40000,
            context)  # fmt: skip
    picks = [
        torch.randint(
            0, context, (tokens, 512), dtype=torch.int32, device="cuda", generator=cases.made(n)
        )
        for n in range(4)
    ]
    outs = [
        (
            torch.full((tokens, width), 7, dtype=torch.int32, device="cuda"),
            torch.full((tokens,), 7, dtype=torch.int32, device="cuda"),
        )
        for _ in picks
    ]
    pairs = list(zip(picks, outs, strict=True))
    on_cpu = [a.cpu() if torch.is_tensor(a) else a for a in args]
    right = reference.combine(picks[0].cpu(), *on_cpu)

    def same() -> bool:
        return all(torch.equal(a.cpu(), b) for a, b in zip(outs[0], right, strict=True))

    def ours() -> tuple[Calls, bool, Values]:
        calls: Calls = [lambda p=p, o=o: kernels.combine(p, *args, out=o) for p, o in pairs]
        calls[0]()
        return calls * 3, same(), {}

    def theirs() -> tuple[Calls, Callable[[], Values]]:
        return [peers.combine(p, o, args) for p, o in pairs] * 3, lambda: {"same_bits": same()}

    name = f"combine ratio {ratio}, {tokens} tokens"
    return Case(name, tokens * 4 * (topk + width + 1), 0, ours, {"triton": theirs})


def chosen_case(tokens: int) -> Case:
    import torch
    from gpu import attention_cases as cases

    from spark_overlay.attention import kernels
    from spark_overlay.attention.kernels import reference

    made = cases.made(2)
    topk = torch.randint(-1, 16384, (tokens, 512), dtype=torch.int32, device="cuda", generator=made)
    table = torch.randperm(256, device="cuda", generator=made).int().view(1, 256)
    request = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    out = torch.empty_like(topk)

    def ours() -> tuple[Calls, bool, Values]:
        kernels.chosen_slots(topk, table, request, 64, out)
        same = torch.equal(out, reference.chosen_slots(topk, table, request, 64))
        return [lambda: kernels.chosen_slots(topk, table, request, 64, out)] * 8, same, {}

    def theirs() -> tuple[Calls, Callable[[], Values]]:
        return [peers.chosen(topk, request, table, 64)] * 8, dict

    return Case(f"chosen slots, {tokens} tokens", tokens * 4096, 0, ours, {"triton": theirs})


def decode() -> Iterator[Case]:
    yield from (attention_case("decode", tokens) for tokens in (1, 4, 24, 2, 6, 8, 12, 16))


def prefill() -> Iterator[Case]:
    yield from (attention_case("prefill", tokens) for tokens in (2048, 256))


def gather() -> Iterator[Case]:
    for requests, each in ((1, 16384), (1, 49152), (4, 12288), (1, 2175)):
        yield gather_case(requests, each)


def combine() -> Iterator[Case]:
    for ratio, counts in ((1, (1536, 8192, 1, 24, 256)), (0, (1536, 8192))):
        yield from (combine_case(ratio, tokens) for tokens in counts)


def chosen() -> Iterator[Case]:
    yield from (chosen_case(tokens) for tokens in (4, 2048))


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "decode": decode,
    "prefill": prefill,
    "gather": gather,
    "combine": combine,
    "chosen": chosen,
}
