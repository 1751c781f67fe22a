"""What is asked of /v1/messages, in one piece and as a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.smoke.chat import QUESTION, user
from launcher.smoke.server import NO_THINKING, Fault, Server, part, shown, typed

PATH = "/v1/messages"
TOKENS = 32


def messages(server: Server) -> str:
    body = {
        "max_tokens": TOKENS,
        "messages": [user(QUESTION)],
        "temperature": 0,
        **NO_THINKING,
    }
    whole = server.post(PATH, body)
    kind, block = part(str, whole, "type"), part(str, whole, "content", 0, "type")
    if (kind, block) != ("message", "text"):
        raise Fault(f"a {kind} with {block}: {shown(whole)}", "a message with text")
    if not part(str, whole, "content", 0, "text"):
        raise Fault(f"content {shown(whole['content'])}", "text that is not empty")
    _stopped(part(str, whole, "stop_reason"))
    for name in ("input_tokens", "output_tokens"):
        part(int, whole, "usage", name)
    count = _stream(server, body)
    return f"{whole['stop_reason']}; streamed {count} events"


def _stream(server: Server, body: Mapping[str, Any]) -> int:
    """The number of events of a stream that is whole."""
    kinds = list[str]()
    text = ""
    reason: str | None = None
    for sent in server.events(PATH, body):
        kind, event = typed(PATH, sent)
        kinds.append(kind)
        if kind == "content_block_delta" and part(str, event, "delta", "type") == "text_delta":
            text += part(str, event, "delta", "text")
        if kind == "message_delta":
            reason = part(str, event, "delta", "stop_reason")
    ends = [kinds[0], kinds[-1]] if kinds else []
    if ends != ["message_start", "message_stop"]:
        raise Fault(
            f"a stream that goes {shown(kinds)}", "message_start first and message_stop last"
        )
    if not text:
        raise Fault(f"a stream without text: {shown(kinds)}", "text_delta that is not empty")
    _stopped(reason)
    return len(kinds)


def _stopped(reason: str | None) -> None:
    if reason not in ("end_turn", "max_tokens"):
        raise Fault(f"stop_reason {shown(reason)}", "end_turn or max_tokens")
