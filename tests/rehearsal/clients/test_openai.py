"""The official openai client: Chat Completions, with and without thinking, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from jsonschema import validate
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk

from clients import seeds
from clients.server import (
    CONTEXT,
    TELL,
    Server,
    async_openai_client,
    openai_client,
    question,
    reasoning,
)
from clients.tools import object_of, parsed

pytestmark = pytest.mark.rehearsal

SCHEMA = object_of({"ok": {"type": "boolean"}})
SCHEMA_FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True},
}
#: The greedy text of a tiny model has much white space in its JSON.
JSON_TOKENS = 40
THOUGHTS = 6


def require_sums(usage: CompletionUsage | None) -> CompletionUsage:
    assert usage is not None and usage.prompt_tokens_details is not None
    found, cached = usage.model_extra or {}, usage.prompt_tokens_details.cached_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert found["prompt_cache_hit_tokens"] == cached
    assert found["prompt_cache_miss_tokens"] == usage.prompt_tokens - (cached or 0)
    return usage


def joined(chunks: Sequence[ChatCompletionChunk]) -> tuple[str, str]:
    """(reasoning, content) of a stream."""
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    return (
        "".join(reasoning(delta) or "" for delta in deltas),
        "".join(delta.content or "" for delta in deltas),
    )


def require_stream(chunks: Sequence[ChatCompletionChunk], finish: str) -> CompletionUsage:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + [finish]
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any(chunk.usage for chunk in chunks[:-1])
    return require_sums(chunks[-1].usage)


def test_a_chat_without_thinking(server: Server) -> None:
    answer = server.chat("Say hi", 8)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("hi", "stop")
    assert choice.message.role == "assistant" and reasoning(choice.message) is None
    usage = require_sums(answer.usage)
    assert usage.prompt_tokens == len(server.prompt("Say hi"))
    assert usage.completion_tokens == 2


def test_a_stream_without_thinking(server: Server) -> None:
    asked = question("Say hi", 8, stream=True, stream_options={"include_usage": True})
    chunks = list(server.openai.chat.completions.create(**asked))
    assert joined(chunks) == ("", "hi")
    assert require_stream(chunks, "stop").completion_tokens == 2


def test_thinking_is_on_by_itself_and_a_stream_of_it_is_the_same(server: Server) -> None:
    asked = question(TELL, THOUGHTS, thinking=True, seed=3, extra_body={"ignore_eos": True})
    assert "thinking" not in asked["extra_body"]
    answer = server.openai.chat.completions.create(**asked)
    (choice,) = answer.choices
    thought = reasoning(choice.message)
    assert thought and not choice.message.content and choice.finish_reason == "length"
    usage = require_sums(answer.usage)
    assert usage.completion_tokens == THOUGHTS
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens
    chunks = list(server.openai.chat.completions.create(**asked, stream=True))
    assert joined(chunks) == (thought, "")
    assert require_stream(chunks, "length").completion_tokens == THOUGHTS


def test_a_stop_string_ends_the_content(server: Server) -> None:
    (choice,) = server.chat("Say hi", 8, stop=["never", "i"]).choices
    assert (choice.message.content, choice.finish_reason) == ("h", "stop")


def test_a_stop_string_does_not_end_the_reasoning(server: Server) -> None:
    asked = {"thinking": True, "seed": 5, "extra_body": {"ignore_eos": True}}
    thought = reasoning(server.chat(TELL, THOUGHTS, **asked).choices[0].message)
    assert thought and len(thought) > 1
    (choice,) = server.chat(TELL, THOUGHTS, stop=[thought[1:]], **asked).choices
    assert (reasoning(choice.message), choice.finish_reason) == (thought, "length")


def test_json_of_a_schema(server: Server) -> None:
    (choice,) = server.chat("Say hi", JSON_TOKENS, response_format=SCHEMA_FORMAT).choices
    validate(parsed(choice.message.content), SCHEMA)
    assert choice.finish_reason == "stop"


def test_json_of_a_schema_comes_after_the_reasoning(server: Server) -> None:
    """Which is no JSON itself."""
    answer = server.chat(
        "Skip",
        JSON_TOKENS,
        thinking=True,
        top_p=1.0,
        seed=seeds.THOUGHT,
        response_format=SCHEMA_FORMAT,
    )
    (choice,) = answer.choices
    assert answer.usage and answer.usage.prompt_tokens == seeds.THOUGHT_LENGTH, seeds.__doc__
    assert reasoning(choice.message) and choice.finish_reason == "stop", seeds.__doc__
    validate(parsed(choice.message.content), SCHEMA)


@pytest.mark.parametrize(
    ("thinking", "seed", "length"),
    [
        (False, seeds.OBJECT, seeds.OBJECT_LENGTH),
        (True, seeds.OBJECT_THOUGHT, seeds.OBJECT_THOUGHT_LENGTH),
    ],
    ids=["plain", "after the reasoning"],
)
def test_a_json_object(server: Server, thinking: bool, seed: int, length: int) -> None:
    sampled = {"temperature": 1.0, "top_p": 1.0, "seed": seed}
    answer = server.chat(
        "json", 8, thinking=thinking, response_format={"type": "json_object"}, **sampled
    )
    (choice,) = answer.choices
    assert answer.usage and answer.usage.prompt_tokens == length, seeds.__doc__
    assert bool(reasoning(choice.message)) == thinking, seeds.__doc__
    assert isinstance(parsed(choice.message.content), dict), seeds.__doc__
    assert choice.finish_reason == "stop"


def test_log_probabilities_of_each_token(server: Server) -> None:
    (choice,) = server.chat("Say hi", 8, logprobs=True, top_logprobs=3).choices
    assert choice.logprobs is not None
    found = choice.logprobs.content or []
    assert "".join(one.token for one in found) == choice.message.content == "hi"
    for one in found:
        ranked = [top.logprob for top in one.top_logprobs]
        assert len(ranked) == 3 and ranked == sorted(ranked, reverse=True)
        assert one.top_logprobs[0].token == one.token  # the greedy choice
        assert one.logprob == ranked[0] and -0.1 < one.logprob <= 0
        assert bytes(one.bytes or ()).decode() == one.token


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 2}, "Invalid n value (currently only n = 1 is supported)"),
    "model": ({"model": "no-such-model"}, "but you passed no-such-model"),
    "temperature": ({"temperature": 2.5}, "temperature"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_request_is_refused_in_the_official_words(server: Server, what: str) -> None:
    changed, told = REFUSED[what]
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(**{**question("Say hi", 4), **changed})
    require_official(caught.value, told)


def test_a_prompt_that_is_too_long_is_told_with_both_numbers(server: Server) -> None:
    text = "a " * CONTEXT
    with pytest.raises(openai.BadRequestError) as caught:
        server.chat(text, 4)
    require_official(caught.value, f"{len(server.prompt(text))} in the messages, 4 in the")


def require_official(error: openai.APIStatusError, told: str) -> None:
    body = error.body
    assert isinstance(body, dict) and set(body) == {"message", "type", "param", "code"}
    assert told in body["message"], body
    assert body["type"] == body["code"] == "invalid_request_error"


def test_a_wrong_key_is_refused(server: Server) -> None:
    with (
        openai_client(server.api, "another-key") as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.chat.completions.create(**question("Say hi", 4))
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "authentication_error"


def test_the_models_are_listed(server: Server) -> None:
    assert [model.id for model in server.openai.models.list()] == [question("", 1)["model"]]


def test_the_async_client(server: Server) -> None:
    async def ask() -> None:
        async with async_openai_client(server.api) as client:

            async def stream() -> list[ChatCompletionChunk]:
                asked = question("Say bye", 8, stream=True)
                return [chunk async for chunk in await client.chat.completions.create(**asked)]

            whole, chunks, response = await asyncio.gather(
                client.chat.completions.create(**question("Say hi", 8)),
                stream(),
                client.responses.create(
                    model=question("", 1)["model"],
                    input="Capital of Norway?",
                    max_output_tokens=8,
                    reasoning={"effort": "none"},
                    temperature=0,
                ),
            )
            assert whole.choices[0].message.content == "hi"
            assert joined(chunks) == ("", "bye")
            assert response.output_text == "Oslo"
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**question("Say hi", 4, n=2))

    asyncio.run(ask())
