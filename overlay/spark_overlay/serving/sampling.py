"""What the engine is asked to sample with: the official API's rules, or the request's own. Pure.

The official API (and deepseek-recipe, which says so here) samples at temperature 1.0 and top_p of
at least 0.95 while thinking, whatever a request names, and with top_p 1.0 otherwise. With
API_SAMPLING=request the request's own temperature and top_p hold instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from spark_overlay.serving.constraint import structured_outputs
from spark_overlay.serving.prompt import Asked

Rule = Literal["official", "request"]
RULES: tuple[Rule, ...] = get_args(Rule)

#: DeepSeek's sampling for this model where a request names none; top_p holds while thinking.
TEMPERATURE = 1.0
TOP_P = 0.95


@dataclass(frozen=True)
class Sampling:
    """``structured``: arguments of vLLM's StructuredOutputsParams, or None; ``looser``: those that
    enforce less, for when the grammar's compiler refuses them. ``logprobs``: how many alternatives
    a token, None for no log-probabilities. ``more``: other parameters by vLLM's names."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None = None
    logprobs: int | None = None
    structured: Mapping[str, Any] | None = None
    looser: Mapping[str, Any] | None = None
    more: Mapping[str, float | int | bool] = field(default_factory=dict)


def sampling(asked: Asked, max_tokens: int, rule: Rule, dsml: int) -> Sampling:
    """``dsml``: the tokenizer's id of ｜DSML｜."""
    options = asked.converted.inference_options
    temperature, top_p = _official(asked) if rule == "official" else _requested(asked)
    structured, looser = _structured(options.output_constraint, dsml)
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=options.seed,
        logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        structured=structured,
        looser=looser,
        more=asked.extras.engine,
    )


def _structured(constraint: Any, dsml: int) -> list[dict[str, Any] | None]:
    """What is enforced, and what is where that cannot be; None for nothing."""
    if constraint is None:
        return [None, None]
    kind, schema = constraint.kind, constraint.schema
    made = [structured_outputs(kind, schema, dsml=dsml, loose=loose) for loose in (False, True)]
    return made if made[0] != made[1] else [made[0], None]


def _official(asked: Asked) -> tuple[float, float]:
    options = asked.converted.inference_options
    # The recipe computes in float32: 0.95 comes back as 0.949999988.
    temperature, top_p = round(float(options.temperature), 6), round(float(options.top_p), 6)
    named = "top_p" in asked.extras.sampling
    return temperature, (TOP_P if asked.thinking and not named else top_p)


def _requested(asked: Asked) -> tuple[float, float]:
    named = asked.extras.sampling
    default = TOP_P if asked.thinking else 1.0
    return named.get("temperature", TEMPERATURE), named.get("top_p", default)
