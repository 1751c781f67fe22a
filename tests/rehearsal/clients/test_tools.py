"""The official openai client: tools by each tool_choice."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from clients.server import Server, question
from clients.tools import CALL_TOKENS, GO, TURN, function, parsed, require_calls
from spark_overlay.rehearsal.lessons import CLOCK, WEATHER

pytestmark = pytest.mark.rehearsal


def test_a_call_of_the_models_own_accord_in_a_stream(server: Server) -> None:
    asked = question("Weather in Oslo?", CALL_TOKENS, tools=[WEATHER], stream=True)
    chunks = list(server.openai.chat.completions.create(**asked))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[-1].finish_reason == "tool_calls"
    pieces = [piece for choice in choices for piece in choice.delta.tool_calls or ()]
    assert {piece.index for piece in pieces} == {0}
    (name,) = [p.function.name for p in pieces if p.function and p.function.name]
    assert name == "weather" and pieces[0].id
    arguments = "".join(p.function.arguments or "" for p in pieces if p.function)
    assert parsed(arguments) == {"city": "Oslo"}
    assert not "".join(choice.delta.content or "" for choice in choices).strip()


def test_no_call_where_the_model_wants_none(server: Server) -> None:
    (choice,) = server.chat("Are you there?", 8, tools=[WEATHER, CLOCK]).choices
    assert (choice.message.content, choice.finish_reason) == ("yes", "stop")
    assert not choice.message.tool_calls


def test_a_named_tool_is_called(server: Server) -> None:
    chosen = {"type": "function", "function": {"name": "turn"}}
    answer = server.chat("Weather in Oslo?", CALL_TOKENS, tools=[GO, TURN], tool_choice=chosen)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    require_calls(choice.message, TURN)


def test_tool_choice_none_hides_the_tools(server: Server) -> None:
    answer = server.chat("Say hi", 8, tools=[WEATHER], tool_choice="none")
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.tool_calls) == ("hi", None)
    assert answer.usage and answer.usage.prompt_tokens == len(server.prompt("Say hi"))


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "go"}}],
    ids=["required", "named"],
)
def test_no_call_is_demanded_while_thinking(server: Server, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.chat("Go", 8, thinking=True, tools=[GO], tool_choice=choice)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] == "Thinking mode does not support this tool_choice"


def test_a_broken_schema_of_a_tool_is_refused(server: Server) -> None:
    broken = function("go", "One step", {"to": {"type": "no-such-type"}})
    broken["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError):
        server.chat("Go", 8, tools=[broken])
