"""From the engine's tokens to what a client reads: deepseek-recipe's stream processor. Pure.

The processor is given the tokens of one character at a time, so an answer depends on its tokens
alone and not on how many the engine hands over at once. Bytes that are no character it would drop
at the end, and count wrong; they are handed in as text, with U+FFFD in their place.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import deepseek_recipe as recipe

from spark_overlay.serving.dialect import Protocol
from spark_overlay.serving.prompt import Asked, Prompts

Reason = Literal["stop", "length"]

#: For each token its log-probability and (id, log-probability) of the alternatives.
Logprobs = Sequence[tuple[float, Sequence[tuple[int, float]]]]

_RESPONSES: dict[Protocol, Any] = {
    "chat": recipe.ChatCompletionResponse,
    "responses": recipe.ResponsesResponse,
    "messages": recipe.MessagesResponse,
}
_REASONS = {
    "stop": recipe.InferenceFinishReason.Stop,
    "length": recipe.InferenceFinishReason.Length,
}
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt, and how many of them came from the prefix cache."""

    prompt: int
    cached: int = 0


class Answer:
    """One answer as it grows. ``ready`` first, then ``feed``, then ``finish``: each gives the
    recipe's chunks of that moment."""

    def __init__(self, asked: Asked, prompts: Prompts, id: str, created: int) -> None:
        """``created`` is in seconds since the epoch."""
        self._kind = _RESPONSES[asked.protocol]
        self._id, self._model, self._created = id, asked.model, created
        self._logprobs = bool(asked.converted.inference_options.logprobs)
        self._processor = recipe.StreamProcessor(
            asked.generator(id), asked.converted.parsing_options, prompts.tokenizer
        )
        self._characters = _Characters(prompts)
        self._usage = Usage(0)

    @property
    def finished(self) -> bool:
        """Whether a stop sequence has ended it: nothing more may be fed."""
        return bool(self._processor.finished)

    def ready(self, usage: Usage) -> list[Any]:
        self._usage = usage
        told = recipe.PromptUsage(
            prompt_tokens=usage.prompt, prompt_cache_hit_tokens=min(usage.cached, usage.prompt)
        )
        return self._push(recipe.InferenceChunk.ready(prompt_usage=told))

    def feed(self, ids: Sequence[int], logprobs: Logprobs | None = None) -> list[Any]:
        """The chunks of the next tokens, up to a stop sequence. No EOS may be among them."""
        if logprobs is not None:
            return self._beside(ids, logprobs)
        chunks: list[Any] = []
        for token in ids:
            if self.finished:
                break
            for piece in self._characters.add(token):
                chunks += self._push(piece)
        return chunks

    def finish(self, reason: Reason) -> list[Any]:
        chunks: list[Any] = []
        for piece in (*self._characters.rest(), recipe.InferenceChunk.finish(_REASONS[reason])):
            if not self.finished:
                chunks += self._push(piece)
        return chunks

    def whole(self, chunks: Sequence[Any]) -> str:
        """The answer in one piece, as JSON; uses up the chunks, which must be all of them."""
        usage = self._usage
        response = self._kind(self._id, self._model, self._created, usage.prompt, usage.cached)
        for chunk in chunks:
            response.accumulate(chunk)
        text: str = response.to_json()
        return text

    def events(self, chunks: Sequence[Any]) -> Iterator[str]:
        """The chunks as server-sent events."""
        for chunk in chunks:
            name = self._kind.sse_event_name(chunk)
            head = "" if name is None else f"event: {name}\n"
            yield f"{head}data: {chunk.to_json()}\n\n"

    def end(self) -> str:
        """The event that closes a stream; empty where the protocol has none."""
        data = self._kind.sse_done_data()
        return "" if data is None else f"data: {data}\n\n"

    def _beside(self, ids: Sequence[int], logprobs: Logprobs) -> list[Any]:
        """Log-probabilities go with tokens only: here a character cut off at the end is dropped."""
        chunks: list[Any] = []
        for token, beside in zip(ids, logprobs, strict=True):
            if not self.finished:
                chunks += self._push(recipe.InferenceChunk.tokens([token], [beside]))
        return chunks

    def _push(self, chunk: Any) -> list[Any]:
        chunks: list[Any] = self._processor.push(chunk)
        return chunks


class _Characters:
    """Gathers tokens until they are whole characters, and gives them to the processor together."""

    def __init__(self, prompts: Prompts) -> None:
        self._pieces, self._special = prompts.pieces, prompts.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[int] = []
        self._text = ""

    def add(self, token: int) -> list[Any]:
        if token in self._special:
            return [*self.rest(), recipe.InferenceChunk.tokens([token])]
        piece = self._pieces[token] if token < len(self._pieces) else b""
        if not self._tokens and piece.isascii():  # the common case
            if not piece:  # an id of no token: at the end the recipe would not count it
                return [recipe.InferenceChunk.text("", 1)]
            return [recipe.InferenceChunk.tokens([token])]
        self._tokens.append(token)
        self._text += self._decoder.decode(piece)
        return [] if self._decoder.getstate()[0] else self.rest()

    def rest(self) -> list[Any]:
        """What is held, whole or not."""
        tokens, text = self._tokens, self._text + self._decoder.decode(b"", final=True)
        self._tokens, self._text = [], ""
        if not tokens:
            return []
        if _NO_CHARACTER in text:
            return [recipe.InferenceChunk.text(text, len(tokens))]
        return [recipe.InferenceChunk.tokens(tokens)]
