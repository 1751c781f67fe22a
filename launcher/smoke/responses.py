"""What is asked of /v1/responses, in one piece and as a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.smoke.chat import QUESTION
from launcher.smoke.server import Fault, Server, part, shown, typed

PATH = "/v1/responses"
TOKENS = 32
ENDS = {"response.completed": "completed", "response.incomplete": "incomplete"}


def responses(server: Server) -> str:
    body = {
        "input": QUESTION,
        "max_output_tokens": TOKENS,
        "temperature": 0,
        "reasoning": {"effort": "none"},
    }
    whole = server.post(PATH, body)
    _text(whole)
    count = _stream(server, body)
    return f"{whole['status']}; streamed {count} events"


def _text(response: Mapping[str, Any]) -> str:
    """The text of a finished response."""
    status = part(str, response, "status")
    if status not in ENDS.values():
        raise Fault(f"status {status}: {shown(response)}", "completed or incomplete")
    text = "".join(
        part(str, content, "text")
        for item in part(list, response, "output")
        if part(str, item, "type") == "message"
        for content in part(list, item, "content")
        if part(str, content, "type") == "output_text"
    )
    if not text:
        raise Fault(
            f"output {shown(response['output'])}", "a message with output_text that is not empty"
        )
    used = part(dict, response, "usage")
    names = ("input_tokens", "output_tokens", "total_tokens")
    given, made, total = (part(int, used, name) for name in names)
    if total != given + made:
        raise Fault(f"usage {shown(used)}", "total_tokens = input_tokens + output_tokens")
    return text


def _stream(server: Server, body: Mapping[str, Any]) -> int:
    """The number of events of a stream that is whole."""
    kind, event, text = "nothing", dict[str, Any](), ""
    numbers = list[int]()
    for sent in server.events(PATH, body):
        kind, event = typed(PATH, sent)
        numbers.append(part(int, event, "sequence_number"))
        if len(numbers) > 1 and numbers[-1] != numbers[-2] + 1:
            raise Fault(
                f"in the stream {kind} is number {numbers[-1]}, after number {numbers[-2]}",
                "sequence_number rising by 1",
            )
        if kind == "response.output_text.delta":
            text += part(str, event, "delta")
    if kind not in ENDS:
        raise Fault(f"the stream ended with {kind}", " or ".join(ENDS))
    response = part(dict, event, "response")
    final = _text(response)
    if response["status"] != ENDS[kind]:
        raise Fault(f"{kind} with status {response['status']}", ENDS[kind])
    if text != final:
        raise Fault(
            f"the pieces of the stream say {shown(text)}, its end says {shown(final)}",
            "the same text",
        )
    return len(numbers)
