"""The three APIs: a request's bytes in, a reply out. What one request goes through:

bytes → prompt.Prompts.read → sampling.sampling → step.Engine.generate → answer.Answer → Reply
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from spark_overlay.serving.answer import Answer, Usage
from spark_overlay.serving.dialect import Protocol
from spark_overlay.serving.errors import ApiError
from spark_overlay.serving.pictures import pictures
from spark_overlay.serving.prompt import Asked, Prompts
from spark_overlay.serving.reply import Reply
from spark_overlay.serving.sampling import Rule, sampling
from spark_overlay.serving.step import Engine

# Bytes of a request: text has some four a token, and JSON's escapes make six of one character.
MOST_PER_TOKEN = 32
MOST_BESIDE = 1 << 20  # tools, schemas, JSON's own signs
MOST_IMAGES = 1 << 28

_PREFIX: dict[Protocol, str] = {"chat": "", "responses": "resp_", "messages": "msg_"}


class Api:
    def __init__(self, prompts: Prompts, engine: Engine, rule: Rule) -> None:
        self._prompts, self._engine, self._rule = prompts, engine, rule

    async def answer(self, request: Request, protocol: Protocol) -> Response:
        """The reply to one request, an error among them."""
        try:
            asked = await self._read(request, protocol)
            body = self._stream(asked) if asked.converted.stream else self._whole(asked)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except ApiError as error:
            return JSONResponse(error.body(protocol == "messages"), error.status)
        return Reply(
            body,
            stream=asked.converted.stream,
            messages=protocol == "messages",
            known=self._engine.refusal,
        )

    async def count(self, request: Request) -> Response:
        """Anthropic's count_tokens: the tokens of the prompt that Messages would make."""
        try:
            asked = await self._read(request, "messages")
        except ApiError as error:
            return JSONResponse(error.body(messages=True), error.status)
        return JSONResponse({"input_tokens": len(asked.ids)})

    async def tokens(self, raw: bytes) -> Response:
        """vLLM's /tokenize for a chat, by the prompt that Chat Completions would make."""
        try:
            asked = await asyncio.to_thread(self._prompts.read, raw, "chat")
        except ApiError as error:
            return JSONResponse(error.body(), error.status)
        found = {"count": len(asked.ids), "max_model_len": self._engine.context}
        return JSONResponse({**found, "tokens": asked.ids, "token_strs": None})

    async def _read(self, request: Request, protocol: Protocol) -> Asked:
        raw = await self.body(request)
        # A long conversation takes a second, which the answers under way must not wait for.
        asked = await asyncio.to_thread(self._prompts.read, raw, protocol)
        if asked.images and not self._engine.sees_images:
            raise ApiError(
                400,
                f"{asked.images[0].path}: this deployment serves text only; it takes no images",
            )
        if asked.ids.count(self._prompts.image) != len(asked.images):
            # vLLM would decode the prompt to find their places, and encode it anew.
            raise ApiError(500, f"{len(asked.images)} images have no places in the prompt")
        return asked

    async def body(self, request: Request) -> bytes:
        """Refuses what is far too long for the context before it takes memory: on a node whose
        GPU shares it, the tokens of 60 MB cost 6 GB."""
        most = MOST_PER_TOKEN * self._engine.context + MOST_BESIDE
        if self._engine.sees_images:
            most += MOST_IMAGES
        raw = bytearray()
        async for piece in request.stream():
            raw += piece
            if len(raw) > most:
                raise ApiError(
                    413,
                    f"the request has more than {most} bytes, which no prompt of "
                    f"{self._engine.context} tokens needs; shorten it",
                )
        return bytes(raw)

    async def _whole(self, asked: Asked) -> AsyncGenerator[bytes, None]:
        answer, chunks = self._begin(asked), []
        async with contextlib.aclosing(self._chunks(asked, answer)) as pieces:
            async for piece in pieces:
                chunks += piece
        yield answer.whole(chunks).encode()

    async def _stream(self, asked: Asked) -> AsyncGenerator[bytes, None]:
        answer = self._begin(asked)
        async with contextlib.aclosing(self._chunks(asked, answer)) as pieces:
            async for piece in pieces:
                if events := "".join(answer.events(piece)):
                    yield events.encode()
        yield answer.end().encode()

    def _begin(self, asked: Asked) -> Answer:
        id = _PREFIX[asked.protocol] + (
            str(uuid.uuid4()) if asked.protocol == "chat" else uuid.uuid4().hex
        )
        return Answer(asked, self._prompts, id, int(time.time()))

    async def _chunks(self, asked: Asked, answer: Answer) -> AsyncGenerator[list[object], None]:
        images = await asyncio.to_thread(pictures, asked.images) if asked.images else None
        prompt = len(asked.ids) + (images.more_tokens if images else 0)
        steps = self._engine.generate(
            asked.ids,
            sampling(asked, self._room(asked, prompt), self._rule, self._prompts.dsml),
            reasons_first=asked.reasons_first,
            salt=asked.extras.cache_salt,
            images=images.images if images else (),
        )
        begun, reason = False, None
        async with contextlib.aclosing(steps):
            async for step in steps:
                if not begun:
                    begun = True
                    yield answer.ready(Usage(step.prompt, step.cached))
                yield answer.feed(step.ids, step.logprobs)
                reason = step.reason
                if answer.finished:
                    break
        if reason is None and not answer.finished:
            raise ApiError(500, "the engine broke the answer off")
        yield answer.finish(reason or "stop")

    def _room(self, asked: Asked, prompt: int) -> int:
        """Tokens that the answer may have. Raises ApiError with both numbers."""
        context = self._engine.context
        try:
            room = int(asked.converted.resolve_max_tokens(prompt, context))
        except Exception as error:
            raise ApiError.of_recipe(error) from error
        if prompt + room > context:  # the official rule leaves a full context one token too many
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{prompt + room} tokens ({prompt} in the messages, {room} in the completion). "
                "Please reduce the length of the messages or completion.",
            )
        return room
