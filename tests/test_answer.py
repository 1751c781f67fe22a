"""From tokens to the answers of the three APIs: nothing lost, nothing twice, however it is cut."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__, "deepseek_recipe")

import json
import random
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from answer_readers import Told, heard, told
from answer_streams import END, STOPS, TAG, D, Tongue, calls_text, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from spark_overlay.serving.answer import Answer, Usage
from spark_overlay.serving.dialect import Protocol
from spark_overlay.serving.prompt import Asked, Prompts

Body = dict[str, Any]
PROMPTS = Prompts(json.dumps(tokenizer()), ["kit"])
TONGUE = Tongue(PROMPTS.tokenizer.encode, PROMPTS.pieces, PROMPTS.special)
PROTOCOLS: tuple[Protocol, ...] = ("chat", "responses", "messages")

_SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
_NAMES = ("find", "save-it_2")
_OFF = {"thinking": {"type": "disabled"}}
#: What each word of a mode puts into a request of each protocol.
FIELDS: dict[str, dict[Protocol, Body]] = {
    "thinking": {"chat": {}, "responses": {}, "messages": {}},
    "plain": {"chat": _OFF, "responses": {"reasoning": {"effort": "none"}}, "messages": _OFF},
    "tools": {
        "chat": {
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": _SCHEMA}}
                for name in _NAMES
            ]
        },
        "responses": {
            "tools": [{"type": "function", "name": n, "parameters": _SCHEMA} for n in _NAMES]
        },
        "messages": {"tools": [{"name": n, "input_schema": _SCHEMA} for n in _NAMES]},
    },
    "required": {
        "chat": {"tool_choice": "required"},
        "responses": {"tool_choice": "required"},
        "messages": {"tool_choice": {"type": "tool", "name": "find"}},
    },
    "stop": {"chat": {"stop": STOPS}, "messages": {"stop_sequences": STOPS}},
    "json": {
        "chat": {"response_format": {"type": "json_object"}},
        "responses": {"text": {"format": {"type": "json_object"}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    },
    "logprobs": {"chat": {"logprobs": True, "top_logprobs": 2}},
}
MODES = (
    "plain", "thinking", "plain tools", "thinking tools", "plain tools required", "plain stop",
    "thinking stop", "plain json", "thinking json",
)  # fmt: skip
CASES = [
    (protocol, mode)
    for mode in MODES
    for protocol in PROTOCOLS
    if all(protocol in FIELDS[word] for word in mode.split())  # Responses has no stop sequences
]
EACH = 800


def ask(protocol: Protocol, mode: str) -> Asked:
    hello = [{"role": "user", "content": "answer in json"}]
    body: Body = {"model": "kit", "input" if protocol == "responses" else "messages": hello}
    if protocol == "messages":
        body["max_tokens"] = 100
    for word in mode.split():
        body |= FIELDS[word][protocol]
    return PROMPTS.read(json.dumps(body).encode(), protocol)


ASKED = {(protocol, mode): ask(protocol, mode) for protocol, mode in CASES}


def answer(
    asked: Asked,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    reason: Literal["stop", "length"] = "stop",
    logprobs: Any = None,
) -> tuple[Answer, list[Any]]:
    """The whole answer's chunks, fed in parts that end at ``cuts``."""
    made = Answer(asked, PROMPTS, "ID", 1)
    chunks = made.ready(Usage(prompt=9, cached=2))
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        if not made.finished:
            chunks += made.feed(ids[begin:end], logprobs and logprobs[begin:end])
    return made, chunks + made.finish(reason)


def whole(asked: Asked, ids: Sequence[int], **how: Any) -> Told:
    made, chunks = answer(asked, ids, **how)
    return told(asked.protocol, made.whole(chunks))


def streamed(asked: Asked, ids: Sequence[int], **how: Any) -> Told:
    made, chunks = answer(asked, ids, **how)
    return heard(asked.protocol, made.events(chunks))


def expected(mode: str, marked: str) -> tuple[str, str]:
    """(reasoning, content) by the words of the format."""
    head, tag, _ = marked.partition(f"<{TAG}") if "tools" in mode else (marked, "", "")
    reasoning, content = "", head
    if "thinking" in mode:
        reasoning, end, content = head.partition(END)
        reasoning = reasoning.lstrip("\n")
        if end or tag:
            reasoning = reasoning.rstrip("\n")
    content = content.lstrip("\n").replace(END, "")  # a second end of thinking says nothing
    if tag:
        content = content.rstrip("\n")
    if "stop" in mode:
        content = content[: min((content.find(s) for s in STOPS if s in content), default=None)]
    return reasoning.replace(TAG, D), content.replace(TAG, D)


def cut_up(draw: random.Random, ids: Sequence[int]) -> list[int]:
    if draw.randrange(3) == 0:
        return list(range(1, len(ids)))  # as a model without drafts does
    return sorted(draw.choices(range(len(ids) + 1), k=draw.randrange(6)))


def test_the_streams_are_twenty_thousand() -> None:
    assert EACH * len(CASES) >= 20_000


@pytest.mark.parametrize(("protocol", "mode"), CASES)
def test_any_stream_cut_anywhere_is_told_once_and_whole(protocol: Protocol, mode: str) -> None:
    asked, draw = ASKED[protocol, mode], random.Random(f"{protocol} {mode}")
    for number in range(EACH):
        ids = TONGUE.stream(draw)
        cuts, reason = cut_up(draw, ids), draw.choice(("stop", "length"))
        name = f"stream {number}: {ids} cut at {cuts}, {reason}"
        one = whole(asked, ids, reason=reason)
        assert streamed(asked, ids, cuts=cuts, reason=reason) == one, name
        marked = TONGUE.marked(ids)
        reasoning, content = expected(mode, marked)
        if "required" in mode:
            assert (one.reasoning, one.content) == ("", ""), name
        elif "json" in mode:
            assert one.reasoning == reasoning, name
            assert_some_of(one.content, marked.replace(END, "</think>").replace(TAG, D), name)
        else:
            if f"<{TAG}" in marked and "tools" in mode:
                # How many of the line ends before the calls are dropped depends on what is there.
                one.reasoning, one.content = one.reasoning.rstrip("\n"), one.content.rstrip("\n")
            assert (one.reasoning, one.content) == (reasoning, content), name
        if "tools" not in mode:
            assert one.calls == [], name
        if "stop" in mode:
            assert_stopped(mode, ids, one, reason, name)
        else:
            assert one.tokens == len(ids), name
            called = "calls" if one.calls and protocol != "responses" else "stop"
            assert one.reason == ("length" if reason == "length" else called), name
        assert one.cached == 2, name


def assert_some_of(told: str, said: str, name: str) -> None:
    """Spaces aside, the characters of ``told`` are among those of ``said``, in their order."""
    rest = iter(said)
    assert all(character in rest for character in told if character != " "), name


def assert_stopped(mode: str, ids: Sequence[int], one: Told, reason: str, name: str) -> None:
    """A stop sequence ends the answer with the token that completes it, or, where that holds the
    beginning of a character too, with the one that completes the character."""
    free = mode.replace("stop", "").strip()

    def holds_stop(count: int) -> bool:
        content = expected(free, TONGUE.marked(ids[:count]))[1]
        return any(stop in content for stop in STOPS)

    if not holds_stop(len(ids)):
        assert (one.tokens, one.reason) == (len(ids), reason), name
        return
    before = one.tokens - 1
    while before and TONGUE.ends_within_character(ids[:before]):
        before -= 1
    assert holds_stop(one.tokens) and not holds_stop(before), name
    assert one.reason == "stop", name


def mixed(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    ids = draw(st.lists(st.integers(0, len(PROMPTS.pieces) + Tongue.UNKNOWN - 1), max_size=12))
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=4).map(sorted))
    return ids, cuts


@given(said=st.composite(mixed)(), protocol=st.sampled_from(PROTOCOLS))
def test_tokens_that_hold_parts_of_characters_make_the_characters(
    said: tuple[list[int], list[int]], protocol: Protocol
) -> None:
    ids, cuts = said
    asked = ASKED[protocol, "plain"]
    one = whole(asked, ids)
    assert (one.content, one.tokens) == (expected("plain", TONGUE.marked(ids))[1], len(ids))
    assert streamed(asked, ids, cuts=cuts) == one


@given(data=st.binary(max_size=12), protocol=st.sampled_from(PROTOCOLS))
def test_bytes_that_are_no_character_become_the_replacement_character(
    data: bytes, protocol: Protocol
) -> None:
    ids = [PROMPTS.pieces.index(bytes([byte])) for byte in data]
    for reason in ("stop", "length"):
        one = whole(ASKED[protocol, "plain"], ids, reason=reason)
        assert one.content == data.decode(errors="replace").lstrip("\n")
        assert one.tokens == len(data)


@given(seed=st.integers(0, 1 << 32), protocol=st.sampled_from(PROTOCOLS))
def test_calls_are_told_as_they_were_written(seed: int, protocol: Protocol) -> None:
    draw = random.Random(seed)
    text, calls = calls_text(draw)
    for mode, before in (
        ("plain tools", "I look.\n\n"),
        ("thinking tools", "hm</think>\n\nI look.\n\n"),
        ("thinking tools", ""),
        ("plain tools required", None),
    ):
        if before is None:  # the prompt has opened the block
            ids = TONGUE.encode(text.removeprefix(f"<{D} calls>\n"))
        else:
            ids = TONGUE.encode(before + text)
        one = streamed(ASKED[protocol, mode], ids, cuts=cut_up(draw, ids))
        assert [(name, json.loads(arguments)) for name, arguments in one.calls] == calls
        assert one.content == ("I look." if before else "")
        assert one.reasoning == ("hm" if before and "hm" in before else "")


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_of_calls_cut_short_all_that_was_said_is_told(protocol: Protocol) -> None:
    """Messages tells such arguments in its stream only: there they are an object."""
    draw = random.Random(7)
    for _ in range(6):
        ids = TONGUE.encode("so:\n\n" + calls_text(draw)[0])
        asked = ASKED[protocol, "plain tools"]
        full = streamed(asked, ids).calls
        for end in range(len(ids)):
            calls = streamed(asked, ids[:end], reason="length").calls
            assert len(calls) <= len(full)
            for position, (name, arguments) in enumerate(calls):
                told_name, told_arguments = full[position]
                assert name == told_name, (end, calls)
                if position < len(calls) - 1:
                    assert arguments == told_arguments, (end, calls)
                else:  # the closing tag may have begun, or a character
                    said = arguments.rstrip("</\N{REPLACEMENT CHARACTER}")
                    assert told_arguments.startswith(said), (end, calls)


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_a_stop_sequence_fires_in_the_content_alone(protocol: Protocol) -> None:
    asked = ASKED[protocol, "thinking stop"]
    one = whole(asked, TONGUE.encode("ab STOP é</think>x STOP y"))
    assert (one.reasoning, one.content) == ("ab STOP é", "x ")
    assert one.stopped_by == ("STOP" if protocol == "messages" else None)
    tools = ask(protocol, "plain tools stop")
    block = f'<{D} calls>\n<{D} invoke name="find">\n<{D} parameter name="x" string="true">ab STOP'
    ids = TONGUE.encode(f"{block}</{D} parameter>\n</{D} invoke>\n</{D} calls>")
    assert whole(tools, ids).calls == [("find", '{"x": "ab STOP"}')] or protocol == "messages"
    assert json.loads(whole(tools, ids).calls[0][1]) == {"x": "ab STOP"}


def test_nothing_is_taken_after_a_stop_sequence() -> None:
    made = Answer(ASKED["chat", "plain stop"], PROMPTS, "ID", 1)
    chunks = made.ready(Usage(9)) + made.feed(TONGUE.encode("x STOP"))
    assert made.finished
    assert made.feed(TONGUE.encode(" more")) == made.finish("length") == []
    one = told("chat", made.whole(chunks))
    assert (one.content, one.reason) == ("x ", "stop")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_mark_spelled_in_other_tokens_is_text(protocol: Protocol) -> None:
    """As in a prompt: what was quoted from a file neither ends the thinking nor calls a tool."""
    ids = TONGUE.bytes_of("see </think> there")
    assert whole(ASKED[protocol, "thinking"], ids).reasoning == "see </think> there"
    text = calls_text(random.Random(1))[0]
    one = whole(ASKED[protocol, "plain tools"], TONGUE.bytes_of(text))
    assert (one.content, one.calls) == (text, [])


@pytest.mark.parametrize(
    "said",
    [
        '{"a": "€"}',
        '```json\n{"a": "€"}\n```',
        'Here:\n```json\n{"a": "€"}\n```\nDone.',
        '```\n{"a": "€"}\n```',
        '  \n{"a": "€"}',
    ],
)
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_an_answer_in_json_is_json_alone(protocol: Protocol, said: str) -> None:
    for mode, before in (("plain json", ""), ("thinking json", "so {</think>\n\n")):
        ids = TONGUE.encode(before + said)
        for cuts in ((), range(1, len(ids))):
            one = streamed(ASKED[protocol, mode], ids, cuts=list(cuts))
            assert json.loads(one.content) == {"a": "€"}


@pytest.mark.parametrize("mode", ["plain logprobs", "thinking logprobs"])
def test_log_probabilities_stand_beside_their_tokens(mode: str) -> None:
    """They come with whole characters: bytes that are none have no log-probability."""
    asked, draw = ask("chat", mode), random.Random(mode)
    for _ in range(400):
        ids = [i for i in TONGUE.stream(draw) if i < len(PROMPTS.pieces)]
        beside = [(-i / 8, [(i, -i / 8), (0, -9.0)]) for i in range(len(ids))]
        one = whole(asked, ids, logprobs=beside)
        assert streamed(asked, ids, cuts=cut_up(draw, ids), logprobs=beside) == one
        assert (one.reasoning, one.content) == expected(mode, TONGUE.marked(ids)), ids
        assert one.tokens == len(ids)
        places = [int(entry["logprob"] * -8) for entry in one.logprobs]
        assert sorted(set(places)) == places, "each token at most once, in its order"
        for place, entry in zip(places, one.logprobs, strict=True):
            assert bytes(entry["bytes"]) == PROMPTS.pieces[ids[place]]
            assert [other["logprob"] for other in entry["top_logprobs"]] == [-place / 8, -9.0]
        silent = {token for place, token in enumerate(ids) if place not in places}
        pieces = [PROMPTS.pieces[token] for token in silent]
        assert all(p.strip(b"\n") in (b"", b"</think>") or not p.isascii() for p in pieces)


def test_more_tokens_from_the_cache_than_the_prompt_has_are_not_told() -> None:
    for protocol in PROTOCOLS:
        made = Answer(ASKED[protocol, "plain"], PROMPTS, "ID", 1)
        chunks = made.ready(Usage(prompt=9, cached=64)) + made.finish("stop")
        assert told(protocol, made.whole(chunks)).cached == 9


@pytest.mark.parametrize(
    ("protocol", "end"), [("chat", "data: [DONE]\n\n"), ("responses", ""), ("messages", "")]
)
def test_a_stream_is_closed_as_its_protocol_has_it(protocol: Protocol, end: str) -> None:
    assert Answer(ASKED[protocol, "plain"], PROMPTS, "ID", 1).end() == end
