"""The tags for tool calls, in xgrammar: exactly what the recipe reads back as valid calls.

A matcher walks over the rehearsal tokenizer's ids as the engine's does. What it accepts to the end
goes through the recipe's own parser and must come out as the arguments meant, or, for texts drawn
from the matcher's masks, as arguments that the schema allows.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from dsml import (
    BEGIN,
    CLOSE,
    DSML,
    END,
    EOS,
    RECIPE,
    SPELLED,
    VOCAB,
    Asked,
    Json,
    accepted,
    call,
    compiler,
    function,
    matcher,
    need,
    parameters,
    raw,
    refused_at,
)

from spark_overlay.serving.constraint import structured_outputs

pytest.importorskip("vllm", reason="run by the engine's Python: ./start.sh test")
pytestmark = pytest.mark.rehearsal


def one(schema: Any) -> Asked:
    return Asked((function("f", schema),))


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
NODE = {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#/$defs/node"}}}
BLOCK = f"a{BEGIN}{call({'city': 'x'})}"  # V4.1's own signs, as a text

#: By name: a schema, arguments it allows, and what must be refused (arguments, or a call's inside).
CASES: dict[str, tuple[Any, list[Json], list[Json | str]]] = {
    "omitted": (None, [{}], [{"a": "x"}, "x"]),
    "no properties": ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    "string": (
        need(city=STRING),
        [{"city": text} for text in ("Oslo", "", " \n ", '<a>"b"</a> & \\ \t\0é日😀', "</", "<｜")],
        [{}, {"city": 3}, {"city": "x", "b": "y"}, raw("town", "x"), "", "text"],
    ),
    "signs in a string": (
        need(city=STRING),
        [{"city": f"{open_sign}x"} for open_sign in ("<think>", "</think>", "<｜DSML｜ invoke>")],
        [{"city": f"a</｜DSML｜{rest}"} for rest in ("", " parameter>", " calls>", "x")]
        + [{"city": BLOCK}],
    ),
    "optional": (
        {"type": "object", "properties": {"a": STRING, "b": INTEGER, "c": STRING}},
        [{}, {"a": "x"}, {"b": 1}, {"a": "x", "c": "y"}, {"a": "x", "b": 1, "c": ""}],
        [{"b": 1, "a": "x"}, parameters({"a": "x"}) * 2, {"d": 1}],
    ),
    "numbers": (
        need(i={"type": "integer", "minimum": 0, "maximum": 9}, n={"type": "number"}),
        [{"i": 0, "n": -1.5}, {"i": 9, "n": 7}],
        [{"i": 10, "n": 1}, {"i": -1, "n": 1}, {"i": 1.5, "n": 1}, {"i": 1, "n": "1"}],
    ),
    "boolean, null": (
        need(b={"type": "boolean"}, n={"type": "null"}),
        [{"b": True, "n": None}],
        [{"b": "true", "n": None}, {"b": 1, "n": None}, {"b": None, "n": None}],
    ),
    "enum": (
        need(unit={"type": "string", "enum": ["C", "F", ""]}, m={"enum": ["x", 1, None]}),
        [{"unit": "C", "m": 1}, {"unit": "", "m": "x"}, {"unit": "F", "m": None}],
        [{"unit": "K", "m": 1}, {"unit": "C", "m": "1"}, {"unit": "C", "m": 2}],
    ),
    "const": (
        need(k={"const": "k"}, n={"const": 3}),
        [{"k": "k", "n": 3}],
        [{"k": "kk", "n": 3}, {"k": "k", "n": "3"}],
    ),
    "object": (
        need(at=need(x=INTEGER, name=STRING)),
        [{"at": {"x": 1, "name": 'a"b<｜DSML｜'}}],
        [{"at": {"x": 1}}, {"at": {"x": "1", "name": ""}}, {"at": {"x": 1, "name": "</｜DSML｜"}}],
    ),
    "array": (
        need(l={"type": "array", "items": need(s=STRING), "minItems": 1, "maxItems": 2}),
        [{"l": [{"s": "a"}]}, {"l": [{"s": "a"}, {"s": "</"}]}],
        [{"l": []}, {"l": [{"s": "a"}] * 3}, {"l": [1]}, {"l": [{"s": "</｜DSML｜ parameter>"}]}],
    ),
    "alternatives": (
        need(
            a={"type": ["string", "null"]},
            b={"anyOf": [STRING, {"type": "array", "items": INTEGER}]},
            c={"oneOf": [{"enum": ["x"]}, INTEGER, {"type": "boolean"}]},
        ),
        [{"a": "x", "b": "y", "c": "x"}, {"a": None, "b": [1, 2], "c": True}],
        [{"a": 1, "b": "", "c": 1}, {"a": "", "b": ["s"], "c": 1}, {"a": "", "b": "", "c": "y"}],
    ),
    "anything": (
        need(a={}, b=True),
        [{"a": "x", "b": {"k": [1, "y", None]}}, {"a": 1.5, "b": "z"}],
        [{"a": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    "references": (
        {**need(a={"$ref": "#/$defs/node"}, s={"$ref": "#/$defs/s"}),
         "$defs": {"node": NODE, "s": STRING}},
        [{"a": {"v": 1, "next": {"v": 2}}, "s": "x"}],
        [{"a": {"v": 1, "next": {"v": "2"}}, "s": "x"}, {"a": {}, "s": 1}],
    ),
    "reference to the whole": (
        {"type": "object", "properties": {"s": STRING, "more": {"$ref": "#"}}, "required": ["s"]},
        [{"s": "a", "more": {"s": "b", "more": {"s": "c"}}}],
        [{"s": "a", "more": {"more": {"s": "c"}}}],
    ),
    "open": (
        {"type": "object", "properties": {"a-b": STRING}, "additionalProperties": True},
        [{}, {"a-b": "x"}, {"a-b": "x", "c.d$": 1, "ü城": "y"}],
        [raw("a b", "x"), raw('a"b', "x"), raw("", "x")],
    ),
    "open, of integers": (
        {"type": "object", "additionalProperties": INTEGER},
        [{}, {"c": 1, "d": 2}],
        [{"c": "x"}, {"c": 1.5}],
    ),
    "any object": ({"type": "object"}, [{}, {"a": "x", "b": [1]}], ["text"]),
    "required alone": ({"type": "object", "required": ["z"]}, [{"z": 1, "y": "x"}], [{}, {"y": 1}]),
    "closed": ({**need(a=STRING), "additionalProperties": False}, [{"a": "x"}], [{"b": "x"}]),
    "names": (
        need(**{"a-b": STRING, "a_b": INTEGER, "a.b$": STRING, "城": STRING, "enum": STRING}),
        [{"a-b": "x", "a_b": 1, "a.b$": "y", "城": "z", "enum": "e"}],
        [{"a_b": 1}],
    ),
    "pattern": (
        need(a={"type": "string", "pattern": "^[a-z]{2}[0-9]+$"}),
        [{"a": "ab12"}],
        [{"a": "a12"}, {"a": "ab"}, {"a": "ab1</"}],
    ),
    "open pattern": (need(a={"type": "string", "pattern": "^a.*b$"}), [{"a": "axb"}], [BLOCK]),
    "maxLength": (
        need(a={"type": "string", "maxLength": 3}),
        # xgrammar counts a character that comes in several tokens one too early.
        [{"a": ""}, {"a": "abc"}, {"a": "日é"}],
        [{"a": "abcd"}, {"a": "日é😀x"}],
    ),
    "open format": (
        need(a={"type": "array", "items": {"type": "string", "format": "json-pointer"}}),
        [{"a": ["/a"]}],
        [{"a": ["/</｜DSML｜ parameter>"]}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_schema_lets_through_what_it_allows(name: str) -> None:
    schema, valid, invalid = CASES[name]
    asked = one(schema)
    tag = asked.tag()
    for values in valid:
        text = call(values) + END
        assert accepted(tag, text), values
        assert asked.read(RECIPE.encode(text)) == ("", [("f", values)])
        if schema is not None and "$ref" not in json.dumps(schema):
            jsonschema.validate(values, schema)
    for wrong in invalid:
        assert not accepted(tag, call(wrong) + END), wrong


@pytest.mark.parametrize("name", CASES)
def test_vllm_takes_the_tag(name: str) -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    for loose in (False, True):
        outputs = StructuredOutputsParams(structural_tag=one(CASES[name][0]).tag(loose=loose))
        validate_xgrammar_grammar(SamplingParams(structured_outputs=outputs))


def upstream(tool: Json) -> str:
    """xgrammar's own tag for the model; it begins before the block."""
    import xgrammar

    tag = xgrammar.get_model_structural_tag(
        "deepseek_v4_1", tools=[tool], tool_choice="required", reasoning="disabled"
    )
    text = tag.model_dump_json()
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"open", "required alone"}))
def test_xgrammars_own_tag_for_the_model_accepts_these_calls(name: str) -> None:
    """Those two it knows as narrower: names of letters, digits and _; no name but a declared."""
    schema, valid, _ = CASES[name]
    tag = upstream(function("f", schema))
    for values in valid:
        assert accepted(tag, f"\n\n{BEGIN}{call(values)}{END}"), values


def test_why_xgrammars_own_tag_is_not_used() -> None:
    """It ends a value where the recipe does not, and the other way round."""
    asked = one(need(city=STRING))
    ids = RECIPE.encode(call({"city": "x"}) + END)
    end = [at for at, token in enumerate(ids) if token == DSML][2]
    spelled = ids[:end] + SPELLED + ids[end + 1 :]
    other = RECIPE.encode(call({"city": "a</｜DSML｜ b"}) + END)
    for odd in (spelled, other):
        assert refused_at(upstream(asked.tools[0]), RECIPE.encode(f"\n\n{BEGIN}") + odd) is None
        assert refused_at(asked.tag(), odd) is not None
    assert asked.read(spelled)[1] != [("f", {"city": "x"})]
    assert asked.read(other)[1] == [("f", {"city": "a"})]


def test_loose_asks_for_names_only() -> None:
    schema = need(a={"type": "string", "pattern": "(?=x)"}, b=INTEGER)
    asked = one(schema)
    with pytest.raises(RuntimeError, match="Lookahead is not supported"):
        matcher(asked.tag())
    tag = asked.tag(loose=True)
    assert accepted(tag, call({"a": [1], "b": "text"}) + END)
    assert not accepted(tag, call({"a": "x"}) + END)
    assert not accepted(tag, call({"a": "x", "b": 1, "c": 1}) + END)


# The block

WEATHER = function("get-weather_2", need(city=STRING, days=INTEGER))
CITY: Json = {"city": "Oslo", "days": 3}
TWO = Asked((WEATHER, function("ping")))


def test_a_block_has_one_call_or_more_of_the_tools_given() -> None:
    tag = TWO.tag()
    ping, weather = call({}, "ping"), call(CITY, "get-weather_2")
    for calls in ([ping], [weather], [weather, ping, weather]):
        text = "".join(calls) + END
        assert accepted(tag, text)
        _, found = TWO.read(RECIPE.encode(text))
        assert len(found) == len(calls) and set(map(str, found)) <= {
            str(("ping", {})),
            str(("get-weather_2", CITY)),
        }
    for text in (
        END,
        weather,
        weather.rstrip() + END,
        f"{weather}\n{END}",
        weather + END + "\n",
        weather + END + BEGIN + weather + END,
        call(CITY, "get_weather_2") + END,
        call(CITY, "ping") + END,
        call({}, "pin") + END,
        call({}, "pingg") + END,
        f"text{weather}{END}",
        f"\n\n{BEGIN}{weather}{END}",
        weather.replace("</｜DSML｜ invoke>\n", "") + END,
        weather.replace(CLOSE, CLOSE.rstrip()) + END,
    ):
        assert not accepted(tag, text), text


@pytest.mark.parametrize("required", [True, False])
def test_a_marker_is_the_token(required: bool) -> None:
    """Spelled in other tokens it is text to the recipe, so it may not count as a tag."""
    tools = WEATHER if required else function("get-weather_2", need(city=STRING), strict=True)
    asked = Asked((tools,), required)
    values = CITY if required else {"city": "Oslo"}
    text = ("" if required else BEGIN) + call(values, "get-weather_2") + END
    ids = RECIPE.encode(text)
    assert refused_at(asked.tag(), ids) is None
    for at in [at for at, token in enumerate(ids) if token == DSML]:
        spelled = ids[:at] + SPELLED + ids[at + 1 :]
        refused = refused_at(asked.tag(), spelled)
        assert refused is not None, at
        if required or at > ids.index(DSML):
            # Nowhere does it go on behind the spelling.
            assert refused < at + len(SPELLED), at


def test_strict_tools_leave_text_free() -> None:
    tools = (function("f", need(city=STRING), strict=True), function("ping", strict=True))
    asked = Asked(tools, required=False)
    tag, block = asked.tag(), BEGIN + call({"city": "x"}) + call({}, "ping") + END
    calls = [("f", {"city": "x"}), ("ping", {})]
    for text in ("", "text", "a < b", "<", "</think> <think>", "日\n", "call ping>"):
        assert accepted(tag, text)
        assert accepted(tag, text + block)
        found, made = asked.read(RECIPE.encode(text + block))
        assert (found, made) == (text.replace("</think>", "").rstrip("\n"), calls)
    for text in (
        "x｜DSML｜",
        "<｜DSML｜ call>",
        BEGIN,
        BEGIN + END,
        block.removesuffix(END),
        block + "x",
        block + block,
        BEGIN + call({}) + END,
        BEGIN + call({"city": "x"}, "g") + END,
        call({"city": "x"}),
    ):
        assert not accepted(tag, text), text
    spelled = RECIPE.encode("<") + SPELLED + RECIPE.encode(" calls> is how it is written")
    assert refused_at(tag, spelled) is None
    assert asked.read(spelled) == ("<｜DSML｜ calls> is how it is written", [])


# Texts drawn from the masks

CLOSING = [*(VOCAB[sign] for sign in '<"}]'), EOS]
#: After "<" and "/".
GO_ON = {(VOCAB["<"],): [VOCAB["/"]], (VOCAB["<"], VOCAB["/"]): [DSML]}


def drawn(tag: str, seed: int, limit: int = 1500) -> list[int] | None:
    """Tokens that the masks allow, without EOS; None if they have not ended by the limit. What
    closes something is preferred, so that most do."""
    import xgrammar

    rng, walker, ids = random.Random(seed), matcher(tag), list[int]()
    mask = xgrammar.allocate_token_bitmask(1, len(VOCAB))
    while len(ids) < limit:
        walker.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [t for t in range(len(VOCAB)) if words[t >> 5] >> (t & 31) & 1]
        wished = GO_ON.get(tuple(ids[-2:])) or GO_ON.get(tuple(ids[-1:])) or CLOSING
        closing = [token for token in wished if token in allowed]
        token = rng.choice(closing if closing and rng.random() < 0.7 else allowed)
        assert walker.accept_token(token)
        if token == EOS:
            return ids
        ids.append(token)
    return None


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_drawn_reads_back_as_the_schema_allows(name: str) -> None:
    schema, _, _ = CASES[name]
    asked = one(schema)
    ended = [ids for seed in range(12) if (ids := drawn(asked.tag(), seed)) is not None]
    assert ended, "no draw came to its end"
    for ids in ended:
        text, calls = asked.read(ids)
        assert text == "" and calls
        for function_name, values in calls:
            assert function_name == "f"
            # Bytes that are no character may come, and count as they are shown. A pattern that
            # is open is not enforced.
            if schema is not None and name != "open pattern" and "\ufffd" not in str(values):
                jsonschema.validate(values, schema)


def test_references_that_the_recipe_loses_are_let_go() -> None:
    schema = {**need(a={"$ref": "#/$defs/x"}, b=INTEGER), "$defs": {"x": INTEGER}}
    asked = Asked((function("f", schema, strict=True),), required=False)
    for value in (1, "x", {"k": None}):
        values = {"a": value, "b": 2}
        assert accepted(asked.tag(), BEGIN + call(values) + END)
        assert asked.read(RECIPE.encode(BEGIN + call(values) + END)) == ("", [("f", values)])
    assert not accepted(asked.tag(), BEGIN + call({"a": 1, "b": "x"}) + END)
    found = structured_outputs("json", json.dumps(need(a={"$ref": "#/$defs/x"})))
    assert found is not None
    compiler().compile_json_schema(found["json"])
