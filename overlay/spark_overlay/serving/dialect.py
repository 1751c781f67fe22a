"""The kit's dialect: what its users say and the official API does not know. Pure.

A request without any of it reaches deepseek-recipe as it came, byte for byte. What is translated:

    reasoning_effort 1..100     an integer, also as text; also reasoning.effort (Responses),
                                output_config.effort (Messages), chat_template_kwargs. The number
                                stands in the prompt where the official words put 50, 75 and 100.
    chat_template_kwargs        thinking, enable_thinking: true | false; reasoning_effort.
                                An official field for the same thing wins.
    role developer              system, as the official Responses API has it
    messages[].reasoning        reasoning_content (vLLM's name for it)
    max_completion_tokens       max_tokens, which wins
    top_k, min_p, repetition_penalty, min_tokens, ignore_eos, cache_salt
                                go to the engine

What vLLM's own server would obey and this one does not is refused by name (``REFUSED``), never
ignored: an answer must not change because a field was overlooked. The official API ignores
frequency_penalty, presence_penalty, logit_bias and the top_k of Messages, and so does this server.

``top_p`` that is not given is 0.95 while thinking (DeepSeek's default for this model; the recipe
alone says 1.0).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_overlay.serving.errors import ApiError

Protocol = Literal["chat", "responses", "messages"]

#: Official words for an effort and the numbers they put into the prompt.
EFFORTS = {50: "low", 75: "high", 100: "max"}

#: vLLM's fields that this server does not obey, each with the value that asks for nothing.
REFUSED: Mapping[str, Any] = {
    **dict.fromkeys(
        [
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "bad_words",
            "allowed_token_ids",
            "stop_token_ids",
            "prompt_logprobs",
            "chat_template",
            "documents",
            "mm_processor_kwargs",
            "truncate_prompt_tokens",
            "thinking_token_budget",
            "kv_transfer_params",
            "vllm_xargs",
        ]
    ),
    "return_token_ids": False,
    "echo": False,
    "use_beam_search": False,
    "add_special_tokens": False,
    "continue_final_message": False,
    "include_stop_str_in_output": False,
    "add_generation_prompt": True,
    "include_reasoning": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "length_penalty": 1.0,
    "priority": 0,
}
#: Responses are not kept, so nothing can be continued or fetched later.
_NOT_KEPT = ("previous_response_id", "conversation", "background")

_TEMPLATE_KEYS = ("thinking", "enable_thinking", "reasoning_effort")


@dataclass(frozen=True)
class Extras:
    """What goes past the recipe.

    effort      the number that the prompt names instead of the official word's, 1..100.
    engine      sampling parameters by vLLM's names.
    cache_salt  requests share cached prefixes only with those of the same salt.
    sampling    temperature and top_p as the request names them.
    """

    effort: int | None = None
    engine: Mapping[str, float | int | bool] = field(default_factory=dict)
    cache_salt: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)


def translate(body: dict[str, Any], protocol: Protocol) -> tuple[dict[str, Any] | None, Extras]:
    """(the official body, or None where ``body`` is one already; what the engine is told).

    Never changes ``body``. Raises ApiError.
    """
    for name in REFUSED.keys() & body.keys():
        if body[name] is not None and body[name] != REFUSED[name]:
            raise ApiError(400, f"{name} is not supported by this server; leave it out", name)
    made = copy.deepcopy(body)
    effort = _EFFORT_OF[protocol](made)
    if protocol == "chat":
        _chat_words(made)
    elif protocol == "responses":
        _not_kept(made)
    engine = {
        name: read(made.pop(name), name)
        for name, read in _ENGINE.items()
        if made.get(name) is not None and name not in _OFFICIAL[protocol]
    }
    salt = made.pop("cache_salt", None)
    if salt is not None and not (isinstance(salt, str) and salt and salt.isprintable()):
        raise ApiError(400, "cache_salt must be a printable text that is not empty", "cache_salt")
    named = {
        name: float(body[name])
        for name in ("temperature", "top_p")
        if isinstance(body.get(name), int | float) and not isinstance(body[name], bool)
    }
    return (None if made == body else made), Extras(effort, engine, salt, named)


def _chat_words(body: dict[str, Any]) -> None:
    limit = body.pop("max_completion_tokens", None)
    if limit is not None and body.get("max_tokens") is None:
        body["max_tokens"] = limit
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        if message.get("role") == "developer":
            message["role"] = "system"
        reasoning = message.pop("reasoning", None)
        if reasoning is not None and message.get("reasoning_content") is None:
            message["reasoning_content"] = reasoning


def _not_kept(body: dict[str, Any]) -> None:
    for name in _NOT_KEPT:
        if body.get(name):
            raise ApiError(
                400, f"{name} is not supported: responses are not kept; send the whole input", name
            )


def _template(body: dict[str, Any]) -> tuple[bool | None, Any]:
    """(thinking, effort) of chat_template_kwargs, which is taken out of the body."""
    found = body.pop("chat_template_kwargs", None)
    if found is None:
        return None, None
    if not isinstance(found, dict):
        raise ApiError(400, "chat_template_kwargs must be an object", "chat_template_kwargs")
    unknown = sorted(set(found) - set(_TEMPLATE_KEYS))
    if unknown:
        raise ApiError(
            400,
            f"chat_template_kwargs: unknown {', '.join(unknown)}; known are "
            + ", ".join(_TEMPLATE_KEYS),
            "chat_template_kwargs",
        )
    thinking: bool | None = None
    for name in ("thinking", "enable_thinking"):
        value = found.get(name)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise ApiError(
                400, f"chat_template_kwargs.{name} must be true or false", "chat_template_kwargs"
            )
        thinking = value if thinking is None else thinking or value  # as vLLM has it
    return thinking, found.get("reasoning_effort")


def _chat_effort(body: dict[str, Any]) -> int | None:
    thinking, effort = _template(body)
    if thinking is not None and body.get("thinking") is None:
        body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    if effort is not None and body.get("reasoning_effort") is None:
        body["reasoning_effort"] = effort
    return _number(body, "reasoning_effort", "reasoning_effort")


def _responses_effort(body: dict[str, Any]) -> int | None:
    thinking, effort = _template(body)
    reasoning = body.get("reasoning")
    if reasoning is None:
        reasoning = {}
    if not isinstance(reasoning, dict):
        return None  # the recipe says what is wrong with it
    if reasoning.get("effort") is None:
        if thinking is False:
            effort = "none"
        if effort is not None:
            reasoning["effort"] = effort
            body["reasoning"] = reasoning
    return _number(reasoning, "effort", "reasoning.effort")


def _messages_effort(body: dict[str, Any]) -> int | None:
    thinking, effort = _template(body)
    if thinking is not None and body.get("thinking") is None:
        body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    config = body.get("output_config")
    if config is None:
        config = {}
    if not isinstance(config, dict):
        return None
    if effort is not None and config.get("effort") is None:
        config["effort"] = effort
        body["output_config"] = config
    return _number(config, "effort", "output_config.effort")


_EFFORT_OF: Mapping[Protocol, Callable[[dict[str, Any]], int | None]] = {
    "chat": _chat_effort,
    "responses": _responses_effort,
    "messages": _messages_effort,
}


def _number(holder: dict[str, Any], key: str, told: str) -> int | None:
    """The number an effort names, replaced by an official word; None for an official word."""
    value = holder.get(key)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:4])
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if not 1 <= value <= 100:
        raise ApiError(400, f"{told} must be a word or an integer from 1 to 100", told)
    holder[key] = EFFORTS.get(value, "high")
    return None if value in EFFORTS else value


def _decimal(low: float, high: float) -> Callable[[Any, str], float]:
    def read(value: Any, name: str) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not low <= value <= high:
            raise ApiError(400, f"{name} must be a number from {low} to {high}", name)
        return float(value)

    return read


def _integer(low: int) -> Callable[[Any, str], int]:
    def read(value: Any, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 1 << 31:
            raise ApiError(400, f"{name} must be an integer from {low} to {(1 << 31) - 1}", name)
        return value

    return read


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false", name)
    return value


#: Fields of this protocol that the official API takes and ignores.
_OFFICIAL: Mapping[Protocol, tuple[str, ...]] = {
    "chat": (),
    "responses": (),
    "messages": ("top_k",),
}

_ENGINE: Mapping[str, Callable[[Any, str], float | int | bool]] = {
    "top_k": _integer(-1),
    "min_p": _decimal(0.0, 1.0),
    "repetition_penalty": _decimal(0.01, 10.0),
    "min_tokens": _integer(0),
    "ignore_eos": _flag,
}
