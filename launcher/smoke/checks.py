"""What is asked of the models list and of chat completions, one function a check.

A check returns a few words about what it saw and raises Fault.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from typing import Any

from launcher import health
from launcher.smoke.chat import ANSWER, PATH, QUESTION, ask, question, stream, thought, user
from launcher.smoke.server import Fault, Server, part, shown

THINKING_TOKENS = 64
TOOL_TOKENS = 64
CROWD = 20
CROWD_TOKENS = 8
NO_MODEL = "no-such-model"

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
WEATHER_QUESTION = "Weather in Oslo?"
WEATHER_RESULT = '{"sky": "clear", "celsius": 4}'


def models(server: Server) -> str:
    found = server.get("/v1/models")
    names = health.model_names(found)
    if names is None:
        raise Fault(f"/v1/models answers {shown(found)}", "a list of models")
    if server.model not in names:
        told = ", ".join(names) or "nothing"
        raise Fault(f"/v1/models names {told}", f"{server.model} among them")
    return server.model


def chat(server: Server) -> str:
    """Without thinking."""
    reply = ask(server, question())
    content = reply.message.get("content")
    if not isinstance(content, str) or not content:
        raise Fault(f"the message {shown(reply.message)}", "content that is not empty")
    if thought(reply.message):
        raise Fault(
            f"with thinking disabled the message {shown(reply.message)}", "no reasoning_content"
        )
    _ended(reply.finish)
    return f"{reply.tokens} tokens, {shown(content)}"


def thinking(server: Server) -> str:
    # The API itself chooses the temperature while thinking; the seed makes a rehearsal repeatable.
    body = question(tokens=THINKING_TOKENS, seed=1)
    del body["thinking"]  # on unless it is turned off
    reply = ask(server, body)
    reasoning = reply.message.get("reasoning_content")
    if not isinstance(reasoning, str) or not reasoning.strip():
        raise Fault(f"the message {shown(reply.message)}", "reasoning_content that is not empty")
    _ended(reply.finish)
    if reply.finish == "length" and reply.tokens != THINKING_TOKENS:
        raise Fault(
            f"finish_reason length after {reply.tokens} tokens",
            f"all of max_tokens={THINKING_TOKENS} before that",
        )
    return f"{reply.tokens} tokens, {len(reasoning)} characters of thinking, {reply.finish}"


def streaming(server: Server) -> str:
    """The same answer in one piece and in many."""
    whole, pieces = ask(server, question()), stream(server, question())
    if pieces.text != whole.text:
        raise Fault(
            f"the stream said {shown(pieces.text)}, the answer in one piece {shown(whole.text)}",
            "the same text at temperature 0",
        )
    if pieces.tokens != whole.tokens:
        raise Fault(
            f"the stream had {pieces.tokens} tokens, the answer in one piece {whole.tokens}",
            "the same number",
        )
    if pieces.finish != whole.finish:
        raise Fault(
            f"finish_reason {pieces.finish} in the stream, {whole.finish} in one piece", "the same"
        )
    return f"{pieces.tokens} tokens"


def tools(server: Server) -> str:
    """A call that is demanded, and an answer to its result."""
    body = question(WEATHER_QUESTION, TOOL_TOKENS, tools=[WEATHER])
    asked = ask(server, {**body, "tool_choice": "required"})
    if asked.finish != "tool_calls":
        raise Fault(
            f"finish_reason {asked.finish} with {shown(asked.message)}", "a call: tool_calls"
        )
    calls = part(list, asked.message, "tool_calls")
    results = []
    for call in calls:
        _weather(call)
        result = {"role": "tool", "tool_call_id": call["id"], "content": WEATHER_RESULT}
        results.append(result)
    if not results:
        raise Fault(f"the message {shown(asked.message)}", "a call in tool_calls")
    assistant = {
        "role": "assistant",
        "content": asked.message.get("content") or "",
        "tool_calls": calls,
    }
    history = [user(WEATHER_QUESTION), assistant, *results]
    told = ask(server, {**body, "messages": history, "tool_choice": "none"})
    _ended(told.finish)
    return f"{shown(calls[0]['function']['arguments'])}, then {told.tokens} tokens"


def _weather(call: object) -> None:
    """Demand a call of the tool as its schema wants it."""
    part(str, call, "id")
    name = part(str, call, "function", "name")
    if name != "weather":
        raise Fault(f"a call of {name!r}", "weather, the only tool given")
    text = part(str, call, "function", "arguments")
    try:
        arguments = json.loads(text)
    except ValueError:
        raise Fault(f"arguments {shown(text)}", "JSON") from None
    if not isinstance(arguments, dict) or not isinstance(arguments.get("city"), str):
        raise Fault(f"arguments {shown(text)}", 'as its schema says: {"city": a string}')


def errors(server: Server) -> str:
    """What cannot be served is refused in the official words' shape."""
    for told, wrong in (("an unknown model", {"model": NO_MODEL}), ("n=2", {"n": 2})):
        answer = server.send(PATH, {**question(), **wrong})
        if answer.status != 400:
            raise Fault(
                f"{told} is answered with HTTP {answer.status}: {answer.excerpt()}", "HTTP 400"
            )
        error = part(dict, answer.json(), "error")
        if not {"message", "type", "param", "code"} <= error.keys() or not error["message"]:
            raise Fault(
                f"{told} is answered with {answer.excerpt()}",
                '{"error": {"message", "type", "param", "code"}}',
            )
    return "an unknown model and n=2 are refused"


def crowd(server: Server) -> str:
    """Many at once."""
    ended: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()

    def one() -> None:
        try:
            reply = ask(server, question(tokens=CROWD_TOKENS))
            if not reply.text:
                raise Fault(f"the message {shown(reply.message)}", "text that is not empty")
            ended.put(reply.tokens)
        except BaseException as error:
            ended.put(error)

    began = time.monotonic()
    for _ in range(CROWD):
        threading.Thread(target=one, daemon=True).start()  # Ctrl-C does not wait for a daemon
    outcomes = [ended.get() for _ in range(CROWD)]
    seconds = time.monotonic() - began
    faults = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in faults:
        if not isinstance(error, Fault):
            raise error
        raise Fault(
            f"{len(faults)} of {CROWD} failed; the first: {error.found}", error.needed
        ) from error
    tokens = sum(outcome for outcome in outcomes if isinstance(outcome, int))
    return f"{CROWD} chats, {tokens} tokens, {tokens / seconds:.1f} tokens/s"


def answer(server: Server) -> str:
    """A sum, twice: whether the server computes, and computes the same."""
    first, second = ask(server, question()), ask(server, question())
    if first.text != second.text:
        raise Fault(
            f"the same request gave {first.text!r} and then {second.text!r}",
            "the same text twice at temperature 0",
        )
    if ANSWER not in first.text:
        raise Fault(
            f"{QUESTION!r} was answered with {first.text!r}",
            f"{ANSWER}: the server computes something wrong",
        )
    return f"{first.text!r} twice"


def _ended(finish: str) -> None:
    if finish not in ("stop", "length"):
        raise Fault(f"finish_reason {finish}", "stop or length")
