"""deepseek-recipe called directly on a request's bytes: what the prompts of our API are held to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from spark_overlay.serving.dialect import Protocol

OFFICIAL_NAME = "DeepSeek-V4.1-Flash"
IMAGE = "<｜deepseek_image｜>"

_KINDS: dict[Protocol, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}


@dataclass(frozen=True)
class Refused:
    status: int
    message: str


@dataclass(frozen=True)
class Prompt:
    """``special``: (position in the text, spelling) of the tokens that the format puts there."""

    text: str
    ids: list[int]
    special: list[tuple[int, str]]


class DirectRecipe:
    """``name``: the model's name beside the official one."""

    def __init__(self, tokenizer_json: str, name: str) -> None:
        self._name = name
        names = dict.fromkeys((name, OFFICIAL_NAME), recipe.ModelVersion.DeepseekV41Flash)
        spellings = recipe.SpecialTokens(image=IMAGE)
        options = recipe.ConversionOptions().with_model_versions_by_name(names)
        self._options = options.with_special_tokens(spellings)
        self.tokenizer = recipe.Tokenizer.from_str(tokenizer_json)
        encoding = recipe.DeepseekV41Encoding().with_tokenizer(self.tokenizer)
        self._encoding = encoding.with_special_tokens(spellings)

    def ask(self, raw: bytes, protocol: Protocol, effort: int | None = None) -> Prompt | Refused:
        """``effort``: the number that the prompt names instead of the official word's."""
        try:
            conversation = _KINDS[protocol](raw).convert(self._options).conversation
        except recipe.ConversionError as error:
            return Refused(error.status_code, json.loads(error.body)["error"]["message"])
        except ValueError as error:
            return Refused(400, str(error))
        rendered = self._encoding.render_conversation(conversation)
        text = rendered.prompt
        special = [(start, text[start:end]) for start, end in rendered.special_ranges]
        found = Prompt(text, self._encoding.encode(conversation), special)
        return self._with_effort(found, effort) if effort and conversation.thinking_mode else found

    def _with_effort(self, found: Prompt, number: int) -> Prompt:
        """By an official way to the same text at the same place: a system message while not
        thinking."""
        (at, system), (end, _) = found.special[1:3]
        start = at + len(system)
        old = found.text[start:end]
        words = old.split(" ", 3)
        assert words[:2] == ["Reasoning", "Effort:"], found.text
        new = " ".join([*words[:2], str(number), words[3]])
        moved = len(new) - len(old)
        special = [(p + moved * (p > at), spelling) for p, spelling in found.special]
        ids = [*found.ids[:2], *self._turn(new), *found.ids[2 + len(self._turn(old)) :]]
        return Prompt(found.text[:start] + new + found.text[end:], ids, special)

    def _turn(self, text: str) -> list[int]:
        turns = [{"role": "system", "content": text}, {"role": "user", "content": ""}]
        body = {"model": self._name, "messages": turns, "thinking": {"type": "disabled"}}
        found = self.ask(json.dumps(body).encode(), "chat")
        assert isinstance(found, Prompt), found
        return found.ids[2:-3]  # between begin, system and user, assistant, end of thinking
