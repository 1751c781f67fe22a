"""The paths of the API: ours, those of vLLM's that stay, and those that are closed."""

from __future__ import annotations

import json

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from spark_overlay.serving.api import Api
from spark_overlay.serving.errors import ApiError

#: Doors of vLLM's server through which a chat would be rendered or parsed by other rules, or that
#: ask the engine for something without asking for the key (vLLM asks for it under /v1 only).
CLOSED = (
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/decisions",
    "/v1/systemone",
    "/invocations",
    "/generative_scoring",
    "/scale_elastic_ep",
)


class Routes:
    """Puts the routes into ``app``; ``api`` is given when the engine is there."""

    def __init__(self, app: FastAPI) -> None:
        self.api: Api | None = None
        self._tokenize = next(
            (r for r in app.routes if getattr(r, "path", "") == "/tokenize"), None
        )
        for path, handler in (
            ("/v1/chat/completions", self._chat),
            ("/v1/responses", self._responses),
            ("/v1/messages", self._messages),
            ("/v1/messages/count_tokens", self._count),
            ("/tokenize", self._tokens),
            *((path, self._closed) for path in CLOSED),
        ):
            app.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def _chat(self, request: Request) -> Response:
        return await self._ready.answer(request, "chat")

    async def _responses(self, request: Request) -> Response:
        return await self._ready.answer(request, "responses")

    async def _messages(self, request: Request) -> Response:
        return await self._ready.answer(request, "messages")

    async def _count(self, request: Request) -> Response:
        return await self._ready.count(request)

    async def _tokens(self, request: Request) -> Response:
        """A chat by our own prompt; a bare text stays vLLM's."""
        try:
            raw = await self._ready.body(request)
        except ApiError as error:
            return JSONResponse(error.body(), error.status)
        if self._tokenize is None or _has_messages(raw):
            return await self._ready.tokens(raw)
        return _Passed(self._tokenize, raw)

    async def _closed(self, request: Request) -> Response:
        error = ApiError(
            404,
            f"{request.url.path} is not offered: it would not speak as the official API does; "
            "chats go to /v1/chat/completions, /v1/responses or /v1/messages",
        )
        return JSONResponse(error.body(), error.status)

    @property
    def _ready(self) -> Api:
        if self.api is None:
            raise RuntimeError("the API was asked before vLLM had made its state")
        return self.api


class _Passed(Response):
    """The answer of another route to the same request, whose body has been read already."""

    def __init__(self, route: object, raw: bytes) -> None:
        super().__init__()
        self._route, self._raw = route, raw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread = [self._raw]

        async def again() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        await self._route.app(scope, again, send)  # type: ignore[attr-defined]


def _has_messages(raw: bytes) -> bool:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and "messages" in body
