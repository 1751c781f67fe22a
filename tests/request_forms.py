"""One conversation in the three APIs' forms, and the kit's dialect put into a request of each."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_overlay.serving.dialect import Protocol

Body = dict[str, Any]
Call = tuple[str, str, Body]  # id, name, arguments
Tool = tuple[str, str, Any, bool]  # name, description, schema, strict

_PIXEL = "iVBORw0KGgo="  # never decoded where only prompts are made


@dataclass
class Turn:
    """``role``: user, assistant or tool. ``results``: (id of the call, text)."""

    role: str
    text: str = ""
    reasoning: str | None = None
    calls: Sequence[Call] = ()
    results: Sequence[tuple[str, str]] = ()
    picture: bool = False
    prefix: bool = False


@dataclass
class Talk:
    """None and False: not named in the request. ``choice``: auto, none, required or a tool's name.
    ``json``, ``schema``: the form of the answer. ``late_system``: a system message at the end."""

    turns: list[Turn]
    system: str | None = None
    late_system: str | None = None
    tools: list[Tool] = field(default_factory=list)
    thinking: bool | None = None
    effort: str | None = None
    choice: str | None = None
    json: bool = False
    schema: Any = None


def chat(talk: Talk) -> Body:
    messages: list[Body] = []
    if talk.system is not None:
        messages.append({"role": "system", "content": talk.system})
    for turn in talk.turns:
        messages += _chat_turn(turn)
    if talk.late_system is not None:
        messages.append({"role": "system", "content": talk.late_system})
    body: Body = {"messages": messages}
    if talk.tools:
        body["tools"] = [
            {"type": "function", "function": _function(tool, "parameters")} for tool in talk.tools
        ]
    if talk.thinking is not None:
        body["thinking"] = {"type": "enabled" if talk.thinking else "disabled"}
    if talk.effort is not None:
        body["reasoning_effort"] = talk.effort
    if talk.choice is not None:
        words = ("auto", "none", "required")
        named = {"type": "function", "function": {"name": talk.choice}}
        body["tool_choice"] = talk.choice if talk.choice in words else named
    if talk.schema is not None:
        schema = {"name": "answer", "schema": talk.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif talk.json:
        body["response_format"] = {"type": "json_object"}
    return body


def _chat_turn(turn: Turn) -> list[Body]:
    if turn.role == "tool":
        return [{"role": "tool", "tool_call_id": i, "content": text} for i, text in turn.results]
    message: Body = {"role": turn.role, "content": turn.text}
    if turn.picture:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PIXEL}"}}
        message["content"] = [{"type": "text", "text": turn.text}, picture]
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
            for i, n, a in turn.calls
        ]
    if turn.prefix:
        message["prefix"] = True
    return [message]


def responses(talk: Talk) -> Body:
    items: list[Body] = []
    for turn in talk.turns:
        items += _items(turn)
    if talk.late_system is not None:
        items.append({"role": "developer", "content": talk.late_system})
    body: Body = {"input": items}
    if talk.system is not None:
        body["instructions"] = talk.system
    if talk.tools:
        body["tools"] = [
            {"type": "function", **_function(tool, "parameters")} for tool in talk.tools
        ]
    effort = "none" if talk.thinking is False else talk.effort
    if effort is not None:
        body["reasoning"] = {"effort": effort}
    if talk.choice is not None:
        words = ("auto", "none", "required")
        named = {"type": "function", "name": talk.choice}
        body["tool_choice"] = talk.choice if talk.choice in words else named
    if talk.schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": talk.schema}}
    elif talk.json:
        body["text"] = {"format": {"type": "json_object"}}
    return body


def _items(turn: Turn) -> list[Body]:
    if turn.role == "tool":
        return [
            {"type": "function_call_output", "call_id": i, "output": text}
            for i, text in turn.results
        ]
    kind = "output_text" if turn.role == "assistant" else "input_text"
    content: list[Body] = [{"type": kind, "text": turn.text}]
    if turn.picture:
        content.append({"type": "input_image", "image_url": f"data:image/png;base64,{_PIXEL}"})
    items: list[Body] = []
    if turn.reasoning is not None:
        told = [{"type": "reasoning_text", "text": turn.reasoning}]
        items.append({"type": "reasoning", "summary": [], "content": told})
    items.append({"type": "message", "role": turn.role, "content": content})
    items += [
        {"type": "function_call", "call_id": i, "name": n, "arguments": json.dumps(a)}
        for i, n, a in turn.calls
    ]
    return items


def messages(talk: Talk) -> Body:
    made = [_blocks(turn) for turn in talk.turns]
    body: Body = {"max_tokens": 100, "messages": made}
    if talk.system is not None:
        body["system"] = talk.system
    if talk.late_system is not None:
        made.append({"role": "system", "content": talk.late_system})
    if talk.tools:
        body["tools"] = [_function(tool, "input_schema") for tool in talk.tools]
    if talk.thinking is not None:
        body["thinking"] = {"type": "enabled" if talk.thinking else "disabled"}
    config: Body = {}
    if talk.effort is not None:
        config["effort"] = talk.effort
    if talk.schema is not None:
        config["format"] = {"type": "json_schema", "schema": talk.schema}
    if config:
        body["output_config"] = config
    if talk.choice is not None:
        kinds = {"auto": "auto", "none": "none", "required": "any"}
        named = {"type": "tool", "name": talk.choice}
        body["tool_choice"] = {"type": kinds[talk.choice]} if talk.choice in kinds else named
    return body


def _blocks(turn: Turn) -> Body:
    if turn.role == "tool":
        results = [
            {"type": "tool_result", "tool_use_id": i, "content": text} for i, text in turn.results
        ]
        return {"role": "user", "content": results}
    content: list[Body] = [{"type": "text", "text": turn.text}]
    if turn.reasoning is not None:
        content.insert(0, {"type": "thinking", "thinking": turn.reasoning, "signature": "s"})
    if turn.picture:
        source = {"type": "base64", "media_type": "image/png", "data": _PIXEL}
        content.append({"type": "image", "source": source})
    content += [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in turn.calls]
    return {"role": turn.role, "content": content}


def _function(tool: Tool, schema_key: str) -> Body:
    name, description, schema, strict = tool
    made = {"name": name, "description": description, schema_key: schema}
    return {**made, "strict": True} if strict else made


FORMS: Mapping[Protocol, Callable[[Talk], Body]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
}

_WORD_OF = {50: "low", 75: "high", 100: "max"}


def with_dialect(
    draw: random.Random, body: Body, protocol: Protocol
) -> tuple[Body, Body, int | None]:
    """(the request in the kit's dialect, in official words, the number that its prompt names)."""
    spoken, official = copy.deepcopy(body), copy.deepcopy(body)
    if protocol == "chat":
        for message in spoken["messages"]:
            if message["role"] == "system":
                message["role"] = draw.choice(("system", "developer"))
            if "reasoning_content" in message and draw.random() < 0.5:
                message["reasoning"] = message.pop("reasoning_content")
        if "max_tokens" in spoken and draw.random() < 0.5:
            spoken["max_completion_tokens"] = spoken.pop("max_tokens")
    more = {"min_p": 0.25, "repetition_penalty": 1.25, "min_tokens": 3, "cache_salt": "mine"}
    name = draw.choice((*more, None))
    if name is not None:
        spoken[name] = more[name]
    template: Body = {}
    if draw.random() < 0.4:
        template[draw.choice(("thinking", "enable_thinking"))] = thinking = draw.random() < 0.5
        _think(official, protocol, thinking)
    effort = _effort(draw, spoken, official, template, protocol)
    if template:
        spoken["chat_template_kwargs"] = template
    return spoken, official, effort


def _think(official: Body, protocol: Protocol, thinking: bool) -> None:
    """An official field for the same thing wins."""
    if protocol != "responses":
        official.setdefault("thinking", {"type": "enabled" if thinking else "disabled"})
    elif not thinking:
        official.setdefault("reasoning", {"effort": "none"})


def _effort(
    draw: random.Random, spoken: Body, official: Body, template: Body, protocol: Protocol
) -> int | None:
    """Puts a number where an effort goes, in one of its places."""
    number = draw.choice((None, 1, 25, 50, 75, 99, 100))
    if number is None:
        return None
    said = draw.choice((number, str(number)))
    holder, key = {
        "chat": (None, "reasoning_effort"),
        "responses": ("reasoning", "effort"),
        "messages": ("output_config", "effort"),
    }[protocol]
    place = spoken if holder is None else spoken.get(holder, {})
    named = official if holder is None else official.get(holder, {})
    if draw.random() < 0.5:
        template["reasoning_effort"] = said
        if key in named:
            return None
    else:
        place[key] = said
        if holder is not None:
            spoken[holder] = place
    named[key] = _WORD_OF.get(number, "high")
    if holder is not None:
        official[holder] = named
    return None if number in _WORD_OF else number
