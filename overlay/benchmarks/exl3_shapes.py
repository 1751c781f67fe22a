"""V4.1's packed matrices on one of two ranks, and a step's bytes and launches. Pure.

Sizes and rates are those of the public 2.9 bpw pack; ``GIGABYTES`` of a step is checked against the
figure its facts give (tests/test_exl3_benchmark.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Size = tuple[int, int, int]  # inputs, outputs, rate in half bits

HIDDEN, INTER, EXPERTS, TOPK, LAYERS = 5120, 1152, 384, 6, 40
#: The groups of one layer that a launch each serves. ``own``: an input for each matrix.
GROUPS: Mapping[str, Sequence[Size]] = {
    "wq_a + wkv": ((5120, 1280, 10), (5120, 512, 10)),
    "wq_b": ((1280, 16384, 10),),
    "wo_a": ((4096, 1024, 10),) * 4,
    "wo_b": ((4096, 5120, 10),),
    "shared gate + up": ((5120, 1152, 10), (5120, 1152, 10)),
    "shared down": ((1152, 5120, 10),),
}
OWN_INPUTS = frozenset({"wo_a"})
HEAD: Size = (5120, 64640, 12)
#: Layers whose routed experts have K = 2, not 3, and whose shared expert has K = 4, not 5.
LOW_EXPERTS = frozenset(range(18, 23))
LOW_SHARED = frozenset(range(11, 30))


def size_bytes(size: Size) -> int:
    """Trellis and scales."""
    n_in, n_out, k2 = size
    return n_in * n_out * k2 // 16 + 2 * (n_in + n_out)


def group_bytes(sizes: Sequence[Size]) -> int:
    return sum(map(size_bytes, sizes))


def expert_bytes(k2: int) -> int:
    return 2 * size_bytes((HIDDEN, INTER, k2)) + size_bytes((INTER, HIDDEN, k2))


def distinct(tokens: int) -> float:
    """Experts that ``tokens`` ask for, if each asks for 6 of 384 alike and by itself."""
    return EXPERTS * (1 - (1 - TOPK / EXPERTS) ** tokens)


@dataclass(frozen=True)
class Assumptions:
    """Of a GB10 step. Each is an assumption, not a measurement of this project, but for the
    overhead of a launch in a graph, which is the H200's (a one-element addition)."""

    bytes_per_second: float = 240e9
    launch_seconds: float = 1.2e-6
    #: The project's own: groups and two of the experts; the rest of a layer (norms, rotations,
    #: attention, mHC, routing), as many as vLLM's own step has.
    packed_launches: int = 7
    other_launches: int = 15
    collectives: int = 2
    collective_seconds: float = 32e-6
    #: Of both: what a step reads besides packed weights (gate, norms, mHC, KV, indexer).
    other_bytes: float = 0.3e9

    def named(self) -> dict[str, str]:
        return {
            "memory": f"{self.bytes_per_second / 1e9:g} GB/s sustained of 273 nominal (published)",
            "launch": f"{self.launch_seconds * 1e6:g} us each, measured in graphs on an H200",
            "launches a layer": f"{self.packed_launches} packed, {self.other_launches} others",
            "collectives": f"{self.collectives} a layer, {self.collective_seconds * 1e6:g} us each "
            "over ConnectX-7 (published: 25 to 40)",
            "other bytes": f"{self.other_bytes / 1e9:g} GB a step",
            "routing": "every token 6 of 384 experts, alike and independent",
            "overlap": "none between bytes, launches and collectives",
        }


#: Published two-Spark steps of others: tokens -> milliseconds (facts of the project, third-party).
PUBLISHED: Mapping[int, str] = {1: "about 43 (23 tok/s)", 4: "60 to 63"}


def step_bytes(tokens: int) -> dict[str, float]:
    """Packed bytes that one rank reads in a step, by what they are of."""
    found = dict.fromkeys(("experts", "shared", "attention", "head"), 0.0)
    attention = sum(group_bytes(GROUPS[name]) for name in ("wq_a + wkv", "wq_b", "wo_a", "wo_b"))
    for layer in range(LAYERS):
        found["experts"] += distinct(tokens) * expert_bytes(4 if layer in LOW_EXPERTS else 6)
        found["shared"] += expert_bytes(8 if layer in LOW_SHARED else 10)
        found["attention"] += attention
    found["head"] = size_bytes(HEAD)
    return found


def step_seconds(tokens: int, given: Assumptions | None = None) -> dict[str, float]:
    """Of a GB10 step: reading, launching, collectives, and their sum."""
    given = given or Assumptions()
    parts = {
        "bytes": (sum(step_bytes(tokens).values()) + given.other_bytes) / given.bytes_per_second,
        "launches": LAYERS * (given.packed_launches + given.other_launches) * given.launch_seconds,
        "collectives": LAYERS * given.collectives * given.collective_seconds,
    }
    return {**parts, "step": sum(parts.values())}


def model_text(given: Assumptions | None = None) -> str:
    """The table that ``exl3.py --model`` prints."""
    given = given or Assumptions()
    lines = ["A step of one of two GB10s, milliseconds; modelled, not measured:"]
    lines.append(
        f"{'tokens':>6} {'GB':>6} {'bytes':>6} {'launch':>6} {'coll.':>6} {'step':>6}  published"
    )
    for tokens in (1, 2, 4, 8):
        seconds = step_seconds(tokens, given)
        gigabytes = sum(step_bytes(tokens).values()) / 1e9
        cells = " ".join(f"{1e3 * value:>6.1f}" for value in seconds.values())
        lines.append(f"{tokens:>6} {gigabytes:>6.2f} {cells}  {PUBLISHED.get(tokens, '-')}")
    lines += [f"  {name}: {text}" for name, text in given.named().items()]
    return "\n".join(lines)
