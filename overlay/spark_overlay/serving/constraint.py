"""What deepseek-recipe asks the model to obey, in the words of vLLM's StructuredOutputsParams.

The recipe names a constraint by kind and text (``inference_options.output_constraint``) and leaves
it to the server to enforce it. JSON and regex are vLLM's own kinds. Tool calls are an xgrammar
structural tag that says exactly what the recipe reads back as calls of these tools. xgrammar has
a builder for this model too (``get_deepseek_v4_1_structural_tag`` in its 0.2.8, with the style
``deepseek_v4_1_xml``). It is not used: it works on text, and the recipe on tokens.

- ``｜DSML｜`` is a marker as the special token alone. A model may spell it in other tokens: to the
  recipe that is text, to that builder a tag. Here the token itself is demanded.
- A value ends at any ``</｜DSML｜``, whatever follows, inside a JSON string too. No value holds it.
- The recipe reads nothing after the block, so nothing follows it; and for a required call the
  prompt has opened the block already.

A string parameter is raw text: every character is allowed, and only maxLength bounds its length.
max_tokens ends a model that never closes one. Parameters come in the schema's order; where others
are allowed beside them, those are not kept from having a declared name. xgrammar enforces types,
enum, const, required, properties, items and the bounds of numbers and arrays. Not enforced:
multipleOf, uniqueItems, allOf of several, a string parameter's format and minLength, the lengths
of strings inside JSON, and patterns that could run over the end of a value. A schema that xgrammar
cannot compile (a lookahead, for one) makes vLLM raise VLLMValidationError before the request is
queued: see ``loose``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Ends a value, to the recipe.
VALUE_END = "</｜DSML｜"

#: Bounds of what is enforced, as OpenAI's service has them for a schema's text and its enums. A
#: grammar's cost grows faster than they do, in the one engine that all requests share: an enum of
#: 10,000 values takes 3 s to compile, a pattern of as many signs minutes.
MOST_TEXT, MOST_VALUES, MOST_PATTERN = 120_000, 1_000, 1_000

Schema = Any  # a JSON Schema: an object, True or False
Form = dict[str, Any]  # a format of an xgrammar structural tag
Kinds = tuple[list[Form], list[Schema]]  # of one parameter: raw texts, and JSON that is no string

ANY_TEXT: Form = {"type": "any_text", "excludes": [VALUE_END]}
NO_STRING: Schema = {"type": ["number", "boolean", "null", "array", "object"]}
#: What a parameter's name may be: the recipe reads it up to white space or a quote and puts it
#: into JSON as it is.
NAME = r'[^"\\<>\x00-\x20]+'
_BAD_NAME = re.compile(r'["\\\s\x00-\x1f]')

#: Keywords that hold values, and those that hold schemas by name: a property may be called
#: "pattern" or "$ref".
_VALUES = {"enum", "const", "default", "examples"}
_NAMED = {"properties", "patternProperties", "$defs", "$def", "definitions", "dependentSchemas"}
#: Keywords that tell a type that is not named.
_TELLING = {
    "object": {"properties", "required", "additionalProperties", "patternProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"pattern", "format", "minLength", "maxLength"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
}
#: What vLLM 0.32 and 0.33 refuse of a schema, alone or beside others, when xgrammar enforces it.
_NOT_ENFORCED = {
    "multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "format",
    "propertyNames", "patternProperties", "unevaluatedProperties", "minLength", "maxLength",
}  # fmt: skip
#: Of the formats that xgrammar 0.2.8 knows, those whose texts may contain VALUE_END.
_OPEN_FORMATS = {"json-pointer", "relative-json-pointer"}
#: Signs that a pattern may match ｜ (U+FF5C): a dot, a negated class, any character beyond ASCII
#: (the end of a range, say) or an escape that may stand for one.
_OPEN_PATTERN = re.compile(r"(?<!\\)\.|\[\^|\\[SWDpPux]|[^\x00-\x7f]")


def structured_outputs(
    kind: str, schema: str, *, dsml: int | None = None, loose: bool = False
) -> dict[str, Any] | None:
    """Arguments of vLLM's StructuredOutputsParams for a constraint of the recipe.

    ``json``: the schema, or any JSON object for an empty text. ``regex``: the expression.
    ``tool_call_required``: the rest of a calls block that the prompt has opened, with one or more
    calls. ``tool_call``: only if a tool is strict; text, then at most one calls block.

    Args:
        kind: ``OutputConstraint.kind``.
        schema: ``OutputConstraint.schema``: a JSON Schema, a regular expression, or a list of
            Chat Completions function tools.
        dsml: The tokenizer's id of ``｜DSML｜``, needed where calls are enforced. (vLLM validates
            a tag without a tokenizer, so a token cannot be named by its text.)
        loose: Of a tool that is not strict, enforce the names of the parameters and which are
            required, and no more; of a JSON schema all but ``_NOT_ENFORCED``. For a second try
            when vLLM has refused the first: the schema stands in the prompt as well, and what
            cannot be enforced of it is no reason to refuse the request.

    Returns:
        One keyword argument, or None where nothing is enforced.

    Raises:
        ValueError: an unknown kind, text that is no JSON, a list without tools, no ``dsml``, or a
            schema or an expression that is too large to be enforced.
    """
    if kind == "json":
        if not schema:
            return {"json_object": True}
        root = json.loads(schema)
        _require_bounded(root, "the schema of the answer")
        root = {} if root is True else root  # vLLM takes an object only
        root = _rewrite(root, lambda node: _without_lost_ref(node, root))
        return {"json": _text(_rewrite(root, _without_unenforced) if loose else root)}
    if kind == "regex":
        _require_bounded({"pattern": schema}, "the answer's regex")
        return {"regex": schema}
    if kind not in ("tool_call", "tool_call_required"):
        raise ValueError(f"unknown kind of constraint: {kind!r}")
    functions = [tool["function"] for tool in json.loads(schema)]
    if not functions:
        raise ValueError("a constraint on tool calls without tools")
    if kind == "tool_call" and not any(_strict(function) for function in functions):
        return None
    if dsml is None:
        raise ValueError("tool calls are enforced by the id of ｜DSML｜, and none was given")
    marker = {"type": "token", "token": dsml}
    choices = [_Call(function, marker, loose).form() for function in functions]
    calls = {"type": "plus", "content": _either(choices)}
    if kind == "tool_call_required":
        return _structural_tag(_sequence(calls, "</", marker, " calls>"))
    block = {
        "type": "tag",
        "begin": marker,
        "content": _sequence(" calls>\n", calls, "</", marker),
        "end": " calls>",
    }
    return _structural_tag(
        {
            "type": "token_triggered_tags",
            "trigger_tokens": [dsml],
            "tags": [block],
            "stop_after_first": True,
        }
    )


def _structural_tag(form: Form) -> dict[str, Any]:
    return {"structural_tag": _text({"type": "structural_tag", "format": form})}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _require_bounded(schema: Schema, told: str) -> None:
    if excess := _excess(schema):
        raise ValueError(f"{told} cannot be enforced: {excess}")


def _excess(schema: Schema) -> str | None:
    """What is too large about a schema; None for nothing."""
    found: list[str] = []

    def look(node: dict[str, Any]) -> dict[str, Any]:
        values, pattern = node.get("enum"), node.get("pattern")
        if isinstance(values, list) and len(values) > MOST_VALUES:
            found.append(f"an enum of {len(values)} values; at most {MOST_VALUES} can be")
        if isinstance(pattern, str) and len(pattern) > MOST_PATTERN:
            found.append(f"a pattern of {len(pattern)} characters; at most {MOST_PATTERN} can be")
        return node

    if (size := len(_text(schema))) > MOST_TEXT:
        return f"it has {size} characters; at most {MOST_TEXT} can be"
    _rewrite(schema, look)
    return found[0] if found else None


def _strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


class _Call:
    """One function's calls, each from ``<｜DSML｜ invoke`` to the line that closes it."""

    def __init__(self, function: Mapping[str, Any], marker: Form, loose: bool) -> None:
        self._name, self._marker = function["name"], marker
        # The API: a function whose parameters are omitted has none.
        self._root: Schema = function.get("parameters") or {"properties": {}}
        if _strict(function):
            _require_bounded(self._root, f"the parameters of {self._name}")
        self._loose = not _strict(function) and (loose or _excess(self._root) is not None)

    def form(self) -> Form:
        # The name is safe as it is: the recipe allows letters, digits, _ and -, and joins by ::.
        begin = f' invoke name="{self._name}">\n'
        end = ("</", self._marker, " invoke>\n")
        return _sequence("<", self._marker, begin, *self._parameters(), *end)

    def _parameters(self) -> list[Form]:
        declared, required = self._root.get("properties"), self._root.get("required")
        named = dict(declared) if isinstance(declared, dict) else {}
        required = required if isinstance(required, list) else []
        for name in required:
            named.setdefault(name, True)
        forms = []
        for name, value in named.items():
            # False forbids a parameter, and such a name does not come through.
            if value is not False and not _BAD_NAME.search(name):
                form = self._parameter(name, value)
                forms.append(form if name in required else {"type": "optional", "content": form})
        others = self._root.get("additionalProperties", declared is None)
        if others is not False:
            name_form = {"type": "regex", "pattern": NAME}
            forms.append({"type": "star", "content": self._parameter(name_form, others)})
        return forms

    def _parameter(self, name: str | Form, schema: Schema) -> Form:
        texts, values = _kinds(True if self._loose else schema, self._root)
        choices = [_sequence('true">', form) for form in texts]
        if values:
            choices.append(_sequence('false">', _json(values, self._root)))
        begin = ("<", self._marker, ' parameter name="', name, '" string="')
        end = ("</", self._marker, " parameter>\n")
        return _sequence(*begin, _either(choices), *end)


def _sequence(*parts: str | Form) -> Form:
    forms = [{"type": "const_string", "value": p} if isinstance(p, str) else p for p in parts]
    return {"type": "sequence", "elements": forms}


def _either(choices: list[Form]) -> Form:
    return choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}


def _kinds(schema: Schema, root: Schema, seen: frozenset[str] = frozenset()) -> Kinds:
    """What a parameter may be; anything where its schema leaves that open, or says what is not
    enforced. ``seen`` are the references on the way here."""
    texts, values = _told(schema, root, seen) if isinstance(schema, dict) else ([], [])
    return (texts, values) if texts or values else ([ANY_TEXT], [NO_STRING])


def _told(schema: dict[str, Any], root: Schema, seen: frozenset[str]) -> Kinds:
    """Nothing of either kind if the schema does not tell."""
    ref = schema.get("$ref")
    if isinstance(ref, str):
        return ([], []) if ref in seen else _kinds(_found(ref, root), root, seen | {ref})
    if "const" in schema:
        return _listed([schema["const"]])
    if isinstance(schema.get("enum"), list):
        return _listed(schema["enum"])
    types = schema.get("type", [t for t, keys in _TELLING.items() if keys & schema.keys()])
    types = [types] if isinstance(types, str) else types
    if types:
        others = [kind for kind in types if kind != "string"]
        return (
            [_string(schema)] if "string" in types else [],
            [{**schema, "type": others}] if others else [],
        )
    branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if not isinstance(branches, list) or ("allOf" in schema and len(branches) > 1):
        return [], []
    found = [_kinds(branch, root, seen) for branch in branches]
    return [t for texts, _ in found for t in texts], [v for _, values in found for v in values]


def _listed(values: Sequence[Any]) -> Kinds:
    texts = [value for value in values if isinstance(value, str) and VALUE_END not in value]
    others = [value for value in values if not isinstance(value, str)]
    # A constant of xgrammar's is not empty.
    forms = [
        {"type": "const_string", "value": text} if text else {**ANY_TEXT, "max_chars": 0}
        for text in texts
    ]
    return forms, [{"enum": others}] if others else []


def _string(schema: dict[str, Any]) -> Form:
    pattern, most = schema.get("pattern"), schema.get("maxLength")
    if isinstance(pattern, str) and pattern and not _is_open(pattern):
        return {"type": "regex", "pattern": pattern}
    bounded = isinstance(most, int) and 0 <= most < 1 << 31
    return {**ANY_TEXT, "max_chars": most} if bounded else ANY_TEXT


def _json(schemas: list[Schema], root: Schema) -> Form:
    """JSON of one of the schemas, whose references lead into ``root``."""
    led = False

    def change(node: dict[str, Any]) -> dict[str, Any]:
        nonlocal led
        node = _without_open_texts(_without_lost_ref(node, root))
        if "$ref" not in node:
            return node
        led = True
        return {**node, "$ref": "#/$defs/root" + node["$ref"][1:]}

    schema = _rewrite(schemas[0] if len(schemas) == 1 else {"anyOf": schemas}, change)
    if led:
        schema = {**schema, "$defs": {"root": _rewrite(root, change)}}
    return {
        "type": "json_schema",
        "json_schema": schema,
        "excludes": [VALUE_END],
        # As V4.1's prompt shows JSON. A model that is lost would go on with white space for ever.
        "max_whitespace_cnt": 1,
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


def _found(ref: str, root: Schema) -> Schema:
    """Where a reference leads; None for nowhere. Each part is taken literally, as by xgrammar."""
    found: Any = root if ref == "#" or ref.startswith("#/") else None
    for part in ref.split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _without_lost_ref(node: dict[str, Any], root: Schema) -> dict[str, Any]:
    """Without a reference that leads nowhere, which xgrammar refuses: anything goes there.

    Of a strict schema the recipe keeps ``$def``, as DeepSeek spells it, and drops ``$defs`` and
    ``definitions``, while references to them stay.
    """
    ref = node.get("$ref")
    if not isinstance(ref, str) or _found(ref, root) is not None:
        return node
    return {key: value for key, value in node.items() if key != "$ref"}


def _without_unenforced(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in _NOT_ENFORCED}


def _without_open_texts(node: dict[str, Any]) -> dict[str, Any]:
    """Without what xgrammar would match a string by instead of ``excludes``, if that could run over
    the end of a value, and without the lengths, which it ignores and warns of."""
    lost = {"minLength", "maxLength"}
    if isinstance(node.get("pattern"), str) and _is_open(node["pattern"]):
        lost.add("pattern")
    if str(node.get("format")) in _OPEN_FORMATS:
        lost.add("format")
    return {key: value for key, value in node.items() if key not in lost}


def _is_open(pattern: str) -> bool:
    return _OPEN_PATTERN.search(pattern.replace("\\\\", "")) is not None
