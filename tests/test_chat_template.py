"""The prompts of the three APIs are deepseek-recipe's, string and ids, and hold no special token
that a user has written.

    python3 tests/test_chat_template.py --src DIR

holds the same for the tokenizer.json in DIR, the folder of DeepSeek-V4.1-Flash for one.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__, "deepseek_recipe")

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conversations import MODEL, PROTOCOLS, Case, conversations, everywhere, harmless
from direct_recipe import IMAGE, DirectRecipe, Prompt, Refused

from spark_overlay.bytelevel import token_bytes
from spark_overlay.rehearsal.tokenizer import tokenizer_json
from spark_overlay.serving import prompt
from spark_overlay.serving.dialect import Protocol, translate
from spark_overlay.serving.errors import ApiError
from spark_overlay.serving.prompt import Prompts

SEED, EACH = 20270101, 400
#: What conversations are made of; each is to be seen in accepted requests of each API.
TRAITS = (
    "calls", "choice", "dialect", "effort", "json", "late_system", "out of order", "picture",
    "prefix", "spelled", "strict", "thinking", "tools", "unicode",
)  # fmt: skip


class Suite:
    """One tokenizer: our prompts, the recipe's, and the conversations to compare them on."""

    def __init__(self, tokenizer: str) -> None:
        parsed: dict[str, Any] = json.loads(tokenizer)
        self.pieces = token_bytes(parsed)
        self.added = {entry["content"]: int(entry["id"]) for entry in parsed["added_tokens"]}
        self.tokens = list(self.added)
        self.prompts = Prompts(tokenizer, [MODEL])
        self.recipe = DirectRecipe(tokenizer, MODEL)
        self.cases = conversations(SEED, EACH, self.tokens)
        self.twins = conversations(SEED, EACH, self.tokens, twin=True)
        for token in self.tokens:
            self.cases += everywhere(token)
            self.twins += everywhere(token, twin=True)
        # Several tests ask for the same, and nothing changes what is found.
        self.ours = cache(self._ours)
        self.expected = cache(self._expected)

    def _ours(self, case: Case) -> tuple[str, list[int]] | Refused:
        try:
            asked = self.prompts.read(case.raw, case.protocol)
        except ApiError as error:
            return Refused(error.status, error.message)
        return self.prompts.render(asked), asked.ids

    def _expected(self, case: Case) -> Prompt | Refused:
        return self.recipe.ask(case.official, case.protocol, case.effort)

    def accepted(self) -> Iterator[tuple[Case, Prompt]]:
        for case in self.cases:
            found = self.expected(case)
            if isinstance(found, Prompt):
                yield case, found

    def special(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """(position in bytes, id) of the added tokens among the ids."""
        found, at = [], 0
        known = set(self.added.values())
        for token in ids:
            if token in known:
                found.append((at, token))
            at += len(self.pieces[token])
        return found


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> Suite:
    source = request.config.getoption("--src")
    if source is None:
        return Suite(json.dumps(tokenizer_json()))
    return Suite((Path(source) / "tokenizer.json").read_text(encoding="utf-8"))


def test_the_conversations_are_many_and_of_every_kind(
    suite: Suite, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[Protocol, Counter[str]] = {protocol: Counter() for protocol in PROTOCOLS}
    accepted = list(suite.accepted())
    for case, _ in accepted:
        seen[case.protocol].update(case.traits)
    malformed = sum("malformed" in case.traits for case in suite.cases)
    with capsys.disabled():
        print(
            f"\n{len(suite.cases)} conversations: {len(accepted)} accepted, {malformed} malformed"
        )
    assert len(suite.cases) >= 600
    assert len(accepted) >= 600
    assert malformed >= 100
    rare = {f"{p} {t}": seen[p][t] for p in PROTOCOLS for t in TRAITS if seen[p][t] < 10}
    assert not rare, "too few of these would be compared"


def test_string_and_ids_are_deepseek_recipes_or_both_refuse_alike(suite: Suite) -> None:
    for case in suite.cases:
        found = suite.expected(case)
        expected = (found.text, found.ids) if isinstance(found, Prompt) else found
        assert suite.ours(case) == expected, f"{case.name}\n{case.raw!r}"


def test_the_ids_spell_the_string_with_special_tokens_only_where_the_format_has_them(
    suite: Suite,
) -> None:
    """By the vocabulary alone, whoever has made the ids."""
    for case, expected in suite.accepted():
        ours = suite.ours(case)
        assert not isinstance(ours, Refused), f"{case.name}: {ours}"
        text, ids = ours
        spelled = b"".join(suite.pieces[token] for token in ids)
        assert spelled == text.encode(), f"{case.name}\n{case.raw!r}"
        places = [
            (len(expected.text[:at].encode()), suite.added[spelling])
            for at, spelling in expected.special
        ]
        assert suite.special(ids) == places, f"{case.name}\n{case.raw!r}"


def test_no_text_of_a_request_becomes_a_special_token(suite: Suite) -> None:
    """As many as the same conversation has with harmless marks for every token spelled in it."""
    compared = 0
    for case, twin in zip(suite.cases, suite.twins, strict=True):
        ours, other = suite.ours(case), suite.ours(twin)
        if "malformed" in case.traits or case.raw == twin.raw:
            continue
        if isinstance(ours, Refused) or isinstance(other, Refused):
            assert isinstance(ours, Refused) and isinstance(other, Refused), case.name
            continue
        compared += 1
        specials = [[token for _, token in suite.special(ids)] for _, ids in (ours, other)]
        assert specials[0] == specials[1], f"{case.name}\n{case.raw!r}"
    assert compared >= 300


def test_every_added_token_would_be_one_if_texts_were_encoded_as_usual(suite: Suite) -> None:
    """The control of the test before: the tokens are spelled where they could do harm."""
    for token, id in suite.added.items():
        assert suite.recipe.tokenizer.encode(token) == [id]
        assert not set(suite.recipe.tokenizer.encode(harmless(token))) & set(suite.added.values())
        for case in everywhere(token):
            ours = suite.ours(case)
            assert not isinstance(ours, Refused), f"{case.name}: {ours}"
            text, ids = ours
            usual = suite.recipe.tokenizer.encode(text)
            assert usual.count(id) - ids.count(id) >= 2 * 12, case.name


def test_a_token_in_the_name_of_a_tool_is_refused(suite: Suite) -> None:
    for token in suite.tokens:
        function = {"name": token, "parameters": {"type": "object", "properties": {}}}
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hello"}],
            "tools": [{"type": "function", "function": function}],
        }
        raw = json.dumps(body).encode()
        ours = suite.ours(Case(token, "chat", raw, raw))
        assert isinstance(ours, Refused) and "tools[0].function.name" in ours.message, token


def test_the_name_of_a_tool_called_before_makes_no_special_token(suite: Suite) -> None:
    """The history is not checked as the tools are."""
    counts = set()
    for name in ("plain", *suite.tokens):
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
        turns = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ]
        raw = json.dumps({"model": MODEL, "messages": turns}).encode()
        ours = suite.ours(Case(name, "chat", raw, raw))
        if not isinstance(ours, Refused):
            counts.add(len(suite.special(ours[1])))
    assert len(counts) == 1, counts


def test_a_spelled_image_never_takes_the_place_of_a_real_one(suite: Suite) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": f"before {IMAGE}"}, picture, picture]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    asked = suite.prompts.read(json.dumps(body).encode(), "chat")
    assert asked.ids.count(suite.added[IMAGE]) == len(asked.images) == 2
    text = suite.prompts.render(asked).encode()
    spelled = text.index(IMAGE.encode())
    places = [at for at, token in suite.special(asked.ids) if token == suite.added[IMAGE]]
    assert spelled not in places


def test_each_picture_has_its_place_in_the_prompt(suite: Suite) -> None:
    seen = 0
    for case, _ in suite.accepted():
        if "picture" in case.traits:
            asked = suite.prompts.read(case.raw, case.protocol)
            assert asked.ids.count(suite.added[IMAGE]) == len(asked.images), case.name
            seen += len(asked.images) > 0
    assert seen >= 50


def test_a_request_without_dialect_reaches_the_recipe_byte_for_byte(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[bytes] = []

    def watched(kind: Any) -> Any:
        def request(raw: bytes) -> Any:
            reached.append(raw)
            return kind(raw)

        return request

    for protocol, kind in list(prompt._REQUESTS.items()):
        monkeypatch.setitem(prompt._REQUESTS, protocol, watched(kind))
    plain = [case for case in suite.cases if case.official == case.raw]
    for case in plain:
        reached.clear()
        with contextlib.suppress(ApiError):
            suite.prompts.read(case.raw, case.protocol)
        assert reached == [case.raw], case.name
        if "malformed" not in case.traits:
            assert translate(json.loads(case.raw), case.protocol)[0] is None, case.name
    assert len(plain) >= 600
