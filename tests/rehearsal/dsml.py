"""Tool calls in V4.1's DSML: written, walked over by xgrammar as the engine does, and read back by
the recipe's own parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from deepseek_recipe import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ConversionOptions,
    InferenceChunk,
    InferenceFinishReason,
    ModelVersion,
    StreamProcessor,
    Tokenizer,
)

from spark_overlay.rehearsal import tokenizer as rehearsal
from spark_overlay.serving.constraint import structured_outputs

Json = dict[str, Any]
Calls = list[tuple[str, Json]]

MODEL = "m"
OPTIONS = ConversionOptions().with_model_versions_by_name({MODEL: ModelVersion.DeepseekV41Flash})
TOKENIZER = rehearsal.tokenizer_json()
RECIPE = Tokenizer.from_str(json.dumps(TOKENIZER))
VOCAB: dict[str, int] = TOKENIZER["model"]["vocab"]
DSML, EOS = VOCAB["｜DSML｜"], VOCAB[rehearsal.EOS]
#: The marker, spelled: to the recipe this is text.
SPELLED = [VOCAB[rehearsal.byte_alphabet()[byte]] for byte in "｜DSML｜".encode()]

BEGIN, END = "<｜DSML｜ calls>\n", "</｜DSML｜ calls>"
CLOSE = "</｜DSML｜ parameter>\n"


def raw(name: str, text: str, string: bool = True) -> str:
    return f'<｜DSML｜ parameter name="{name}" string="{str(string).lower()}">{text}{CLOSE}'


def parameters(values: Mapping[str, Any]) -> str:
    """As the recipe writes a call's arguments into a prompt."""
    return "".join(
        raw(name, value)
        if isinstance(value, str)
        else raw(name, json.dumps(value, ensure_ascii=False), False)
        for name, value in values.items()
    )


def call(values: Mapping[str, Any] | str, name: str = "f") -> str:
    inner = values if isinstance(values, str) else parameters(values)
    return f'<｜DSML｜ invoke name="{name}">\n{inner}</｜DSML｜ invoke>\n'


def function(name: str, schema: Any = None, **more: Any) -> Json:
    given = {} if schema is None else {"parameters": schema}
    return {"type": "function", "function": {"name": name, **given, **more}}


def need(**properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


@cache
def compiler() -> Any:
    """As vLLM's backend makes it for structural tags."""
    import xgrammar
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=Fast.from_str(json.dumps(TOKENIZER)),
        bos_token=rehearsal.BOS,
        eos_token=rehearsal.EOS,
        pad_token=rehearsal.PAD,
    )
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(fast))


def matcher(tag: str) -> Any:
    import xgrammar

    return xgrammar.GrammarMatcher(compiler().compile_structural_tag(tag))


def refused_at(tag: str, ids: Sequence[int]) -> int | None:
    """The first token that the tag refuses, EOS after the last included; None if it accepts all."""
    walker = matcher(tag)
    return next((at for at, one in enumerate([*ids, EOS]) if not walker.accept_token(one)), None)


def accepted(tag: str, text: str) -> bool:
    return refused_at(tag, RECIPE.encode(text)) is None


@dataclass(frozen=True)
class Asked:
    """A request with tools as the recipe converts it."""

    tools: tuple[Json, ...]
    required: bool = True

    def converted(self) -> Any:
        body: Json = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "tools": list(self.tools),
            "thinking": {"type": "disabled"},
        }
        if self.required:
            body["tool_choice"] = "required"
        return ChatCompletionRequest(body).convert(OPTIONS)

    def tag(self, **more: Any) -> str:
        constraint = self.converted().inference_options.output_constraint
        found = structured_outputs(constraint.kind, constraint.schema, dsml=DSML, **more)
        assert found is not None
        tag = found["structural_tag"]
        assert isinstance(tag, str)
        return tag

    def read(self, ids: Sequence[int]) -> tuple[str, Calls]:
        """Text and calls as the recipe's parser gives them to a client."""
        request = self.converted()
        generator = ChatCompletionRequest.chunk_generator(request, "id", MODEL)
        parser = StreamProcessor(generator, request.parsing_options, RECIPE)
        chunks = parser.push(InferenceChunk.ready())
        for one in ids:
            assert not parser.finished, "text after what the recipe reads"
            chunks += parser.push(InferenceChunk.tokens([one]))
        if not parser.finished:
            chunks += parser.push(InferenceChunk.finish(InferenceFinishReason.Stop))
        response = ChatCompletionResponse("id", MODEL, 1, 1, 0)
        for chunk in chunks:
            response.accumulate(chunk)
        message = json.loads(response.to_json())["choices"][0]["message"]
        functions = [one["function"] for one in message.get("tool_calls") or ()]
        return message["content"], [(f["name"], json.loads(f["arguments"])) for f in functions]
