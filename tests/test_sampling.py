"""With what an answer is sampled: by the official API's rules, or by the request's own words."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__, "deepseek_recipe")

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_overlay.rehearsal.tokenizer import tokenizer_json
from spark_overlay.serving.dialect import Protocol
from spark_overlay.serving.prompt import Prompts
from spark_overlay.serving.sampling import Rule, Sampling, sampling

Body = dict[str, Any]
PROTOCOLS: tuple[Protocol, ...] = ("chat", "responses", "messages")
PROMPTS = Prompts(json.dumps(tokenizer_json()), ["kit"])
HELLO = [{"role": "user", "content": "answer in json"}]
LEAST: dict[Protocol, Body] = {
    "chat": {"messages": HELLO},
    "responses": {"input": HELLO},
    "messages": {"messages": HELLO, "max_tokens": 100},
}

protocols = st.sampled_from(PROTOCOLS)
temperatures = st.integers(0, 2000).map(lambda n: n / 1000)
shares = st.integers(1, 1000).map(lambda n: n / 1000)


def sampled(protocol: Protocol, rule: Rule, thinking: bool = True, **fields: Any) -> Sampling:
    named = {name: value for name, value in fields.items() if value is not None}
    off = {} if thinking else {"chat_template_kwargs": {"thinking": False}}
    body = {"model": "kit", **LEAST[protocol], **off, **named}
    asked = PROMPTS.read(json.dumps(body).encode(), protocol)
    return sampling(asked, 9, rule, PROMPTS.dsml)


@given(protocol=protocols, temperature=st.none() | temperatures, top_p=st.none() | shares)
def test_officially_thinking_is_sampled_at_1_with_a_top_p_of_at_least_95(
    protocol: Protocol, temperature: float | None, top_p: float | None
) -> None:
    made = sampled(protocol, "official", temperature=temperature, top_p=top_p)
    assert (made.temperature, made.top_p) == (1.0, max(top_p or 0, 0.95))


@given(protocol=protocols, temperature=st.none() | temperatures, top_p=st.none() | shares)
def test_officially_the_temperature_holds_without_thinking_and_top_p_is_1(
    protocol: Protocol, temperature: float | None, top_p: float | None
) -> None:
    made = sampled(protocol, "official", False, temperature=temperature, top_p=top_p)
    assert (made.temperature, made.top_p) == (1.0 if temperature is None else temperature, 1.0)


@given(protocol=protocols, thinking=st.booleans(), temperature=temperatures, top_p=shares)
def test_by_the_request_both_hold_as_they_are_named(
    protocol: Protocol, thinking: bool, temperature: float, top_p: float
) -> None:
    made = sampled(protocol, "request", thinking, temperature=temperature, top_p=top_p)
    assert (made.temperature, made.top_p) == (temperature, top_p)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rule", ["official", "request"])
def test_what_is_not_named_is_the_models_default(protocol: Protocol, rule: Rule) -> None:
    assert sampled(protocol, rule) == Sampling(1.0, 0.95, 9)
    assert sampled(protocol, rule, False) == Sampling(1.0, 1.0, 9)


def test_seed_and_log_probabilities_are_the_requests() -> None:
    made = sampled("chat", "official", seed=7, logprobs=True)
    assert (made.seed, made.logprobs) == (7, 0)
    assert sampled("chat", "official", logprobs=True, top_logprobs=20).logprobs == 20
    assert sampled("chat", "official", logprobs=False).logprobs is None
    assert sampled("responses", "official", top_logprobs=3).logprobs == 3


def test_words_of_the_dialect_go_to_the_engine_by_its_names() -> None:
    said: Body = {
        "top_k": 5,
        "min_p": 0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    assert sampled("chat", "official", **said).more == said
    assert sampled("messages", "official", top_k=5).more == {}, "the official API ignores it there"


def test_a_form_of_the_answer_is_enforced() -> None:
    form = {"type": "json_object"}
    for made in (
        sampled("chat", "official", response_format=form),
        sampled("responses", "official", text={"format": form}),
    ):
        assert (made.structured, made.looser) == ({"json_object": True}, None)
    assert sampled("chat", "official").structured is None


def test_a_call_that_is_required_is_enforced() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    function = {"type": "function", "function": {"name": "find", "parameters": schema}}
    free = sampled("chat", "official", False, tools=[function])
    assert free.structured is None
    made = sampled("chat", "official", False, tools=[function], tool_choice="required")
    assert made.structured is not None and list(made.structured) == ["structural_tag"]
    assert "find" in made.structured["structural_tag"]
