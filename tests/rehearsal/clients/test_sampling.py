"""How tokens are chosen: at random while thinking, and by what narrows the choice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob

from clients.server import TELL, Server, async_openai_client, question, reasoning

pytestmark = pytest.mark.rehearsal

TOKENS = 6
CROWD = 20
LONG: dict[str, Any] = {"ignore_eos": True}


def thoughts(answer: ChatCompletion) -> str:
    text = reasoning(answer.choices[0].message)
    assert text
    return text


def each_token(answer: ChatCompletion) -> list[ChatCompletionTokenLogprob]:
    """DeepSeek gives those of the reasoning in a field of their own. An end that is ignored and
    bytes that are no character have none."""
    found = answer.choices[0].logprobs
    assert found is not None
    beside = (found.model_extra or {}).get("reasoning_content") or []
    assert 1 < len(beside) <= TOKENS
    return [ChatCompletionTokenLogprob.model_validate(one) for one in beside]


def test_a_seed_fixes_what_is_sampled(server: Server) -> None:
    first, again, other = (
        thoughts(server.chat(TELL, TOKENS, thinking=True, seed=seed, extra_body=LONG))
        for seed in (14, 14, 15)
    )
    assert first == again != other


def test_without_a_seed_two_answers_differ(server: Server) -> None:
    asked = {"thinking": True, "extra_body": LONG}
    assert thoughts(server.chat(TELL, TOKENS, **asked)) != thoughts(
        server.chat(TELL, TOKENS, **asked)
    )


@pytest.mark.parametrize("only", [{"top_k": 1}, {"min_p": 1.0}], ids=["top_k", "min_p"])
def test_a_choice_of_one_is_the_likeliest(server: Server, only: dict[str, Any]) -> None:
    answer = server.chat(
        TELL, TOKENS, thinking=True, logprobs=True, top_logprobs=1, extra_body={**LONG, **only}
    )
    found = each_token(answer)
    # Of two that are as likely either may be taken.
    assert [one.logprob for one in found] == [one.top_logprobs[0].logprob for one in found]


def test_log_probabilities_of_what_is_sampled(server: Server) -> None:
    answer = server.chat(
        TELL, TOKENS, thinking=True, seed=14, logprobs=True, top_logprobs=3, extra_body=LONG
    )
    found = each_token(answer)
    for one in found:
        ranked = [top.logprob for top in one.top_logprobs]
        assert len(ranked) == 3 and ranked == sorted(ranked, reverse=True)
        assert one.logprob <= ranked[0] <= 0
        same = [top.logprob for top in one.top_logprobs if top.bytes == one.bytes]
        assert same in ([], [one.logprob])
    # At a temperature of 1 the likeliest is not always taken.
    assert any(one.logprob < one.top_logprobs[0].logprob for one in found)


def test_a_repetition_penalty_turns_the_answer_from_the_prompt(server: Server) -> None:
    answer = server.chat("Say hi", TOKENS, extra_body={"repetition_penalty": 10.0})
    assert answer.choices[0].message.content != "hi"


@pytest.mark.alone
def test_twenty_chats_at_once(server: Server) -> None:
    async def ask() -> list[ChatCompletion]:
        async with async_openai_client(server.api) as client:
            asked = [
                question(f"{TELL} {n}", 4, True, temperature=0.5, top_p=0.5, extra_body=LONG)
                for n in range(CROWD)
            ]
            create = client.chat.completions.create
            return await asyncio.gather(*(create(**one) for one in asked))

    answers = asyncio.run(ask())
    assert len({answer.id for answer in answers}) == CROWD
    for answer in answers:
        assert thoughts(answer) and answer.usage and answer.usage.completion_tokens == 4
