"""The overlay's attention in vLLM beside vLLM's own class: graphs, padding, prefixes, the draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu.engines import ENGINES
from gpu.said import Values, classes, parting

Judge = Callable[[Any], tuple[bool, Values]]

#: By OVERLAY_ATTENTION on an H200.
ATTENTION = {
    "portable": "spark_overlay.attention.glue.SparkAttention",
    "stock": "spark_overlay.attention.stock.SparkDeepseekV4FlashMLAAttention",
}


def again(engine: str) -> Judge:
    """The same replies after a cached beginning as from nothing, and in a batch of three, whose
    decode steps are padded to four, as alone. The last prompt was asked before, so it must be
    cached; of the first only a beginning was, whose window vLLM may have given away."""

    def judge(bench: Any) -> tuple[bool, Values]:
        answers = bench.answers[engine]
        warm_right, warm = parting(answers["cold"], answers["warm"])
        batch_right, batch = parting(answers["replies"][:3], answers["batch"])
        cached = [reply["cached"] for reply in answers["warm"]]
        values = {"warm": warm, "batch": batch, "cached": cached}
        return warm_right and batch_right and cached[-1] > 0, {**values, **classes(bench, engine)}

    return judge


def by_class(judge: Judge, engine: str) -> Any:
    """``judge``, and the attention class that was asked for computed; with graphs, whole decode
    steps were captured."""

    def computed(bench: Any) -> tuple[bool, Values]:
        right, values = judge(bench)
        found = bench.answers[engine]["classes"][0]
        values |= {"attention": found["attention"], "whole_graphs": found["whole_graphs"]}
        if bench.device == "cpu":
            return right, values
        asked = ENGINES[engine]
        right = right and found["attention"] == ATTENTION[asked.attention or "portable"]
        return right and bool(found["whole_graphs"]) == (
            not asked.options.get("enforce_eager", False)
        ), values

    return computed


def accepted(*names: str) -> Judge:
    """All say what is known to follow, and draft equally well: within 3 points."""

    def judge(bench: Any) -> tuple[bool, Values]:
        from gpu.model import successor

        values: Values = {}
        right = True
        for name in names:
            answers = bench.answers[name]
            wrong = 0
            for reply, asked in zip(
                [*answers["replies"], *answers["batch"]], [*bench.prompts] * 2, strict=True
            ):
                last = asked[-1]
                for token in reply["tokens"]:
                    last = successor(last, bench.text["vocab_size"])
                    wrong += token != last
            counters = answers["metrics"]
            drafted, taken = (
                counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
            )
            values |= {f"{name}_accepted": round(taken / drafted, 4), f"{name}_drafted": drafted}
            values |= {f"{name}_wrong_tokens": wrong, **classes(bench, name)}
            found = values[f"{name}_attention"] = answers["classes"][0]["attention"]
            right = right and wrong == 0
            if bench.device != "cpu":
                right = right and found == ATTENTION[ENGINES[name].attention or "portable"]
        rates = [values[f"{name}_accepted"] for name in names]
        # A draft that is always or never right would tell nothing.
        right = right and all(0.05 < rate < 0.99 for rate in rates)
        return right and max(rates) - min(rates) <= 0.03, values

    return judge
