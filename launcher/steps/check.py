"""The step that asks the API as a user would: a chat, the same again, and the same as a stream."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from launcher.errors import LauncherError
from launcher.http import Api, NoAnswer
from launcher.steps.base import Context, Step, fingerprint
from launcher.steps.ready import api_of, recorded

PATH = "/v1/chat/completions"
TIMEOUT = 120.0  # seconds for one answer
TOKENS = 32
QUESTION = "What is 17*19? Reply with the integer only."
ANSWER = "323"


@dataclass(frozen=True)
class Check(Step):
    key: str = "check"
    title: str = "check (17*19, the same again, and streamed)"
    needs: tuple[str, ...] = ("launch",)

    def inputs(self, ctx: Context) -> str:
        return fingerprint({"launch_id": recorded(ctx).launch_id, "question": QUESTION})

    def done(self, ctx: Context) -> bool:
        return True  # of this very launch; health proves the moment

    def do(self, ctx: Context) -> None:
        api, model = api_of(ctx), recorded(ctx).served_model_name
        log = ctx.runtime.log_path("head")
        try:
            first, count = chat(api, model)
            ctx.console.progress(f"a chat of {count} tokens answered")
            second, _ = chat(api, model)
            if first != second:
                raise LauncherError(
                    f"the same request gave {first!r} and then {second!r}",
                    "the same text twice at temperature 0",
                    "./start.sh restart; if it stays, keep both logs and report it",
                    log,
                )
            if ANSWER not in first:
                raise LauncherError(
                    f"{QUESTION!r} was answered with {first!r}",
                    f"{ANSWER}",
                    "the ranks compute something wrong: ./start.sh restart; if it stays, keep both"
                    " logs and report it",
                    log,
                )
            streamed = stream(api, model)
        except NoAnswer as fault:
            raise LauncherError(
                f"the API failed in the check: {fault}",
                "a chat completion",
                "./start.sh status, then ./start.sh logs",
                log,
            ) from fault
        if streamed != count:
            raise LauncherError(
                f"the stream had {streamed} tokens, the answer in one piece {count}",
                "the same number",
                "./start.sh restart; if it stays, keep both logs and report it",
                log,
            )
        ctx.record.event(self.key, "answered", text=first, tokens=count)


def request(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
        # An answer that starts from the prefix cache may differ in the last bits, since the
        # sliding window is replayed; a salt of its own keeps each request out of it.
        "cache_salt": uuid.uuid4().hex,
    }


def chat(api: Api, model: str) -> tuple[str, int]:
    """The text of one answer, thinking included, and its number of tokens.

    Raises NoAnswer for anything that is no chat completion.
    """
    answer = api.post(PATH, request(model), TIMEOUT)
    if answer.status != 200:
        raise NoAnswer(f"HTTP {answer.status} on {PATH}: {answer.excerpt()}")
    body = answer.json()
    try:
        count = int(body["usage"]["completion_tokens"])
        text = said(body["choices"][0]["message"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise NoAnswer(f"{PATH} is no chat completion: {answer.excerpt()}") from None
    if count < 1:
        raise NoAnswer(f"{PATH} generated nothing: {answer.excerpt()}")
    return text, count


def stream(api: Api, model: str) -> int:
    """The number of tokens of the same answer as a stream that ends as it should."""
    body = {**request(model), "stream_options": {"include_usage": True}}
    count = pieces = 0
    last = ""
    for last in api.stream(PATH, body, TIMEOUT):
        if last == "[DONE]":
            break
        try:
            piece = json.loads(last)
            pieces += len(piece["choices"])
            if piece.get("usage"):
                count = int(piece["usage"]["completion_tokens"])
        except (KeyError, TypeError, ValueError):
            raise NoAnswer(f"{PATH} streamed something else than pieces: {last[:200]}") from None
    if last != "[DONE]":
        raise NoAnswer(f"the stream of {PATH} ended after {pieces} pieces without [DONE]")
    return count


def said(message: dict[str, Any]) -> str:
    return "".join(
        str(message.get(name) or "") for name in ("reasoning", "reasoning_content", "content")
    )
