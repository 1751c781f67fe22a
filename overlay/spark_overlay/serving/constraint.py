"""What deepseek-recipe asks the model to obey, in the words of vLLM's StructuredOutputsParams.

The recipe names a constraint by kind and text (``inference_options.output_constraint``) and leaves
it to the server to enforce it. JSON and regex are vLLM's own kinds. Tool calls are enforced with
an xgrammar structural tag in V4.1's DSML; xgrammar's own builder for this model
(``xgrammar.builtin_structural_tag.get_deepseek_v4_1_structural_tag`` of 0.2.8) is the source of
the form, and differs from this one where it would let through what the recipe reads otherwise:

- It begins with the calls block; for a required call the recipe has put that into the prompt.
- To the recipe a value ends at any ``</｜DSML｜`` and text ends at any ``<｜DSML｜``, whatever
  follows. So no value may contain the one, and text may contain the other only as a calls block.
- Nothing is read after the block, so nothing may follow it.

A string of the arguments is raw text up to its closing tag: any character is allowed and its
length is not bounded. xgrammar drops minLength and maxLength where a text is forbidden, so they
are not enforced; max_tokens is what ends a value that never closes. Arguments come in the order
of the schema. What xgrammar cannot compile (a lookahead, for one) it refuses, and vLLM raises
VLLMValidationError before the request is queued: see ``loose``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

CALLS_BEGIN, CALLS_END = "<｜DSML｜ calls>\n", "</｜DSML｜ calls>"
INVOKE_END = "</｜DSML｜ invoke>\n"
#: Where the recipe's parser leaves text, and where it ends a value.
TAG, VALUE_END = "<｜DSML｜", "</｜DSML｜"

Schema = Any  # a JSON Schema: an object, True or False

#: Keywords that hold values, and those that hold schemas by name: a property may be called
#: "pattern" or "$ref".
_VALUES = {"enum", "const", "default", "examples"}
_NAMED = {"properties", "patternProperties", "$defs", "$def", "definitions", "dependentSchemas"}
#: Of the formats that xgrammar 0.2.8 knows, those whose texts may contain VALUE_END.
_OPEN_FORMATS = {"json-pointer", "relative-json-pointer"}
#: Signs that a pattern may match ｜ (U+FF5C): a dot, a negated class, any character beyond ASCII
#: (the end of a range, say) or an escape that may stand for one.
_OPEN_PATTERN = re.compile(r"(?<!\\)\.|\[\^|\\[SWDpPux]|[^\x00-\x7f]")


def structured_outputs(kind: str, schema: str, *, loose: bool = False) -> dict[str, Any] | None:
    """Arguments of vLLM's StructuredOutputsParams for a constraint of the recipe.

    ``json``: the schema, or any JSON object for an empty text. ``regex``: the expression.
    ``tool_call_required``: the rest of a calls block that the prompt has opened, of one or more
    calls. ``tool_call``: only if a tool is strict; text, then at most one calls block.

    Args:
        kind: ``OutputConstraint.kind``.
        schema: ``OutputConstraint.schema``: a JSON Schema, a regular expression, or a list of
            Chat Completions function tools.
        loose: Of a tool that is not strict, enforce the names of the arguments and which are
            required, and no more. For a second try when the first was refused: such a schema
            was never promised to be obeyed, so it is no reason to refuse the request.

    Returns:
        One keyword argument, or None where nothing is enforced.

    Raises:
        ValueError: an unknown kind, text that is no JSON, a list without tools.
    """
    if kind == "json":
        if not schema:
            return {"json_object": True}
        root = json.loads(schema)
        return {"json": _text(_rewrite(root, lambda node: _without_lost_refs(node, root)))}
    if kind == "regex":
        return {"regex": schema}
    if kind not in ("tool_call", "tool_call_required"):
        raise ValueError(f"unknown kind of constraint: {kind!r}")
    functions = [tool["function"] for tool in json.loads(schema)]
    if not functions:
        raise ValueError("a constraint on tool calls without tools")
    if kind == "tool_call" and not any(function.get("strict") is True for function in functions):
        return None
    calls = {
        "type": "tags_with_separator",
        "tags": [_invoke(function, loose) for function in functions],
        "separator": "",
        "at_least_one": True,
    }
    if kind == "tool_call_required":
        end = {"type": "const_string", "value": CALLS_END}
        return _structural_tag({"type": "sequence", "elements": [calls, end]})
    block = {"type": "tag", "begin": CALLS_BEGIN, "content": calls, "end": CALLS_END}
    return _structural_tag(
        {"type": "triggered_tags", "triggers": [TAG], "tags": [block], "stop_after_first": True}
    )


def _structural_tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"structural_tag": _text({"type": "structural_tag", "format": form})}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _invoke(function: Mapping[str, Any], loose: bool) -> dict[str, Any]:
    """The tag of one call of a tool; names are safe as they are, the recipe sees to it."""
    schema = function.get("parameters")
    if not schema:
        # The API: a function whose parameters are omitted has none.
        schema = {"type": "object", "properties": {}}
    elif loose and function.get("strict") is not True:
        schema = _names_only(schema)
    root = schema
    schema = _rewrite(root, lambda node: _without_open_texts(_without_lost_refs(node, root)))
    return {
        "type": "tag",
        "begin": f'<｜DSML｜ invoke name="{function["name"]}">\n',
        "content": {
            "type": "json_schema",
            "json_schema": schema,
            "style": "deepseek_v4_1_xml",
            "excludes": [VALUE_END],
            # As V4.1's prompt shows it: a line for each tag, JSON with single spaces. Unbounded,
            # white space is what a model that is lost falls into.
            "max_whitespace_cnt": 1,
        },
        "end": INVOKE_END,
    }


def _names_only(schema: Schema) -> Schema:
    """Of an object's schema, the names of its properties and which of them are required."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {"type": "object"}
    required = schema.get("required")
    return {
        "type": "object",
        "properties": {name: {} for name in properties},
        "required": [n for n in required if n in properties] if isinstance(required, list) else [],
        "additionalProperties": schema.get("additionalProperties", False) is not False,
    }


def _rewrite(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A schema with ``change`` made to each object in it that is a schema, the inner ones first."""
    if isinstance(node, list):
        return [_rewrite(item, change) for item in node]
    if not isinstance(node, dict):
        return node
    made = {}
    for key, value in node.items():
        if key in _VALUES:
            made[key] = value
        elif key in _NAMED and isinstance(value, dict):
            made[key] = {name: _rewrite(schema, change) for name, schema in value.items()}
        else:
            made[key] = _rewrite(value, change)
    return change(made)


def _without_lost_refs(node: dict[str, Any], root: Schema) -> dict[str, Any]:
    """Without a reference that leads nowhere, which xgrammar refuses: anything goes there.

    For a strict schema the recipe keeps ``$def``, as DeepSeek spells it, and drops ``$defs`` and
    ``definitions``, while references to them stay.
    """
    ref = node.get("$ref")
    if not isinstance(ref, str):
        return node
    found: Any = root if ref == "#" or ref.startswith("#/") else None
    for part in ref.split("/")[1:]:  # xgrammar too takes each part literally
        found = found.get(part) if isinstance(found, dict) else None
    if found is not None:
        return node
    return {key: value for key, value in node.items() if key != "$ref"}


def _without_open_texts(node: dict[str, Any]) -> dict[str, Any]:
    """Without a pattern or format that could run over the end of a value.

    xgrammar matches a string that has one by it alone, and not by ``excludes``.
    """
    pattern, form = node.get("pattern"), node.get("format")
    if isinstance(pattern, str) and _OPEN_PATTERN.search(pattern.replace("\\\\", "")):
        node = {key: value for key, value in node.items() if key != "pattern"}
    if form in _OPEN_FORMATS:
        node = {key: value for key, value in node.items() if key != "format"}
    return node
