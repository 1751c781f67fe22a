"""The official anthropic client: Messages, whole and as a stream, tools, counting and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock

from clients.server import (
    MODEL,
    TELL,
    Server,
    anthropic_client,
    async_anthropic_client,
    user,
)
from clients.tools import CALL_TOKENS, WAY, object_of

pytestmark = pytest.mark.rehearsal

OFF: dict[str, Any] = {"thinking": {"type": "disabled"}}
#: The client's method has no temperature; the API has.
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
PLAIN: dict[str, Any] = {"model": MODEL, **OFF, **GREEDY}
SAY_HI: dict[str, Any] = {"messages": [user("Say hi")], "max_tokens": 8}
COUNTED: dict[str, Any] = {"model": MODEL, "messages": SAY_HI["messages"]}
THOUGHTS = 6
TOOL: dict[str, Any] = {
    "name": "go",
    "description": "One step",
    "input_schema": object_of(WAY),
}


def prompt_tokens(message: Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_message(server: Server) -> None:
    message = server.anthropic.messages.create(**PLAIN, **SAY_HI)
    (block,) = message.content
    assert isinstance(block, TextBlock) and block.text == "hi"
    assert (message.role, message.stop_reason) == ("assistant", "end_turn")
    assert prompt_tokens(message) == len(server.prompt("Say hi"))
    assert message.usage.output_tokens == 2


def test_a_stream_of_text(server: Server) -> None:
    with server.anthropic.messages.stream(**PLAIN, **SAY_HI) as stream:
        assert "".join(stream.text_stream) == "hi"
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == 2


def test_a_stream_of_thinking_cut_off(server: Server) -> None:
    """Thinking is on by itself, and its block comes first."""
    asked = {"model": MODEL, "messages": [user(TELL)], "max_tokens": THOUGHTS, "stream": True}
    more = {"extra_body": {"ignore_eos": True}}
    events = list(server.anthropic.messages.create(**asked, **more))
    kinds = [event.type for event in events if event.type != "ping"]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    block = next(e.content_block for e in events if e.type == "content_block_start")
    assert isinstance(block, ThinkingBlock)
    pieces = [e.delta for e in events if e.type == "content_block_delta"]
    assert "".join(piece.thinking for piece in pieces if piece.type == "thinking_delta")
    assert pieces[-1].type == "signature_delta" and pieces[-1].signature
    last = next(e for e in events if e.type == "message_delta")
    assert last.delta.stop_reason == "max_tokens" and last.usage.output_tokens == THOUGHTS


def test_a_tool_and_its_result(server: Server) -> None:
    history: list[Any] = [user("Go")]
    more = {**PLAIN, "tools": [TOOL]}
    message = server.anthropic.messages.create(
        messages=history,
        max_tokens=CALL_TOKENS,
        tool_choice={"type": "tool", "name": "go"},
        **more,
    )
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert isinstance(call, ToolUseBlock) and call.name == "go"
    assert call.input in ({"to": "up"}, {"to": "down"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    history += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    told = server.anthropic.messages.create(messages=history, max_tokens=4, **more)
    assert prompt_tokens(told) > prompt_tokens(message)
    assert (told.usage.cache_read_input_tokens or 0) > 0
    counted = server.anthropic.messages.count_tokens(
        model=MODEL, messages=history, tools=[TOOL], **OFF
    )
    assert counted.input_tokens == prompt_tokens(told)


def test_blocks_of_a_system_text_are_the_text(server: Server) -> None:
    blocks: list[Any] = [{"type": "text", "text": t} for t in ("Be brief.", "Be kind.")]
    message = server.anthropic.messages.create(system=blocks, **PLAIN, **SAY_HI)
    count = server.anthropic.messages.count_tokens
    asked = {**COUNTED, **OFF}
    assert count(system=blocks, **asked).input_tokens == prompt_tokens(message)
    text = count(system="Be brief.\n\nBe kind.", **asked).input_tokens
    assert abs(text - prompt_tokens(message)) <= 2  # but for what joins them
    assert prompt_tokens(message) > count(**asked).input_tokens


def test_thinking_is_counted_as_it_is_asked_for(server: Server) -> None:
    count = server.anthropic.messages.count_tokens
    message = server.anthropic.messages.create(
        max_tokens=2, thinking={"type": "enabled", "budget_tokens": 1024}, **COUNTED
    )
    assert count(**COUNTED).input_tokens == prompt_tokens(message)
    assert count(**COUNTED, **OFF).input_tokens == len(server.prompt("Say hi"))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model": "no-such-model"}, "but you passed no-such-model"),
        ({"messages": []}, "messages"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "name"),
    ],
    ids=["model", "no messages", "tool name"],
)
def test_a_bad_request_is_refused(server: Server, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        server.anthropic.messages.create(**{**PLAIN, **SAY_HI, **changed})
    body = caught.value.body
    assert isinstance(body, dict) and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert told in body["error"]["message"]


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key"])
def test_the_key_is_taken_in_either_header(server: Server, header: str) -> None:
    """Anthropic's clients have sent it as the one or the other."""
    for key, fits in ((server.api.key, True), ("another-key", False)):
        value = f"Bearer {key}" if header == "Authorization" else key
        with anthropic_client(server.api, {header: value}) as client:
            if fits:
                assert client.messages.count_tokens(**COUNTED).input_tokens
                continue
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(**PLAIN, **SAY_HI)
            body = caught.value.body
            assert isinstance(body, dict) and body["error"]["type"] == "authentication_error"


def test_the_async_client(server: Server) -> None:
    async def ask() -> None:
        async with async_anthropic_client(server.api) as client:

            async def stream() -> str:
                asked = {"messages": [user("Say bye")], "max_tokens": 8}
                async with client.messages.stream(**PLAIN, **asked) as texts:
                    return "".join([text async for text in texts.text_stream])

            message, text, counted = await asyncio.gather(
                client.messages.create(**PLAIN, **SAY_HI),
                stream(),
                client.messages.count_tokens(**COUNTED, **OFF),
            )
            assert isinstance(message.content[0], TextBlock) and message.content[0].text == "hi"
            assert text == "bye" and counted.input_tokens == prompt_tokens(message)
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(**{**PLAIN, **SAY_HI, "model": "no-such-model"})

    asyncio.run(ask())
