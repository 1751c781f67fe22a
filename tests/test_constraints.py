"""What the recipe asks to be obeyed, as vLLM's structured outputs: the part without an engine.

That xgrammar takes the tags and accepts the right texts: tests/rehearsal/test_constraints.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversionOptions,
    MessagesRequest,
    ModelVersion,
    ResponsesRequest,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_overlay.serving.constraint import VALUE_END, structured_outputs

MODEL = "m"
OPTIONS = ConversionOptions().with_model_versions_by_name({MODEL: ModelVersion.DeepseekV41Flash})
DSML = 502
USER = [{"role": "user", "content": "Answer in JSON."}]
OFF = {"thinking": {"type": "disabled"}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

Json = dict[str, Any]


def asked(request: type, **body: Any) -> Any:
    """The recipe's constraint for a request."""
    converted = request({"model": MODEL, **body}).convert(OPTIONS)
    return converted.inference_options.output_constraint


def tool(name: str = "f", **function: Any) -> Json:
    return {"type": "function", "function": {"name": name, **function}}


def chat(*tools: Json, required: bool = False, **body: Any) -> Any:
    choice: Json = {"tool_choice": "required", **OFF} if required else {}
    return asked(ChatCompletionRequest, messages=USER, tools=list(tools), **choice, **body)


def tag_of(constraint: Any, **more: Any) -> Json:
    """The tag for a constraint, read back."""
    found = structured_outputs(constraint.kind, constraint.schema, dsml=DSML, **more)
    assert found is not None and found.keys() == {"structural_tag"}
    tag: Json = json.loads(found["structural_tag"])
    assert tag["type"] == "structural_tag"
    return tag


def forms(node: Any) -> Iterator[Json]:
    """Every format in a tag, without the schemas in it."""
    if isinstance(node, dict):
        yield node
        node = [value for key, value in node.items() if key != "json_schema"]
    for item in node if isinstance(node, list) else ():
        yield from forms(item)


def schemas(tag: Json) -> list[Json]:
    return [form["json_schema"] for form in forms(tag) if form.get("type") == "json_schema"]


def texts(tag: Json) -> list[str]:
    return [form["value"] for form in forms(tag) if form.get("type") == "const_string"]


def only(schema: Json, **more: Any) -> Json:
    """The schema of the one JSON parameter of a tool that is not strict."""
    parameters = {"type": "object", "properties": {"a": schema}, **more}
    (found,) = schemas(tag_of(chat(tool(parameters=parameters), required=True)))
    return dict(found)


# What is enforced


def test_json_is_the_schema_or_any_object() -> None:
    constraint = asked(
        ChatCompletionRequest, messages=USER, response_format={"type": "json_object"}
    )
    assert structured_outputs(constraint.kind, constraint.schema) == {"json_object": True}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    constraint = asked(ChatCompletionRequest, messages=USER, response_format=form)
    found = structured_outputs(constraint.kind, constraint.schema)
    assert found is not None and json.loads(found["json"]) == CITY
    for anything in ("{}", "true"):
        assert structured_outputs("json", anything) == {"json": "{}"}


def test_a_regex_is_itself() -> None:
    form = {"type": "regex", "regex": "[0-9]+"}
    constraint = asked(ChatCompletionRequest, messages=USER, response_format=form)
    assert structured_outputs(constraint.kind, constraint.schema) == {"regex": "[0-9]+"}


def test_calls_are_free_unless_a_tool_is_strict_or_a_call_required() -> None:
    for strict in (None, False):
        constraint = chat(tool(parameters=CITY, strict=strict), tool("g"))
        assert constraint.kind == "tool_call"
        assert structured_outputs(constraint.kind, constraint.schema) is None
    tag_of(chat(tool(parameters=CITY, strict=True), tool("g", strict=True)))
    tag_of(chat(tool("g"), required=True))


def test_the_three_formats_ask_the_same() -> None:
    function = {"name": "f", "description": "d"}
    responses = asked(
        ResponsesRequest,
        input="x",
        tools=[{"type": "function", **function, "parameters": CITY}],
        tool_choice="required",
        reasoning={"effort": "none"},
    )
    messages = asked(
        MessagesRequest,
        messages=USER,
        max_tokens=9,
        tools=[{**function, "input_schema": CITY}],
        tool_choice={"type": "tool", "name": "f"},
        **OFF,
    )
    expected = tag_of(chat(tool(**function, parameters=CITY), required=True))
    assert tag_of(responses) == tag_of(messages) == expected


def test_a_named_tool_is_the_only_one() -> None:
    named = {"type": "function", "function": {"name": "get-x_2"}}
    constraint = chat(tool("f"), tool("get-x_2"), tool_choice=named, **OFF)
    begins = [text for text in texts(tag_of(constraint)) if "invoke name" in text]
    assert begins == [' invoke name="get-x_2">\n']


def test_a_required_call_goes_on_where_the_prompt_ends() -> None:
    elements = tag_of(chat(tool("f"), required=True))["format"]["elements"]
    assert elements[0]["type"] == "plus"
    first = elements[0]["content"]["elements"][:3]
    assert [form.get("value", form.get("token")) for form in first] == [
        "<",
        DSML,
        ' invoke name="f">\n',
    ]
    assert texts({"elements": elements[1:]}) == ["</", " calls>"]


def test_strict_tools_leave_text_free_up_to_one_block() -> None:
    form = tag_of(chat(tool("f", strict=True)))["format"]
    assert (form["type"], form["trigger_tokens"]) == ("token_triggered_tags", [DSML])
    assert form["stop_after_first"] is True
    (block,) = form["tags"]
    assert block["begin"] == {"type": "token", "token": DSML}
    assert texts(block["content"])[0] == " calls>\n"


# Schemas


def test_a_function_without_parameters_takes_none() -> None:
    for parameters in ({}, {"parameters": {"type": "object", "properties": {}}}):
        made = texts(tag_of(chat(tool(**parameters), required=True)))
        assert not any("parameter" in text for text in made)


@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_references_that_the_recipe_loses_are_let_go(key: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": f"#/{key}/x"}},
        "required": ["a"],
        "additionalProperties": False,
        key: {"x": {"type": "integer"}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    constraint = asked(ChatCompletionRequest, messages=USER, response_format=form)
    assert "$ref" in constraint.schema and '"integer"' not in constraint.schema
    found = structured_outputs(constraint.kind, constraint.schema)
    assert found is not None and json.loads(found["json"])["properties"] == {"a": {}}
    assert "$ref" not in json.dumps(tag_of(chat(tool(parameters=schema, strict=True))))


def test_references_that_lead_somewhere_are_kept() -> None:
    inner = {"type": "object", "properties": {"next": {"$ref": "#/$defs/x"}}}
    schema = json.dumps({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": inner}})
    assert structured_outputs("json", schema) == {"json": schema}
    found = only({"$ref": "#/$defs/x"}, **{"$defs": {"x": inner}})
    ref = found["properties"]["next"]["$ref"]
    target: Any = found
    for part in ref.split("/")[1:]:
        target = target[part]
    assert target["properties"]["next"]["$ref"] == ref


def test_names_that_are_keywords_stay_names() -> None:
    names = {"pattern": {"type": "integer"}, "$ref": {"type": "integer"}, "enum": {"minLength": 1}}
    found = only({"type": "object", "properties": names})
    assert found["properties"].keys() == names.keys()
    assert found["properties"]["pattern"] == {"type": "integer"}


def test_values_are_no_schemas() -> None:
    values = [{"$ref": "#/nowhere"}, {"pattern": "a.b"}]
    assert only({"enum": values}) == {"enum": values}
    schema = {"properties": {"a": {"const": values[0], "default": values}}}
    assert structured_outputs("json", json.dumps(schema)) == {"json": json.dumps(schema)}


def test_an_end_of_value_is_no_choice() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["x", f"{VALUE_END}y"]}}}
    made = texts(tag_of(chat(tool(parameters=parameters), required=True)))
    assert "x" in made and not any("DSML" in text for text in made)


def test_references_in_a_circle_tell_nothing() -> None:
    circle = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/x"}]}
    tools = [tool(parameters={"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": circle}})]
    found = structured_outputs("tool_call_required", json.dumps(tools), dsml=DSML)
    assert found is not None and "any_text" in found["structural_tag"]


@pytest.mark.parametrize(
    "pattern, kept",
    [
        (r"[a-z]{2}\.[0-9]+", True),
        (r"\\\.a", True),
        ("^(?:on|off)$", True),
        ("a.b", False),
        (r"\\.", False),
        ("[^a]", False),
        (r"\S+", False),
        ("[a-\uffff]", False),
        (r"\uff5c", False),
    ],
)
def test_patterns_that_may_run_over_the_end_are_dropped(pattern: str, kept: bool) -> None:
    item = only({"type": "array", "items": {"type": "string", "pattern": pattern}})["items"]
    assert ("pattern" in item) is kept
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    made = [form["type"] for form in forms(tag_of(chat(tool(parameters=parameters), required=True)))
            if form.get("type") in ("regex", "any_text")]  # fmt: skip
    assert made == ["regex" if kept else "any_text"]


TOO_LARGE: Mapping[str, Any] = {
    "an enum": {"enum": [str(i) for i in range(1001)]},
    "a pattern": {"type": "string", "pattern": "a?" * 501},
    "characters": {"type": "string", "description": "x" * 120_000},
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_would_hold_the_engine_up_is_not_enforced(what: str) -> None:
    parameters = {"type": "object", "properties": {"v": TOO_LARGE[what]}, "required": ["v"]}
    tool = {"name": "f", "parameters": parameters}
    loose = structured_outputs("tool_call_required", json.dumps([{"function": tool}]), dsml=DSML)
    names = {"type": "object", "properties": {"v": True}, "required": ["v"]}
    known = json.dumps([{"function": {**tool, "parameters": names}}])
    assert loose == structured_outputs("tool_call_required", known, dsml=DSML)
    strict = json.dumps([{"function": {**tool, "strict": True}}])
    for kind, schema in (("json", json.dumps(parameters)), ("tool_call", strict)):
        with pytest.raises(ValueError, match=f"cannot be enforced: .*{what}"):
            structured_outputs(kind, schema, dsml=DSML)
    with pytest.raises(ValueError, match="a pattern of 1001 characters; at most 1000"):
        structured_outputs("regex", "a" * 1001)


def test_a_loose_json_schema_loses_only_what_vllm_refuses() -> None:
    inner = {"type": "integer", "multipleOf": 5, "minimum": 1}
    listed = {"type": "array", "items": inner, "uniqueItems": True, "minItems": 1}
    # Here "format" is the name of a property, and a value.
    schema = {"type": "object", "properties": {"format": listed, "b": {"enum": ["contains"]}}}
    found = structured_outputs("json", json.dumps(schema), loose=True)
    assert found is not None
    kept = {"type": "integer", "minimum": 1}
    assert json.loads(found["json"]) == {
        "type": "object",
        "properties": {
            "format": {"type": "array", "items": kept, "minItems": 1},
            "b": {"enum": ["contains"]},
        },
    }


def test_loose_keeps_the_names_of_what_is_not_strict() -> None:
    odd = {"type": "string", "pattern": "(?=x)"}
    parameters: Json = {"type": "object", "properties": {"a": odd, "b": odd}, "required": ["b"]}
    constraint = chat(tool(parameters=parameters), required=True)
    assert "(?=x)" in json.dumps(tag_of(constraint))
    loose = tag_of(constraint, loose=True)
    assert "(?=x)" not in json.dumps(loose)
    assert {"a", "b"} <= set(texts(loose))
    assert [form["type"] for form in forms(loose)].count("optional") == 1
    parameters["required"] = ["a", "b"]
    strict = chat(tool(parameters=parameters, strict=True))
    assert tag_of(strict, loose=True) == tag_of(strict)


def test_a_name_that_does_not_come_through_is_left_out() -> None:
    names = ["a b", 'a"b', "a\\b", "a\nb", "a-b.c_d$", "城"]
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    made = texts(tag_of(chat(tool(parameters=parameters), required=True)))
    assert [name for name in names if name in made] == names[-2:]


KINDS = st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array"])
VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4) | st.just(VALUE_END)
LEAVES = (
    st.just(True)
    | st.fixed_dictionaries({"type": KINDS})
    | st.fixed_dictionaries({"enum": st.lists(VALUES, max_size=3)})
    | st.fixed_dictionaries({"const": VALUES})
    | st.fixed_dictionaries({"type": st.just("string"), "pattern": st.text(max_size=4)})
    | st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/x", "#/nowhere", "other"])})
    | st.fixed_dictionaries({"type": st.lists(KINDS, max_size=3, unique=True)})
    | st.fixed_dictionaries({"maxLength": st.integers(-1, 9)})
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"properties": st.dictionaries(st.text(max_size=3), inner)}),
        st.fixed_dictionaries(
            {"anyOf": st.lists(inner, max_size=3)}, optional={"description": st.just("d")}
        ),
        st.fixed_dictionaries({"allOf": st.lists(inner, max_size=2)}),
    ),
    max_leaves=6,
)


@given(
    properties=st.dictionaries(st.text(max_size=4), SCHEMAS, max_size=4),
    inner=SCHEMAS,
    more=st.fixed_dictionaries(
        {},
        optional={
            "required": st.lists(st.text(max_size=4), max_size=3) | st.just(True),
            "additionalProperties": st.booleans() | SCHEMAS,
        },
    ),
    loose=st.booleans(),
)
@settings(deadline=None)
def test_whatever_the_schema_only_the_token_is_a_marker(
    properties: Json, inner: Any, more: Mapping[str, Any], loose: bool
) -> None:
    parameters = {"type": "object", "properties": properties, "$defs": {"x": inner}, **more}
    tools = json.dumps([tool(parameters=parameters)])
    found = structured_outputs("tool_call_required", tools, dsml=DSML, loose=loose)
    assert found is not None
    tag = json.loads(found["structural_tag"])
    assert not any("DSML" in text for text in texts(tag))
    for form in forms(tag):
        if form.get("type") in ("any_text", "json_schema"):
            assert form["excludes"] == [VALUE_END]
        if form.get("type") in ("or", "sequence"):
            assert form["elements"]


# What is refused


def test_what_cannot_be_understood_is_an_error() -> None:
    tools = json.dumps([tool(strict=True)])
    with pytest.raises(ValueError, match="unknown kind of constraint: 'xml'"):
        structured_outputs("xml", "")
    with pytest.raises(ValueError, match="without tools"):
        structured_outputs("tool_call_required", "[]", dsml=DSML)
    with pytest.raises(ValueError, match="id of ｜DSML｜"):
        structured_outputs("tool_call", tools)
    for kind in ("json", "tool_call"):
        with pytest.raises(ValueError):
            structured_outputs(kind, "{bad")
