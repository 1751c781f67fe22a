"""From a request's bytes to the token ids of its prompt: deepseek-recipe with this model's names.

The recipe renders and encodes; text between its special tokens is encoded without the added
vocabulary, so nothing that a user writes becomes a special token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from spark_overlay.bytelevel import added_tokens, token_bytes
from spark_overlay.serving.dialect import EFFORTS, Extras, Protocol, translate
from spark_overlay.serving.errors import ApiError

#: The name that applications written for the official API send.
OFFICIAL_NAME = "DeepSeek-V4.1-Flash"

#: vLLM's model looks for this token where an image goes; the recipe's own spelling is another.
IMAGE = "<｜deepseek_image｜>"

_REQUESTS: dict[Protocol, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}
_WORDS = {word: number for number, word in EFFORTS.items()}


@dataclass(frozen=True)
class Asked:
    """One request, understood.

    converted   the recipe's ConversationRequest.
    ids         the prompt. An image is one id here, and many in the engine.
    generator   makes the recipe's chunk generator, given an id and the model's name.
    images      the recipe's image sources, in the order of their ids.
    """

    protocol: Protocol
    model: str
    converted: Any
    extras: Extras
    ids: list[int]
    generator: Callable[[str], Any]
    images: Sequence[Any]

    @property
    def thinking(self) -> bool:
        """Whether the request is in thinking mode."""
        return bool(self.converted.conversation.thinking_mode)

    @property
    def reasons_first(self) -> bool:
        """Whether reasoning comes before what a constraint binds."""
        stage = self.converted.parsing_options.thinking_initial_stage
        return stage is not None and bool(stage.starts_in_reasoning())


class Prompts:
    """The recipe for one model: ``tokenizer_json`` is the text of its tokenizer.json, ``names``
    are the API's names for it.

    Raises ValueError for a tokenizer that V4.1's encoding does not fit.
    """

    def __init__(self, tokenizer_json: str, names: Sequence[str]) -> None:
        parsed: dict[str, Any] = json.loads(tokenizer_json)
        self.special = added_tokens(parsed)
        self.special_ids = frozenset(self.special.values())
        self.pieces = token_bytes(parsed)
        self.tokenizer = recipe.Tokenizer.from_str(tokenizer_json)
        spellings = recipe.SpecialTokens(image=IMAGE)
        self._require(spellings)
        kinds = recipe.SpecialToken
        self.eos, self.dsml, self.image = (
            self.special[spellings.token(kind)] for kind in (kinds.Eos, kinds.Dsml, kinds.Image)
        )
        version = recipe.ModelVersion.DeepseekV41Flash
        named = {name: version for name in (*names, OFFICIAL_NAME)}
        self.options = (
            recipe.ConversionOptions()
            .with_model_versions_by_name(named)
            .with_special_tokens(spellings)
        )
        self._encoding = (
            recipe.DeepseekV41Encoding()
            .with_tokenizer(self.tokenizer)
            .with_special_tokens(spellings)
        )
        # The same vocabulary without its added tokens: how the recipe encodes plain text.
        self._plain = recipe.Tokenizer.from_str(json.dumps({**parsed, "added_tokens": []}))

    def read(self, raw: bytes, protocol: Protocol) -> Asked:
        """Raises ApiError with the official words for whatever is wrong with the request."""
        official, extras = _dialect(raw, protocol)
        try:
            return self._asked(official, protocol, extras)
        except (recipe.ConversionError, ValueError) as error:
            raise ApiError.of_recipe(error) from error

    def render(self, asked: Asked) -> str:
        """The prompt as text, special tokens spelled out."""
        text: str = self._encoding.render_conversation(asked.converted.conversation).prompt
        return _renamed(text, asked.extras.effort, asked.converted.conversation)

    def _asked(self, official: bytes, protocol: Protocol, extras: Extras) -> Asked:
        request = _REQUESTS[protocol](official)
        model: str = request.model
        kind = type(request)
        finish = _whole
        if protocol == "responses":
            # What the answer repeats of the request can be read only before the conversion.
            spaces, echo = request.namespace_tool_map(self.options), request.echo()
            finish = _echoing(spaces, echo)
        converted = request.convert(self.options)
        conversation = converted.conversation
        images = [source for m in conversation.messages for source in m.image_sources]

        def generator(id: str) -> Any:
            return finish(kind.chunk_generator(converted, id, model))

        ids = self._ids(conversation, extras.effort)
        return Asked(protocol, model, converted, extras, ids, generator, images)

    def _ids(self, conversation: Any, effort: int | None) -> list[int]:
        ids: list[int] = self._encoding.encode(conversation)
        if effort is None or not conversation.thinking_mode:
            return ids
        # The number stands in the text after the first special tokens: only that text is encoded
        # anew, and it must be just where the recipe has put it.
        rendered = self._encoding.render_conversation(conversation)
        (_, start), (end, _) = rendered.special_ranges[1:3]
        before = rendered.prompt[start:end]
        old, new = (self._plain.encode(t) for t in (before, _renamed(before, effort, conversation)))
        if ids[2 : 2 + len(old)] != old:
            raise ApiError(500, "this effort cannot be put into the prompt", "reasoning_effort")
        return [*ids[:2], *new, *ids[2 + len(old) :]]

    def _require(self, spellings: Any) -> None:
        kinds = recipe.SpecialToken
        needed = (
            kinds.Bos, kinds.Eos, kinds.System, kinds.User, kinds.Assistant, kinds.ThinkingStart,
            kinds.ThinkingEnd, kinds.Dsml, kinds.Image, kinds.LatestReminder,
        )  # fmt: skip
        missing = [t for t in map(spellings.token, needed) if t not in self.special]
        if missing:
            raise ValueError(
                f"tokenizer.json has no token {', '.join(missing)}; needed is the tokenizer of "
                "DeepSeek V4.1, whose prompts are made of them"
            )


def _dialect(raw: bytes, protocol: Protocol) -> tuple[bytes, Extras]:
    """The official body, and what the engine is told beside it."""
    try:
        body = json.loads(raw)
        made, extras = translate(body, protocol) if isinstance(body, dict) else (None, Extras())
        return (raw if made is None else json.dumps(made).encode()), extras
    except (ValueError, RecursionError, OverflowError):
        return raw, Extras()  # the recipe says what is wrong with it


def _renamed(text: str, effort: int | None, conversation: Any) -> str:
    """The text with its effort's number changed; unchanged while not thinking."""
    if effort is None or not conversation.thinking_mode:
        return text
    word = conversation.reasoning_effort or "high"
    return text.replace(f"Effort: {_WORDS.get(word, 75)} ", f"Effort: {effort} ", 1)


def _whole(generator: Any) -> Any:
    return generator


def _echoing(spaces: dict[str, tuple[str, str]], echo: Any) -> Callable[[Any], Any]:
    def finish(generator: Any) -> Any:
        return generator.with_namespace_tool_map(spaces).with_echo(echo)

    return finish
