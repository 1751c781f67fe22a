"""The kit's dialect: the whole list of what our API takes and the official one does not, and of
what it refuses that vLLM's own server would obey."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__, "deepseek_recipe")

import copy
import json
from typing import Any

import pytest
from direct_recipe import OFFICIAL_NAME, DirectRecipe, Prompt
from hypothesis import given
from hypothesis import strategies as st

from spark_overlay.rehearsal.tokenizer import tokenizer_json
from spark_overlay.serving.dialect import Extras, Protocol, translate
from spark_overlay.serving.errors import ApiError
from spark_overlay.serving.prompt import Asked, Prompts

Body = dict[str, Any]
PROTOCOLS: tuple[Protocol, ...] = ("chat", "responses", "messages")
TOKENIZER = json.dumps(tokenizer_json())
PROMPTS = Prompts(TOKENIZER, ["kit"])
RECIPE = DirectRecipe(TOKENIZER, "kit")


def request(protocol: Protocol, **fields: Any) -> Body:
    """A request of the protocol with these fields."""
    hello = {"role": "user", "content": "hello"}
    least: dict[Protocol, Body] = {
        "chat": {"messages": [hello]},
        "responses": {"input": [hello]},
        "messages": {"messages": [hello], "max_tokens": 100},
    }
    return {"model": "kit", **least[protocol], **fields}


def read(protocol: Protocol, body: Body) -> Asked:
    return PROMPTS.read(json.dumps(body).encode(), protocol)


def refusal(protocol: Protocol, body: Body) -> ApiError:
    with pytest.raises(ApiError) as refused:
        read(protocol, body)
    return refused.value


def effort(protocol: Protocol, value: Any) -> Body:
    """The field that names the effort."""
    fields: dict[Protocol, Body] = {
        "chat": {"reasoning_effort": value},
        "responses": {"reasoning": {"effort": value}},
        "messages": {"output_config": {"effort": value}},
    }
    return fields[protocol]


def kwargs(**words: Any) -> Body:
    return {"chat_template_kwargs": words}


def turns(*messages: Body) -> Body:
    return {"messages": [{"role": "user", "content": "hello"}, *messages]}


def answer(**fields: str) -> Body:
    return turns({"role": "assistant", "content": "5", **fields})


OFF, ON = {"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled"}}

#: What is said in the dialect, the same in official words, and what goes past the recipe.
TABLE: list[tuple[Protocol, Body, Body, Extras]] = [
    # Any effort from 1 to 100: the prompt names it. Official words stand for 50, 75 and 100.
    *((p, effort(p, 1), effort(p, "high"), Extras(1)) for p in PROTOCOLS),
    *((p, effort(p, "37"), effort(p, "high"), Extras(37)) for p in PROTOCOLS),
    *((p, effort(p, 50), effort(p, "low"), Extras()) for p in PROTOCOLS),
    *((p, effort(p, 75), effort(p, "high"), Extras()) for p in PROTOCOLS),
    *((p, effort(p, "100"), effort(p, "max"), Extras()) for p in PROTOCOLS),
    *((p, kwargs(reasoning_effort=37), effort(p, "high"), Extras(37)) for p in PROTOCOLS),
    *((p, kwargs(reasoning_effort="low"), effort(p, "low"), Extras()) for p in PROTOCOLS),
    # Thinking by vLLM's names.
    ("chat", kwargs(thinking=False), OFF, Extras()),
    ("chat", kwargs(enable_thinking=False), OFF, Extras()),
    ("chat", kwargs(enable_thinking=True), ON, Extras()),
    ("chat", kwargs(thinking=False, enable_thinking=True), ON, Extras()),
    ("messages", kwargs(thinking=False), OFF, Extras()),
    ("messages", kwargs(enable_thinking=True), ON, Extras()),
    ("responses", kwargs(enable_thinking=False), effort("responses", "none"), Extras()),
    ("responses", kwargs(thinking=True), {}, Extras()),
    *((p, kwargs(), {}, Extras()) for p in PROTOCOLS),
    # An official field for the same thing wins.
    ("chat", {**kwargs(thinking=False), **ON}, ON, Extras()),
    ("messages", {**kwargs(thinking=True), **OFF}, OFF, Extras()),
    *(
        (p, {**kwargs(reasoning_effort=37), **effort(p, "max")}, effort(p, "max"), Extras())
        for p in PROTOCOLS
    ),
    (
        "responses",
        {**kwargs(thinking=False), **effort("responses", "low")},
        effort("responses", "low"),
        Extras(),
    ),
    # Other names of OpenAI's and vLLM's.
    (
        "chat",
        turns({"role": "developer", "content": "do"}),
        turns({"role": "system", "content": "do"}),
        Extras(),
    ),
    ("chat", answer(reasoning="2+3"), answer(reasoning_content="2+3"), Extras()),
    (
        "chat",
        answer(reasoning="a", reasoning_content="b"),
        answer(reasoning_content="b"),
        Extras(),
    ),
    ("chat", {"max_completion_tokens": 7}, {"max_tokens": 7}, Extras()),
    ("chat", {"max_completion_tokens": 7, "max_tokens": 9}, {"max_tokens": 9}, Extras()),
    # What is for the engine.
    ("chat", {"top_k": 5}, {}, Extras(engine={"top_k": 5})),
    ("responses", {"top_k": 5}, {}, Extras(engine={"top_k": 5})),
    *((p, {"min_p": 0.5}, {}, Extras(engine={"min_p": 0.5})) for p in PROTOCOLS),
    *(
        (p, {"repetition_penalty": 1.1}, {}, Extras(engine={"repetition_penalty": 1.1}))
        for p in PROTOCOLS
    ),
    *((p, {"min_tokens": 3}, {}, Extras(engine={"min_tokens": 3})) for p in PROTOCOLS),
    *((p, {"ignore_eos": True}, {}, Extras(engine={"ignore_eos": True})) for p in PROTOCOLS),
    *((p, {"cache_salt": "mine"}, {}, Extras(cache_salt="mine")) for p in PROTOCOLS),
]


@pytest.mark.parametrize(
    ("protocol", "said", "meant", "extras"),
    TABLE,
    ids=[f"{protocol} {json.dumps(said)}" for protocol, said, *_ in TABLE],
)
def test_what_is_said_is_taken_as_these_official_words(
    protocol: Protocol, said: Body, meant: Body, extras: Extras
) -> None:
    spoken, official = request(protocol, **said), request(protocol, **meant)
    kept = copy.deepcopy(spoken)
    assert translate(spoken, protocol) == (official, extras)
    assert spoken == kept, "the request itself was changed"
    asked = read(protocol, spoken)
    expected = RECIPE.ask(json.dumps(official).encode(), protocol, extras.effort)
    assert isinstance(expected, Prompt)
    assert (PROMPTS.render(asked), asked.ids) == (expected.text, expected.ids)


@given(number=st.integers(1, 100), protocol=st.sampled_from(PROTOCOLS), text=st.booleans())
def test_every_effort_from_1_to_100_stands_in_the_prompt(
    number: int, protocol: Protocol, text: bool
) -> None:
    said = effort(protocol, str(number) if text else number)
    asked = read(protocol, request(protocol, **said))
    head = f"<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: {number} (range 1-100, "
    assert PROMPTS.render(asked).startswith(head)
    spelled = b"".join(PROMPTS.pieces[token] for token in asked.ids)
    assert spelled.startswith(head.encode())


def test_an_effort_says_nothing_while_not_thinking() -> None:
    off = request("chat", **OFF)
    assert read("chat", {**off, "reasoning_effort": 37}).ids == read("chat", off).ids


@pytest.mark.parametrize("value", [0, -1, 101, "0", "101", "9" * 5000, 37.5, True, "much", []])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_any_other_effort_is_refused(protocol: Protocol, value: Any) -> None:
    for fields in (effort(protocol, value), kwargs(reasoning_effort=value)):
        assert refusal(protocol, request(protocol, **fields)).status == 400


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (kwargs(thinking="no"), "chat_template_kwargs.thinking must be true or false"),
        (kwargs(enable_thinking=0), "chat_template_kwargs.enable_thinking must be true or false"),
        (kwargs(tools=[], a=1), "unknown a, tools; known are thinking, enable_thinking, "),
        (kwargs(**{"\ud800": 1}), "unknown ?;"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
        ({"top_k": "5"}, "top_k must be an integer from -1"),
        ({"top_k": -2}, "top_k must be an integer"),
        ({"min_tokens": 1 << 31}, "min_tokens must be an integer"),
        ({"min_p": 1.5}, "min_p must be a number from 0.0 to 1.0"),
        ({"min_p": True}, "min_p must be a number"),
        ({"min_p": 10**400}, "min_p must be a number"),
        ({"min_p": float("nan")}, "min_p must be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.01 to 10.0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be a number"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"cache_salt": ""}, "cache_salt must be a printable text that is not empty"),
        ({"cache_salt": "\ud800"}, "cache_salt must be a printable text"),
        ({"cache_salt": 7}, "cache_salt must be a printable text"),
        ({"temperature": 10**400}, "number out of range"),
    ],
    ids=str,
)  # fmt: skip
def test_a_word_of_the_dialect_with_a_wrong_value_is_refused(fields: Body, told: str) -> None:
    error = refusal("chat", request("chat", **fields))
    assert (error.status, told in error.message) == (400, True), error.message
    assert json.loads(error.json())["error"]["message"] == error.message


#: What vLLM's server would obey: a value that asks for something, and one that asks for nothing.
NOT_OBEYED = [
    ("structured_outputs", {"regex": "a"}, None),
    ("guided_json", {}, None),
    ("guided_regex", "a", None),
    ("guided_choice", ["a"], None),
    ("guided_grammar", "a", None),
    ("bad_words", ["a"], None),
    ("allowed_token_ids", [1], None),
    ("stop_token_ids", [1], None),
    ("prompt_logprobs", 1, None),
    ("chat_template", "{{ messages }}", None),
    ("documents", [{"title": "a"}], None),
    ("mm_processor_kwargs", {}, None),
    ("truncate_prompt_tokens", 5, None),
    ("thinking_token_budget", 5, None),
    ("kv_transfer_params", {}, None),
    ("vllm_xargs", {}, None),
    ("return_token_ids", True, False),
    ("echo", True, False),
    ("use_beam_search", True, False),
    ("add_special_tokens", True, False),
    ("continue_final_message", True, False),
    ("include_stop_str_in_output", True, False),
    ("add_generation_prompt", False, True),
    ("include_reasoning", False, True),
    ("length_penalty", 1.5, 1.0),
    ("priority", 3, 0),
]


@pytest.mark.parametrize(
    ("name", "asked", "nothing"), NOT_OBEYED, ids=[row[0] for row in NOT_OBEYED]
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_not_obeyed_is_refused_by_its_name(
    protocol: Protocol, name: str, asked: Any, nothing: Any
) -> None:
    error = refusal(protocol, request(protocol, **{name: asked}))
    assert (error.status, error.param) == (400, name)
    assert name in error.message
    plain = read(protocol, request(protocol)).ids
    for value in (nothing, None):
        assert read(protocol, request(protocol, **{name: value})).ids == plain


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "background"])
def test_responses_that_would_have_to_be_kept_are_refused(name: str) -> None:
    error = refusal("responses", request("responses", **{name: "resp_1"}))
    assert (error.status, error.param) == (400, name)
    assert "send the whole input" in error.message
    assert translate(request("responses", **{name: None}), "responses")[0] is None


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        ("chat", {"frequency_penalty": 1.0, "presence_penalty": 1.0, "logit_bias": {"5": 1}}),
        ("messages", {"top_k": 5}),
        ("chat", {"top_k": None, "min_p": None, "chat_template_kwargs": None, "cache_salt": None}),
        ("chat", {"unknown to all": 1}),
    ],
)
def test_what_the_official_api_ignores_is_ignored(protocol: Protocol, fields: Body) -> None:
    asked = read(protocol, request(protocol, **fields))
    assert asked.ids == read(protocol, request(protocol)).ids
    assert asked.extras == Extras()


def test_the_model_goes_by_its_official_name_too() -> None:
    for protocol in PROTOCOLS:
        asked = read(protocol, {**request(protocol), "model": OFFICIAL_NAME})
        assert (asked.model, asked.ids) == (OFFICIAL_NAME, read(protocol, request(protocol)).ids)
        error = refusal(protocol, {**request(protocol), "model": "DeepSeek-V4-Pro"})
        assert error.status == 400
        assert f"{OFFICIAL_NAME}, kit" in error.message
