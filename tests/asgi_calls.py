"""Requests to the API without a socket or an engine: ASGI messages, and an engine that says what it
is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_overlay.serving.api import Api
from spark_overlay.serving.dialect import Protocol
from spark_overlay.serving.errors import ApiError
from spark_overlay.serving.prompt import Prompts
from spark_overlay.serving.sampling import Sampling
from spark_overlay.serving.step import Step

#: What the engine does next: says a step, fails, or waits for something.
Act = Step | Exception | Callable[[], Awaitable[object]]


@dataclass
class Generated:
    """One request as the engine has it."""

    ids: Sequence[int]
    sampling: Sampling
    reasons_first: bool
    salt: str | None
    steps: int = 0
    ended: bool = False


@dataclass
class ScriptedEngine:
    """step.Engine. ``script`` gives the acts of each request anew."""

    script: Callable[[], Iterable[Act]]
    context: int = 4096
    sees_images: bool = False
    image_tokens: int = 0  # what the prompt is longer by in the engine
    requests: list[Generated] = field(default_factory=list)
    _kept: list[AsyncGenerator[Step, None]] = field(default_factory=list)

    def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        reasons_first: bool,
        salt: str | None = None,
        images: Sequence[Any] = (),
    ) -> AsyncGenerator[Step, None]:
        request = Generated(ids, sampling, reasons_first, salt)
        self.requests.append(request)
        # A generator that nobody holds is closed by the garbage collector: only who closes it
        # ends the request here.
        self._kept.append(self._steps(request))
        return self._kept[-1]

    async def _steps(self, request: Generated) -> AsyncGenerator[Step, None]:
        try:
            for act in self.script():
                if isinstance(act, Step):
                    request.steps += 1
                    yield replace(act, prompt=len(request.ids) + self.image_tokens)
                elif isinstance(act, Exception):
                    raise act
                else:
                    await act()
        finally:
            request.ended = True

    def refusal(self, error: Exception) -> ApiError | None:
        return error if isinstance(error, ApiError) else None


@dataclass
class Got:
    """What a client has got. ``parts``: the body as it came."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The server-sent events, comments left out."""
        text = self.body.decode()
        assert text.endswith("\n\n"), text
        return [f"{e}\n\n" for e in text[:-2].split("\n\n") if not e.startswith(":")]


def endpoint(prompts: Prompts, engine: ScriptedEngine, protocol: Protocol) -> ASGIApp:
    """A path of the API. When it has answered, no request may be left in the engine."""
    api = Api(prompts, engine, "official")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await api.answer(Request(scope, receive), protocol)
        await response(scope, receive, send)
        assert all(request.ended for request in engine.requests), "left in the engine"

    return app


async def call(
    app: ASGIApp,
    body: bytes = b"",
    *,
    path: str = "/",
    headers: dict[str, str] | None = None,
    leaves: asyncio.Event | None = None,
) -> Got:
    """``leaves``: when it is set, the client goes away."""
    got, unread = Got(), [body[: len(body) // 2], body[len(body) // 2 :]]
    never = asyncio.Event()

    async def receive() -> Message:
        if unread:
            part = unread.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(unread)}
        await (leaves or never).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        assert not got.complete, f"after the end: {message}"
        if message["type"] == "http.response.start":
            assert not got.status, "a second start"
            got.status = message["status"]
            got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            assert got.status, "a body before the start"
            got.parts.append(message["body"])
            got.complete = not message.get("more_body", False)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
    }
    await app(scope, receive, send)
    return got


def run(calls: Callable[[], Awaitable[Any]]) -> Any:
    """The result; nothing that the calls have started may be left."""

    async def whole() -> Any:
        result = await asyncio.wait_for(calls(), 20)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left running: {left}"
        return result

    return asyncio.run(whole())
