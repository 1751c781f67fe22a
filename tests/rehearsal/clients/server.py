"""The served pair, the official clients of it, and what is asked of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
from openai.types.chat import ChatCompletion

from launcher.http import Api

KEY = "a-key-of-the-tests"
MODEL = "DeepSeek-v4.1-Flash-EXL3"
CONTEXT = 4096
#: What switches thinking off, in the words of the official API.
OFF: dict[str, Any] = {"thinking": {"type": "disabled"}}
#: Seconds for one request on a machine that does other things too.
PATIENCE = 300.0

#: What is asked where the answer is thinking. All of these prompts have their first block of the
#: prefix cache in common, which is a good part of their time.
TELL = "Tell me what to say"

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Server:
    """``folder`` holds the checkpoint that is served. The two clients are for all threads."""

    api: Api
    folder: Path
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic

    @classmethod
    @contextmanager
    def at(cls, api: Api, folder: Path) -> Iterator[Server]:
        with openai_client(api, KEY) as one, anthropic_client(api, {}) as other:
            yield cls(api, folder, one, other)

    def chat(
        self, asked: str | Sequence[Message], tokens: int, *, thinking: bool = False, **more: Any
    ) -> ChatCompletion:
        return self.openai.chat.completions.create(**question(asked, tokens, thinking, **more))

    def prompt(self, asked: str | Sequence[Message], **more: Any) -> list[int]:
        """The token ids of a chat's prompt without thinking, by /tokenize."""
        body = question(asked, 1, **more)
        body |= body.pop("extra_body")
        answer = self.api.post("/tokenize", body, PATIENCE)
        assert answer.status == 200, answer.excerpt()
        found = answer.json()
        assert found["count"] == len(found["tokens"]) and found["max_model_len"] == CONTEXT
        return list(found["tokens"])

    def running(self) -> int:
        """Requests in the engine, at work or waiting, as its metrics have it."""
        lines = self.api.get("/metrics", 30).body.decode().splitlines()
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        found = [float(line.split()[-1]) for line in lines if line.startswith(names)]
        assert len(found) == len(names), f"/metrics has {len(found)} of {names}"
        return int(sum(found))


# No retries: a fault is to be seen. A proxy of the environment is not asked for the way.


def openai_client(api: Api, key: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{api.url}/v1",
        api_key=key,
        max_retries=0,
        timeout=PATIENCE,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


def async_openai_client(api: Api) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{api.url}/v1",
        api_key=KEY,
        max_retries=0,
        timeout=PATIENCE,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


def anthropic_client(api: Api, headers: Mapping[str, str]) -> anthropic.Anthropic:
    """``headers`` say the key; without them the client sends it as a bearer token."""
    named = {"Authorization": anthropic.omit, **headers} if headers else {}
    return anthropic.Anthropic(
        base_url=api.url,
        api_key=KEY,
        max_retries=0,
        timeout=PATIENCE,
        default_headers=named,
        http_client=anthropic.DefaultHttpxClient(trust_env=False),
    )


def async_anthropic_client(api: Api) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=api.url,
        api_key=KEY,
        max_retries=0,
        timeout=PATIENCE,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
    )


def question(
    asked: str | Sequence[Message], tokens: int, thinking: bool = False, **more: Any
) -> dict[str, Any]:
    """Arguments of the openai client: greedy without thinking, sampled with it."""
    extra = more.pop("extra_body", {})
    mode: dict[str, Any] = {} if thinking else {"temperature": 0}
    return {
        "model": MODEL,
        "messages": [user(asked)] if isinstance(asked, str) else list(asked),
        "max_tokens": tokens,
        "extra_body": {**({} if thinking else OFF), **extra},
        **mode,
        **more,
    }


def reasoning(message: Any) -> str | None:
    """DeepSeek's own field of a message or a delta; the client keeps it without knowing it."""
    found = (message.model_extra or {}).get("reasoning_content")
    assert found is None or isinstance(found, str)
    return found


def eventually(holds: Callable[[], bool], told: Callable[[], str], within: float = 60.0) -> None:
    """Waits until it holds; ``told`` is what else there was."""
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)
