"""One HTTP reply that is made while it is sent, and ends when its client leaves.

A long prompt is silent for minutes. So that nothing between gives up, a reply that has nothing to
say sends what its reader skips, as the official API does: comments in an event stream, blank lines
before a JSON body. Until the first byte the status can still be that of an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from spark_overlay.serving.errors import ApiError

log = logging.getLogger("vllm.spark_overlay.serving")

KEEP_ALIVE = 15.0  # seconds of silence
COMMENT = b": keep-alive\n\n"
BLANK = b"\n"


class Reply(Response):
    """``body`` gives the bytes; an exception of it becomes an error by ``known``, which returns
    None for what is no fault of the request. ``stream``: server-sent events, else JSON.
    ``messages``: errors in the shape of the Messages API."""

    def __init__(
        self,
        body: AsyncGenerator[bytes, None],
        *,
        stream: bool,
        messages: bool,
        known: Callable[[Exception], ApiError | None],
        idle: float = KEEP_ALIVE,
    ) -> None:
        self._body, self._stream, self._messages = body, stream, messages
        self._known, self._idle = known, idle
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream" if stream else "application/json"
        # Proxies buffer what they take for a file.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        filler = COMMENT if self._stream else BLANK
        try:
            async with contextlib.aclosing(kept_alive(self._body, self._idle, filler)) as pieces:
                async for piece in pieces:
                    if not started:
                        started = True
                        await self._start(send)
                    await _part(send, piece, more=True)
        except Exception as error:
            told = self._known(error)
            if told is None:
                log.exception("a request failed")
                told = ApiError(500, "the server failed; its log says why")
            if not started:
                response = JSONResponse(told.body(self._messages), told.status)
                return await response(scope, receive, send)
            await _part(send, self._told_late(told), more=True)
        if not started:
            await self._start(send)
        await _part(send, b"", more=False)

    def _told_late(self, error: ApiError) -> bytes:
        """The error inside a reply that had begun."""
        body = error.json(self._messages)
        if not self._stream:
            return body
        return (b"event: error\n" if self._messages else b"") + b"data: " + body + b"\n\n"

    async def _start(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )


async def kept_alive(
    body: AsyncGenerator[bytes, None], idle: float, filler: bytes
) -> AsyncIterator[bytes]:
    """``body``, and ``filler`` whenever it has been silent for ``idle`` seconds."""
    async with contextlib.aclosing(body):
        coming: asyncio.Task[bytes] | None = None
        try:
            while True:
                if coming is None:
                    coming = asyncio.ensure_future(anext(body))
                done, _ = await asyncio.wait({coming}, timeout=idle)
                if not done:
                    yield filler
                    continue
                finished, coming = coming, None
                try:
                    yield finished.result()
                except StopAsyncIteration:
                    return
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)


async def _part(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
