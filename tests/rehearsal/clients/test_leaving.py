"""A client that leaves takes its request out of the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from clients.server import MODEL, TELL, Server, async_openai_client, eventually, question, user

pytestmark = [pytest.mark.rehearsal, pytest.mark.alone]

FAR = 3000  # tokens of an answer that nobody waits for
LONG: dict[str, Any] = {"ignore_eos": True}
#: Seconds for a token on a machine that does other things too.
BEGUN = 60.0


def require_work(server: Server) -> None:
    eventually(lambda: server.running() == 1, lambda: f"{server.running()} run", BEGUN)


def require_rest(server: Server) -> None:
    eventually(lambda: server.running() == 0, lambda: f"{server.running()} still run")


def test_a_stream_closed_early(server: Server) -> None:
    require_rest(server)
    asked = question(TELL, FAR, stream=True, extra_body=LONG)
    stream = server.openai.chat.completions.create(**asked)
    for _ in range(3):
        next(stream)
    require_work(server)
    stream.close()
    require_rest(server)


def test_a_stream_of_messages_closed_early(server: Server) -> None:
    require_rest(server)
    asked = {"model": MODEL, "messages": [user(TELL)], "max_tokens": FAR}
    with server.anthropic.messages.stream(**asked, extra_body=LONG) as stream:
        next(event for event in stream if event.type == "content_block_delta")
        require_work(server)
    require_rest(server)


def test_an_answer_that_is_not_waited_for(server: Server) -> None:
    require_rest(server)

    async def ask() -> None:
        async with async_openai_client(server.api) as client:
            asked = question(TELL, FAR, extra_body=LONG)
            answer = asyncio.create_task(client.chat.completions.create(**asked))
            await asyncio.to_thread(require_work, server)
            answer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await answer
            await asyncio.to_thread(require_rest, server)

    asyncio.run(ask())
