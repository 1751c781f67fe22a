"""What stands before vLLM's own middleware: Anthropic's way to send a key, and the official words
for a wrong one. Pure ASGI."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_overlay.serving.errors import ApiError

_MESSAGES = "/v1/messages"
_WRONG = ApiError(401, "Authentication Fails: no valid API key was given")


class Door:
    """``x-api-key: KEY`` on the Messages API counts as ``Authorization: Bearer KEY``, and every 401
    has the official body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        messages = scope["path"].removeprefix(scope.get("root_path", "")).startswith(_MESSAGES)
        if messages:
            scope = {**scope, "headers": list(scope["headers"])}
            headers = MutableHeaders(scope=scope)
            if "authorization" not in headers and "x-api-key" in headers:
                headers["authorization"] = f"Bearer {headers['x-api-key']}"
        refused = False

        async def told(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 401:
                refused = True
                body = _WRONG.json(messages)
                headers = [
                    (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode()),
                ]
                await send({**message, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": False})
            elif not refused:
                await send(message)

        await self._app(scope, receive, told)
