"""Engines held to an SM80 with DeepGEMM, TileLang, FlashMLA and FlashInfer hidden (hidden.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu.said import Values, classes, parting

Judge = Callable[[Any], tuple[bool, Values]]


def held(judge: Judge, *engines: str) -> Judge:
    """``judge``, and these engines had nothing of newer GPUs."""

    def judged(bench: Any) -> tuple[bool, Values]:
        right, values = judge(bench)
        for engine in engines:
            (found,) = bench.answers[engine]["hidden"]  # one rank
            values[f"{engine}_hidden"] = found
            right = right and found["loaded"] == []
            right = right and (found["held"] == "80" or bench.device == "cpu")
        return right, values

    return judged


def verified(fixed: str, adaptive: str) -> Judge:
    """What follows a text is the same, however much of a draft is verified; sometimes less was.

    In a batch the steps differ in their shapes, so a difference may only be a tie there."""

    def judge(bench: Any) -> tuple[bool, Values]:
        one, other = bench.answers[fixed], bench.answers[adaptive]
        right, alone = parting(one["replies"], other["replies"])
        together_right, together = parting(one["batch"], other["batch"])
        (none,), (counts,) = one["verified"], other["verified"]
        values: Values = {"alone": alone, "together": together, "verified": counts}
        if bench.device != "cpu":
            right = right and not none and counts.get("cut", 0) > 0
        return right and together_right, {**values, **classes(bench, adaptive)}

    return judge
