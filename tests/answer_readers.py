"""What a client reads in an answer of each API, in one piece or as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_overlay.serving.dialect import Protocol

Body = dict[str, Any]


@dataclass
class Told:
    """An answer as its reader has it. ``reason``: stop, length, calls or filter."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reason: str = ""
    tokens: int = -1
    cached: int = -1
    logprobs: list[Any] = field(default_factory=list)
    stopped_by: str | None = None


_REASONS = {
    "stop": "stop", "end_turn": "stop", "stop_sequence": "stop", "completed": "stop",
    "length": "length", "max_tokens": "length", "incomplete": "length",
    "tool_calls": "calls", "tool_use": "calls",
}  # fmt: skip


def told(protocol: Protocol, text: str) -> Told:
    """From an answer in one piece."""
    body = json.loads(text)
    return {"chat": _chat, "responses": _response, "messages": _message}[protocol](body)


def _chat(body: Body) -> Told:
    (choice,) = body["choices"]
    message, usage = choice["message"], body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return Told(
        message.get("reasoning_content") or "",
        message["content"] or "",
        [(function["name"], function["arguments"]) for function in functions],
        _REASONS[choice["finish_reason"]],
        usage["completion_tokens"],
        usage["prompt_cache_hit_tokens"],
        _logprobs(choice),
    )


def _logprobs(choice: Body) -> list[Any]:
    found = choice.get("logprobs") or {}
    return [*(found.get("reasoning_content") or ()), *(found.get("content") or ())]


def _response(body: Body) -> Told:
    made = Told(reason=_REASONS[body["status"]])
    for item in body["output"]:
        if item["type"] == "reasoning":
            made.reasoning += "".join(part["text"] for part in item["content"])
        elif item["type"] == "message":
            made.content += "".join(part["text"] for part in item["content"])
        else:
            made.calls.append((item["name"], item["arguments"]))
    made.tokens = body["usage"]["output_tokens"]
    made.cached = body["usage"]["input_tokens_details"]["cached_tokens"]
    return made


def _message(body: Body) -> Told:
    made = Told(reason=_REASONS[body["stop_reason"]], stopped_by=body["stop_sequence"])
    for block in body["content"]:
        if block["type"] == "thinking":
            made.reasoning += block["thinking"]
        elif block["type"] == "text":
            made.content += block["text"]
        else:
            made.calls.append((block["name"], json.dumps(block["input"])))
    made.tokens = body["usage"]["output_tokens"]
    made.cached = body["usage"]["cache_read_input_tokens"]
    return made


def heard(protocol: Protocol, events: Iterable[str]) -> Told:
    """From server-sent events, as a client adds them up."""
    put_together = {"chat": _chunks, "responses": _events, "messages": _blocks}[protocol]
    return put_together(list(_payloads(protocol, events)))


def _payloads(protocol: Protocol, events: Iterable[str]) -> Iterator[Body]:
    for event in events:
        assert event.endswith("\n\n"), event
        *names, data = event[:-2].split("\n")
        payload = json.loads(data.removeprefix("data: "))
        expected = [] if protocol == "chat" else [f"event: {payload['type']}"]
        assert names == expected, event
        yield payload


def _chunks(payloads: Sequence[Body]) -> Told:
    made = Told()
    calls: dict[int, tuple[str, str]] = {}
    for payload in payloads:
        for choice in payload["choices"]:
            delta = choice["delta"]
            made.reasoning += delta.get("reasoning_content") or ""
            made.content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                name, arguments = calls.get(call["index"], (function.get("name"), ""))
                calls[call["index"]] = (name, arguments + (function.get("arguments") or ""))
            made.logprobs += _logprobs(choice)
            if choice["finish_reason"] is not None:
                assert not made.reason, "two ends"
                made.reason = _REASONS[choice["finish_reason"]]
        if payload.get("usage") is not None:
            made.tokens = payload["usage"]["completion_tokens"]
            made.cached = payload["usage"]["prompt_cache_hit_tokens"]
    made.calls = [calls[index] for index in sorted(calls)]
    return made


def _events(payloads: Sequence[Body]) -> Told:
    assert [p["sequence_number"] for p in payloads] == list(range(len(payloads)))
    last = payloads[-1]
    assert last["type"] in ("response.completed", "response.incomplete"), last["type"]
    by_deltas, whole = Told(), _response(last["response"])
    names: dict[int, tuple[str, str]] = {}
    for payload in payloads:
        kind = payload["type"]
        if kind == "response.reasoning_text.delta":
            by_deltas.reasoning += payload["delta"]
        elif kind == "response.output_text.delta":
            by_deltas.content += payload["delta"]
        elif kind == "response.output_item.added" and payload["item"]["type"] == "function_call":
            names[payload["output_index"]] = (payload["item"]["name"], "")
        elif kind == "response.function_call_arguments.delta":
            name, arguments = names[payload["output_index"]]
            names[payload["output_index"]] = (name, arguments + payload["delta"])
    by_deltas.calls = list(names.values())
    found = (by_deltas.reasoning, by_deltas.content, by_deltas.calls)
    assert found == (whole.reasoning, whole.content, whole.calls), "deltas are not the last event"
    return whole


def _blocks(payloads: Sequence[Body]) -> Told:
    kinds = [payload["type"] for payload in payloads]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds
    blocks: list[Body] = []
    for payload in payloads:
        if payload["type"] == "content_block_start":
            assert payload["index"] == len(blocks)
            blocks.append(payload["content_block"] | {"json": ""})
        elif payload["type"] == "content_block_delta":
            assert payload["index"] == len(blocks) - 1
            delta, block = payload["delta"], blocks[-1]
            for of, to in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                if of in delta:
                    block[to] += delta[of]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _arguments(block["json"])
    end = payloads[-2]
    return _message({"content": blocks, "usage": end["usage"], **end["delta"]})


def _arguments(text: str) -> Any:
    """The official way with arguments that are no JSON, such as those cut short: there are none."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError:
        return {}
