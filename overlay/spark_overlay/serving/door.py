"""What stands before vLLM's own middleware: the official API's paths, Anthropic's way to send a
key, and the official words for a wrong one. Pure ASGI.

The official base URLs are https://api.deepseek.com, with and without /v1, and …/anthropic for
Anthropic's clients: an application that moves changes the host alone. Paths become those of vLLM
before a key is asked for, which vLLM does by path.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_overlay.serving.errors import ApiError

_MESSAGES = "/v1/messages"
_OFFICIAL = {
    **{path: f"/v1{path}" for path in ("/chat/completions", "/responses", "/models")},
    **{f"/anthropic{path}": path for path in (_MESSAGES, f"{_MESSAGES}/count_tokens")},
}
_WRONG = ApiError(401, "Authentication Fails: no valid API key was given")


class Door:
    """``x-api-key: KEY`` on the Messages API counts as ``Authorization: Bearer KEY``; an official
    path is the same under /v1; and every 401 has the official body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root)
        path = _OFFICIAL.get(path, path)
        scope = {**scope, "path": root + path, "headers": list(scope["headers"])}
        if messages := path.startswith(_MESSAGES):
            headers = MutableHeaders(scope=scope)
            if "authorization" not in headers and "x-api-key" in headers:
                headers["authorization"] = f"Bearer {headers['x-api-key']}"
        refused = False

        async def told(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 401:
                refused = True
                body = _WRONG.json(messages)
                headers = MutableHeaders(raw=list(message["headers"]))
                headers["content-type"] = "application/json"
                headers["content-length"] = str(len(body))
                await send({**message, "headers": headers.raw})
                await send({"type": "http.response.body", "body": body, "more_body": False})
            elif not refused:
                await send(message)

        await self._app(scope, receive, told)
