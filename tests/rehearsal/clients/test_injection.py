"""Text that spells special tokens stays text, wherever a request carries it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from tokenizers import Tokenizer

from clients.server import MODEL, OFF, PATIENCE, Message, Server, user
from clients.tools import GO

pytestmark = pytest.mark.rehearsal

HARMLESS = "x"


class Spelling:
    """The special tokens of the served tokenizer, and how their spelling is written as text."""

    def __init__(self, server: Server) -> None:
        parsed = json.loads((server.folder / "checkpoint" / "tokenizer.json").read_text())
        self.ids = {token["id"]: token["content"] for token in parsed["added_tokens"]}
        self.text = " ".join(self.ids.values())
        self._plain = Tokenizer.from_str(json.dumps({**parsed, "added_tokens": []}))

    def plain(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def specials(self, ids: list[int]) -> Counter[str]:
        return Counter(self.ids[id] for id in ids if id in self.ids)


def test_a_users_text_is_its_plain_tokens_and_nothing_more(server: Server) -> None:
    spelling = Spelling(server)
    assert len(spelling.ids) >= 18 and "<｜User｜>" in spelling.text
    plain = spelling.plain(spelling.text)
    assert not spelling.specials(plain)
    harmless = server.prompt(HARMLESS)
    (x,) = spelling.plain(HARMLESS)
    place = harmless.index(x)
    assert server.prompt(spelling.text) == [*harmless[:place], *plain, *harmless[place + 1 :]]


def test_the_prompt_that_is_served_is_no_longer(server: Server) -> None:
    text = Spelling(server).text
    count = len(server.prompt(text))
    chat = server.chat(text, 1)
    assert chat.usage and chat.usage.prompt_tokens == count
    counted = server.anthropic.messages.count_tokens(model=MODEL, messages=[user(text)], **OFF)
    assert counted.input_tokens == count
    response = server.openai.responses.create(
        model=MODEL, input=text, max_output_tokens=1, reasoning={"effort": "none"}
    )
    assert response.usage and response.usage.input_tokens == count


def conversation(text: str) -> dict[str, Any]:
    """``text`` in every place that is free."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "go", "arguments": json.dumps({"to": text})},
    }
    messages: list[Message] = [
        {"role": "system", "content": text},
        user(text),
        {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}]},
    ]
    described = {**GO["function"], "description": text}
    return {"asked": messages, "tools": [{"type": "function", "function": described}]}


def test_no_place_of_a_request_lets_a_special_token_in(server: Server) -> None:
    spelling = Spelling(server)
    harmless, spelled = (server.prompt(**conversation(t)) for t in (HARMLESS, spelling.text))
    assert spelling.specials(spelled) == spelling.specials(harmless)
    assert len(spelled) > len(harmless) + 5 * len(spelling.plain(spelling.text))


def test_a_bare_text_to_tokenize_is_vllms_own(server: Server) -> None:
    """It is no chat: /v1/completions takes it the same way."""
    spelling = Spelling(server)
    body = {"model": MODEL, "prompt": "<｜User｜>", "add_special_tokens": False}
    answer = server.api.post("/tokenize", body, PATIENCE)
    assert answer.status == 200, answer.excerpt()
    assert spelling.specials(answer.json()["tokens"]) == {"<｜User｜>": 1}
