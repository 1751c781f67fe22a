"""One chat completion, asked for in one piece or as a stream, and read as the official API's."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.smoke.server import NO_THINKING, Fault, Server, parsed, part, shown

PATH = "/v1/chat/completions"
QUESTION = "What is 17*19? Reply with the integer only."
ANSWER = "323"
TOKENS = 32
DONE = "[DONE]"


@dataclass(frozen=True)
class Reply:
    message: Mapping[str, Any]
    finish: str
    tokens: int

    @property
    def text(self) -> str:
        return said(self.message)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def question(text: str = QUESTION, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    """A request without thinking, that always gets the same answer."""
    return {
        "messages": [user(text)],
        "max_tokens": tokens,
        "temperature": 0,
        # An answer that starts from the prefix cache may differ in the last bits, since the
        # sliding window is replayed; a salt of its own keeps each request out of it.
        "cache_salt": uuid.uuid4().hex,
        **NO_THINKING,
        **more,
    }


def ask(server: Server, body: Mapping[str, Any]) -> Reply:
    found = server.post(PATH, body)
    choice = part(dict, found, "choices", 0)
    tokens = usage(part(dict, found, "usage"))
    return Reply(part(dict, choice, "message"), _finish(choice.get("finish_reason")), tokens)


def stream(server: Server, body: Mapping[str, Any]) -> Reply:
    """The pieces put together."""
    body = {**body, "stream_options": {"include_usage": True}}
    message = {"reasoning_content": "", "content": ""}
    finish = None
    piece: dict[str, Any] = {}
    for event in server.events(PATH, body):
        if event.data == DONE:
            break
        piece = parsed(PATH, event)
        for choice in part(list, piece, "choices"):
            delta = part(dict, choice, "delta")
            message["reasoning_content"] += thought(delta)
            message["content"] += str(delta.get("content") or "")
            finish = choice.get("finish_reason") or finish
    else:
        raise Fault(
            f"the stream of {PATH} ended without {DONE}, after {shown(piece)}",
            f"data: {DONE} as its last event",
        )
    try:
        tokens = usage(part(dict, piece, "usage"))
    except Fault as fault:
        raise Fault(f"the last piece of the stream: {fault.found}", fault.needed) from fault
    return Reply(message, _finish(finish), tokens)


def usage(found: Mapping[str, Any]) -> int:
    """The number of tokens generated, from figures that agree with one another."""

    def number(*way: str) -> int:
        return part(int, found, *way)

    prompt, completion = number("prompt_tokens"), number("completion_tokens")
    hit, miss = number("prompt_cache_hit_tokens"), number("prompt_cache_miss_tokens")
    rules = {
        "total_tokens = prompt_tokens + completion_tokens": (
            number("total_tokens") == prompt + completion
        ),
        "prompt_cache_hit_tokens + prompt_cache_miss_tokens = prompt_tokens": hit + miss == prompt,
        "prompt_tokens_details.cached_tokens = prompt_cache_hit_tokens": (
            number("prompt_tokens_details", "cached_tokens") == hit
        ),
        "at least one token in the prompt": prompt > 0,
    }
    for rule, holds in rules.items():
        if not holds:
            raise Fault(f"usage {shown(found)}", rule)
    return completion


def thought(message: Mapping[str, Any]) -> str:
    """The thinking: DeepSeek's name for it, or vLLM's own."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def said(message: Mapping[str, Any]) -> str:
    """All the text of a message, thinking included."""
    return thought(message) + str(message.get("content") or "")


def _finish(reason: object) -> str:
    if reason not in ("stop", "length", "tool_calls"):
        raise Fault(f"finish_reason {shown(reason)}", "stop, length or tool_calls")
    return str(reason)
