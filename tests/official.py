"""Answers in the shape of DeepSeek's own API, three formats of them, for servers in tests. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Body = dict[str, Any]


def models(*names: str) -> Body:
    return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}


def usage(prompt: int, completion: int, cached: int = 0) -> Body:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }


def chat(message: Mapping[str, Any], used: Body, finish: str = "stop") -> Body:
    choice = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "finish_reason": finish,
        "logprobs": None,
    }
    return {"object": "chat.completion", "choices": [choice], "usage": used}


def chat_stream(message: Mapping[str, str], used: Body, finish: str = "stop") -> list[str]:
    """The payloads: a character each, then the reason, then the usage, then the end."""

    def piece(delta: Body, finish: str | None = None) -> Body:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {"object": "chat.completion.chunk", "choices": [choice], "usage": None}

    made = [piece({"role": "assistant", "content": ""})]
    made += [piece({name: char}) for name, text in message.items() for char in text]
    made += [piece({}, finish), {**piece({}), "choices": [], "usage": used}]
    return [*map(json.dumps, made), "[DONE]"]


def call(name: str, arguments: str) -> Body:
    function = {"name": name, "arguments": arguments}
    return {"id": "call_00_x", "type": "function", "function": function}


def response(text: str, status: str = "completed") -> Body:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "role": "assistant", "status": status, "content": content}
    used = {"input_tokens": 9, "output_tokens": 3, "total_tokens": 12}
    return {"object": "response", "status": status, "output": [item], "usage": used}


def response_events(text: str, status: str = "completed") -> list[Body]:
    made: list[Body] = [{"type": "response.created", "response": {"status": "in_progress"}}]
    made += [{"type": "response.output_text.delta", "delta": char} for char in text]
    made += [{"type": "response.output_text.done", "text": text}]
    made += [{"type": f"response.{status}", "response": response(text, status)}]
    return [{**event, "sequence_number": number} for number, event in enumerate(made)]


def message(text: str, reason: str = "end_turn") -> Body:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "stop_reason": reason,
        "usage": {"input_tokens": 9, "output_tokens": 3},
    }


def message_events(text: str, reason: str = "end_turn") -> list[Body]:
    start = {**message(""), "content": [], "stop_reason": None}
    block = {"type": "text", "text": ""}
    deltas = [{"type": "text_delta", "text": char} for char in text]
    return [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "ping"},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason},
            "usage": {"output_tokens": 3},
        },
        {"type": "message_stop"},
    ]


def refusal(told: str, param: str | None = None) -> Body:
    kind = "invalid_request_error"
    return {"error": {"message": told, "type": kind, "param": param, "code": kind}}


def sent(payloads: Iterable[str]) -> bytes:
    """Chat's server-sent events: without names."""
    return "".join(f"data: {payload}\n\n" for payload in payloads).encode()


def named(events: Iterable[Body]) -> bytes:
    """Those of Responses and Messages."""
    return "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events).encode()
