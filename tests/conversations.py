"""Requests of the three APIs, made from a seed: conversations, and what is wrong with some.

A request is made twice from one seed: with added tokens spelled in its texts, and, as its twin,
with harmless marks of the same length in their place. Nothing else differs between the two.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from request_forms import FORMS, Talk, Turn, with_dialect

from spark_overlay.serving.dialect import Protocol

PROTOCOLS: tuple[Protocol, ...] = ("chat", "responses", "messages")
MODEL = "kit"

#: Marks that no added token is made of, each as many bytes long as what it stands for.
_HARMLESS = str.maketrans({"<": "(", ">": ")", "｜": "│", "|": "!", "▁": "▂"})

_WORDS = (
    "What is 17*19? Reply with the integer only.", "json", "a", "Effort: 75 (range 1-100", " ",
    "\n\n", "<tool_result>7</tool_result>", '{"a": [1, 2]}', "</", "<think", "think>", "don't",
    "<｜ User｜>", "<|User|>", "｜DSML", "</｜", "Read the file, then say what it is.\n", "x" * 40,
)  # fmt: skip
_UNICODE = (
    "naïve café", "日本語のテキスト。", "Привет, мир", "\u202eright to left\u202c", "e\u0301",
    "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈", "\u200b\ufeff\u2060", "\x00\x01\x1b[31m", "＜think＞",
    "\U0010ffff\ufffd\ufffe", "\t\r\n \u00a0\u3000", "\u2028\u2029", "ﷺ", "𝒳", "שלום",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """``official``: the request in the official API's words; ``raw`` itself unless the kit's
    dialect is in it. ``effort``: the number that the prompt must name in place of the official
    word's. ``traits``: what the request is made of."""

    name: str
    protocol: Protocol
    raw: bytes
    official: bytes
    effort: int | None = None
    traits: frozenset[str] = frozenset()


def harmless(token: str) -> str:
    return token.translate(_HARMLESS)


def conversations(seed: int, count: int, tokens: Sequence[str], twin: bool = False) -> list[Case]:
    """``count`` cases of each protocol; ``tokens`` are the added tokens to spell."""
    return [
        _Maker(f"{seed} {protocol} {number}", tokens, twin).case(protocol)
        for protocol in PROTOCOLS
        for number in range(count)
    ]


def everywhere(token: str, twin: bool = False) -> list[Case]:
    """One token spelled in every text that a request of each protocol has."""
    spelled = harmless(token) if twin else token
    made = []
    for protocol in PROTOCOLS:
        talk = _told(lambda place: f"{place} {spelled}{spelled} end")
        body = {"model": MODEL, **FORMS[protocol](talk)}
        raw = json.dumps(body).encode()
        made.append(Case(f"{protocol} everywhere {token}", protocol, raw, raw))
    return made


def _told(text: Callable[[str], str]) -> Talk:
    schema = {
        "type": "object",
        "description": text("schema"),
        "properties": {text("key"): {"type": "string", "enum": [text("value")]}},
    }
    return Talk(
        turns=[
            Turn("user", text("question")),
            Turn(
                "assistant",
                text("answer"),
                reasoning=text("reasoning"),
                calls=[("c0", "find", {text("argument"): text("value"), "deep": [text("inner")]})],
            ),
            Turn("tool", results=[("c0", text("result"))]),
            Turn("user", text("again")),
        ],
        system=text("system"),
        tools=[("find", text("what it does"), schema, False)],
        schema={"type": "object", "properties": {text("field"): {"type": "string"}}},
    )


@dataclass
class _Maker:
    seed: str
    tokens: Sequence[str]
    twin: bool
    traits: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def case(self, protocol: Protocol) -> Case:
        talk = self._talk()
        body = {"model": MODEL, **FORMS[protocol](talk), **self._options(protocol)}
        spoken, official, effort = body, body, None
        if self._one_in(3):
            self.traits.add("dialect")
            spoken, official, effort = with_dialect(self._random, body, protocol)
        ascii_only = self._one_in(2)
        raw, told = (json.dumps(b, ensure_ascii=ascii_only).encode() for b in (spoken, official))
        if spoken is body:
            if self._one_in(5):
                self.traits.add("malformed")
                raw = self._broken(body)
            told = raw
        name = f"{self.seed}: {', '.join(sorted(self.traits))}"
        return Case(name, protocol, raw, told, effort, frozenset(self.traits))

    def _one_in(self, n: int) -> bool:
        return self._random.randrange(n) == 0

    def text(self) -> str:
        parts = []
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 3, 6))):
            kind = self._random.choice(("word", "word", "unicode", "spelled"))
            if kind == "unicode":
                self.traits.add("unicode")
                parts.append(self._random.choice(_UNICODE))
            elif kind == "spelled":
                parts.append(self._spelled())
            else:
                parts.append(self._random.choice(_WORDS))
        return self._random.choice(("", " ", "\n")).join(parts)

    def _spelled(self) -> str:
        self.traits.add("spelled")
        token = self._random.choice((*self.tokens, "｜DSML｜", "</think>"))
        form = self._random.choice(("{}", "{}", "<{}", "</{}", "<{} calls>\n", "{0}{0}"))
        return form.format(harmless(token) if self.twin else token)

    def value(self, depth: int = 0) -> Any:
        """A JSON value."""
        simple: tuple[Callable[[], Any], ...] = (
            self.text,
            self.text,
            lambda: self._random.choice((0, -1, 17, 2**53 + 1, 2**64 + 3, -(2**63))),
            lambda: self._random.choice((0.5, 1e300, -2.5e-7, 1.0)),
            lambda: self._random.choice((True, False, None)),
        )
        nested: tuple[Callable[[], Any], ...] = (
            lambda: [self.value(depth + 1) for _ in range(self._random.randrange(3))],
            lambda: self._object(depth + 1),
        )
        return self._random.choice(simple if depth > 2 else simple + nested)()

    def _object(self, depth: int = 0) -> dict[str, Any]:
        keys = (self._random.choice(("x", "y", self.text())) for _ in range(3))
        return {key: self.value(depth) for key in keys}

    def _talk(self) -> Talk:
        strict = self._one_in(4)
        tools = [self._tool(n, strict) for n in range(self._random.choice((0, 0, 1, 3)))]
        talk = Talk(turns=list(self._turns([name for name, *_ in tools])), tools=tools)
        if self._one_in(2):
            talk.system = self.text()
        if self._one_in(6):
            talk.late_system = self.text()
        if self._one_in(3):
            talk.thinking = self._one_in(2)
        if self._one_in(3):
            talk.effort = self._random.choice(("minimal", "low", "medium", "high", "xhigh", "max"))
        if tools and self._one_in(3):
            talk.choice = self._random.choice(("auto", "none", "required", tools[0][0]))
        if self._one_in(5):
            talk.schema = self._random.choice((None, {"type": "object", "properties": {}}))
            talk.json = True
        if self._one_in(6) and not talk.json:
            self.traits.add("prefix")
            talk.turns.append(Turn("assistant", self.text(), prefix=True))
            talk.late_system = None
        for trait in ("tools", "thinking", "effort", "choice", "json", "late_system"):
            if getattr(talk, trait) not in (None, [], False):
                self.traits.add(trait)
        return talk

    def _tool(self, number: int, strict: bool) -> tuple[str, str, Any, bool]:
        properties = {
            "x": {"type": self._random.choice(("string", "integer")), "title": self.text()},
            self.text() or "y": {"type": "string", "enum": [self.text(), "é"]},
        }
        required = list(properties) if strict else ["x"]
        schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
        if strict:
            self.traits.add("strict")
            schema["additionalProperties"] = False
        return f"tool-{number}_{self._random.choice('abc')}", self.text(), schema, strict

    def _turns(self, names: Sequence[str]) -> Iterator[Turn]:
        for number in range(self._random.choice((0, 0, 1, 2, 4))):
            yield Turn("user", self.text(), picture=self._picture())
            reasoning = self._random.choice((None, self.text()))
            answer = Turn("assistant", self.text(), reasoning)
            if not names or self._one_in(2):
                yield answer
                continue
            self.traits.add("calls")
            calls = [
                (f"c{number}{n}", self._random.choice(names), self._object())
                for n in range(self._random.choice((1, 1, 2, 3)))
            ]
            yield replace(answer, calls=calls)
            results = [(id, self.text()) for id, *_ in calls]
            self._random.shuffle(results)
            if [id for id, _ in results] != [id for id, *_ in calls]:
                self.traits.add("out of order")
            yield Turn("tool", results=results)
        if not self._one_in(6):
            yield Turn("user", self.text() + " json", picture=self._picture())

    def _picture(self) -> bool:
        if self._one_in(12):
            self.traits.add("picture")
            return True
        return False

    def _options(self, protocol: Protocol) -> dict[str, Any]:
        """What does not show in the prompt, and some of it out of bounds."""
        stop = {"chat": "stop", "responses": "user", "messages": "stop_sequences"}[protocol]
        limit = {"responses": "max_output_tokens"}.get(protocol, "max_tokens")
        draw = self._random.choice
        choices: dict[str, Callable[[], Any]] = {
            "temperature": lambda: draw((0, 0.5, 1, 1, 2, 2.5)),
            "top_p": lambda: draw((0.1, 0.5, 0.99, 1, 0)),
            limit: lambda: draw((1, 7, 4096, 393216, 0)),
            "stream": lambda: draw((True, False)),
            stop: lambda: (
                "who" if protocol == "responses" else [self.text() or "x"] * draw((1, 1, 16, 17))
            ),
            "metadata": lambda: {"user_id": "u"},
        }
        return {name: made() for name, made in choices.items() if self._one_in(10)}

    def _broken(self, body: dict[str, Any]) -> bytes:
        """The body with something wrong."""
        raw = json.dumps(body).encode()
        turns = "input" if "input" in body else "messages"
        at = self._random.random()
        wrong: tuple[Callable[[], bytes], ...] = (
            lambda: raw[: int(at * len(raw))],
            lambda: raw[: int(at * len(raw))] + b"\xff" + raw[int(at * len(raw)) :],
            lambda: raw + b"}",
            lambda: raw.replace(b'"model"', b'"model": "kit", "model"', 1),
            lambda: raw.replace(b'"kit"', b'"kit\\ud800"', 1),
            lambda: raw.replace(b'"kit"', b'"nobody"', 1),
            lambda: raw.replace(b"}", b', "n": NaN}', 1),
            lambda: raw[:-1] + b', "x": ' + b"[" * 200 + b"]" * 200 + b"}",
            lambda: _dumped({k: v for k, v in body.items() if k != turns}),
            lambda: _dumped({**body, turns: self.value()}),
            lambda: _dumped({**body, turns: [self.value(), self._object()]}),
            lambda: _dumped({**body, "tools": self.value()}),
            lambda: _dumped({**body, "tools": [{"type": "function", "name": self._spelled()}]}),
            lambda: _dumped({**body, "tool_choice": self.value()}),
            lambda: _dumped({**body, "thinking": self.value(), "response_format": self.value()}),
            lambda: _dumped({**body, "n": 2, "temperature": "warm"}),
            lambda: _dumped([body]),
            lambda: b"",
        )
        return self._random.choice(wrong)()


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()
