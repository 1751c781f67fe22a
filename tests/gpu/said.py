"""What engines said, compared with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Where vLLM's two best tokens lie closer than this (nats), either is right.
TIE = 0.3

Values = dict[str, Any]


def parting(first: Sequence[Any], second: Sequence[Any]) -> tuple[bool, Values]:
    """Two lists of replies; see same_tokens in checks.py."""
    equal, parted = 0, []
    for x, y in zip(first, second, strict=True):
        same = [a == b for a, b in zip(x["tokens"], y["tokens"], strict=True)]
        until = same.index(False) if False in same else len(same)
        equal += until
        if until < len(same):
            best, next_best = sorted(x["logprobs"][until].values(), reverse=True)[:2]
            parted.append({"at": until, "gap": round(best - next_best, 3)})
    values = {
        "tokens": sum(len(x["tokens"]) for x in first),
        "equal_before_parting": equal,
        "parted": parted,
    }
    return bool(equal) and all(p["gap"] < TIE for p in parted), values


def classes(bench: Any, engine: str) -> Values:
    """What computed, and how long it took, from the engine itself."""
    answers = bench.answers[engine]
    seconds = {name: round(value, 1) for name, value in answers["seconds"].items() if name != "_"}
    return {"computed_by": answers["classes"][0], "engine_seconds": seconds}
