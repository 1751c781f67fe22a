"""Tools with few possible calls, which a tiny model soon ends, and what is demanded of a call."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import validate
from openai.types.chat import ChatCompletionMessageFunctionToolCall


def object_of(properties: dict[str, Any]) -> dict[str, Any]:
    """A JSON Schema whose properties are all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def function(name: str, told: str, properties: dict[str, Any]) -> dict[str, Any]:
    """A tool of Chat Completions."""
    described = {"name": name, "description": told, "parameters": object_of(properties)}
    return {"type": "function", "function": described}


WAY = {"to": {"type": "string", "enum": ["up", "down"]}}
GO = function("go", "One step", WAY)
TURN = function("turn", "A quarter", {"left": {"type": "boolean"}})
#: Enough for one call of these.
CALL_TOKENS = 64


def parsed(text: str | None) -> Any:
    """JSON, or an error that shows what came instead."""
    try:
        return json.loads(text or "")
    except ValueError:
        raise AssertionError(f"not JSON: {text!r}") from None


def require_calls(
    message: Any, tool: dict[str, Any]
) -> list[ChatCompletionMessageFunctionToolCall]:
    """The calls of a message: at least one, all of the tool, as its schema allows."""
    calls = message.tool_calls
    assert calls, f"no call: {message}"
    for call in calls:
        assert call.type == "function" and call.function.name == tool["function"]["name"], call
        validate(parsed(call.function.arguments), tool["function"]["parameters"])
    return list(calls)
