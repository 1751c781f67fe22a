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

#: A token's log-probability, and (id, log-probability) of the most likely ones there.
Beside = tuple[float, Sequence[tuple[int, float]]]
Logprobs = Sequence[Beside]  # one for each token

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
        """The chunks of the next tokens, up to a stop sequence. EOS has no text."""
        chunks: list[Any] = []
        for at, token in enumerate(ids):
            if self.finished:
                break
            for piece in self._characters.add(token, None if logprobs is None else logprobs[at]):
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

    def _push(self, chunk: Any) -> list[Any]:
        chunks: list[Any] = self._processor.push(chunk)
        return chunks


class _Characters:
    """Gathers tokens until they are whole characters, and gives them to the processor together.
    Bytes that are none go as text, which takes no log-probabilities with it."""

    def __init__(self, prompts: Prompts) -> None:
        self._pieces, self._special, self._eos = prompts.pieces, prompts.special_ids, prompts.eos
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[int] = []
        self._beside: list[Beside | None] = []
        self._text = ""

    def add(self, token: int, beside: Beside | None = None) -> list[Any]:
        piece = self._pieces[token] if token < len(self._pieces) else b""
        if token == self._eos or not piece:
            # An end that the request ignores, or an id of no token: counted, and not to be read.
            return [*self.rest(), recipe.InferenceChunk.text("", 1)]
        if token in self._special:
            return [*self.rest(), _tokens([token], [beside])]
        if piece.isascii():  # the common case, and the end of any character before it
            chunk = _tokens([token], [beside])
            return [*self.rest(), chunk] if self._tokens else [chunk]
        self._tokens.append(token)
        self._beside.append(beside)
        self._text += self._decoder.decode(piece)
        return [] if self._decoder.getstate()[0] else self.rest()

    def rest(self) -> list[Any]:
        """What is held, whole or not."""
        text = self._text + self._decoder.decode(b"", final=True)
        tokens, beside = self._tokens, self._beside
        self._tokens, self._beside, self._text = [], [], ""
        if not tokens:
            return []
        if _NO_CHARACTER in text:
            return [recipe.InferenceChunk.text(text, len(tokens))]
        return [_tokens(tokens, beside)]


def _tokens(ids: list[int], beside: Sequence[Beside | None]) -> Any:
    return recipe.InferenceChunk.tokens(ids, None if None in beside else beside)
