"""The official openai client: Responses, whole and as a stream of events."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseReasoningItem

from clients.server import MODEL, TELL, Server
from clients.tools import CALL_TOKENS, WAY, object_of, parsed

pytestmark = pytest.mark.rehearsal

#: A seed is no field of Responses, and temperature is the API's while thinking: texts differ.
THOUGHTS = 6
PLAIN: dict[str, Any] = {"model": MODEL, "reasoning": {"effort": "none"}, "temperature": 0}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "go",
    "parameters": object_of(WAY),
    "strict": True,
}

ITEM = ["response.output_item.added", "response.content_part.added"]
ITEM_DONE = ["response.content_part.done", "response.output_item.done"]


def require_usage(response: Response) -> None:
    usage = response.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens <= usage.input_tokens


def test_a_response(server: Server) -> None:
    response = server.openai.responses.create(input="Say hi", max_output_tokens=8, **PLAIN)
    assert (response.status, response.output_text) == ("completed", "hi")
    require_usage(response)
    assert response.usage and response.usage.input_tokens == len(server.prompt("Say hi"))


def test_a_stream_of_events_in_order(server: Server) -> None:
    asked = {**PLAIN, "input": "Say hi", "max_output_tokens": 8, "stream": True}
    events = list(server.openai.responses.create(**asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [kind for kind, _ in groupby(event.type for event in events)] == [
        "response.created",
        "response.in_progress",
        *ITEM,
        "response.output_text.delta",
        "response.output_text.done",
        *ITEM_DONE,
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "hi" and events[-1].response.output_text == "hi"
    require_usage(events[-1].response)


def test_a_stream_that_is_cut_off_while_thinking(server: Server) -> None:
    asked = {"model": MODEL, "input": TELL, "max_output_tokens": THOUGHTS}
    more = {"extra_body": {"ignore_eos": True}}
    events = list(server.openai.responses.create(**asked, stream=True, **more))
    assert [kind for kind, _ in groupby(event.type for event in events)] == [
        "response.created",
        "response.in_progress",
        *ITEM,
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        *ITEM_DONE,
        "response.incomplete",
    ]
    response = events[-1].response
    assert response.incomplete_details.reason == "max_output_tokens"
    (item,) = response.output
    assert isinstance(item, ResponseReasoningItem) and item.content
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == item.content[0].text
    require_usage(response)


def test_a_demanded_call_and_the_answer_to_its_result(server: Server) -> None:
    asked: list[Any] = [{"role": "user", "content": "Go"}]
    response = server.openai.responses.create(
        input=asked, max_output_tokens=CALL_TOKENS, tools=[TOOL], tool_choice="required", **PLAIN
    )
    call = response.output[-1]
    assert isinstance(call, ResponseFunctionToolCall) and call.name == "go"
    assert parsed(call.arguments) in ({"to": "up"}, {"to": "down"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    told = server.openai.responses.create(
        input=[*asked, call, result], max_output_tokens=4, tools=[TOOL], **PLAIN
    )
    require_usage(told)
    assert told.usage and response.usage
    assert told.usage.input_tokens > response.usage.input_tokens
    assert told.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model": "no-such-model"}, "but you passed no-such-model"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
    ids=["model", "not kept"],
)
def test_a_bad_request_is_refused(server: Server, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.responses.create(**{**PLAIN, "input": "Say hi", **changed})
    assert isinstance(caught.value.body, dict)
    assert told in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"
