"""vLLM behind the API, through its public ``EngineClient`` and ``SamplingParams`` only."""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers.utils import cached_file
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMError, VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from spark_overlay.serving.answer import Reason
from spark_overlay.serving.api import Api
from spark_overlay.serving.errors import ApiError
from spark_overlay.serving.prompt import Prompts
from spark_overlay.serving.sampling import Sampling
from spark_overlay.serving.step import Step
from spark_overlay.settings import overlay_settings

log = logging.getLogger("vllm.spark_overlay.serving")

#: Where xgrammar stood when it refused a grammar: a time, and a path of its makers' machine.
_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")

#: Without these a constraint would bind the reasoning too, or depend on the first request's kind.
NEEDED = {"reasoning_parser": "deepseek_v41", "backend": "xgrammar"}


def make_api(client: Any, args: Namespace) -> Api:
    """The API of a server. Raises ValueError for a tokenizer that V4.1's encoding does not fit, and
    for settings without which constraints would not hold."""
    config, structured = client.model_config, client.vllm_config.structured_outputs_config
    for name, needed in NEEDED.items():
        if (found := getattr(structured, name)) != needed:
            raise ValueError(
                f"structured_outputs_config.{name} is {found!r}; the API needs {needed!r}: "
                "--reasoning-parser deepseek_v41 --structured-outputs-config.backend xgrammar"
            )
    found = cached_file(config.tokenizer, "tokenizer.json", revision=config.tokenizer_revision)
    names = args.served_model_name or [args.model]
    prompts = Prompts(Path(found).read_text(), names)
    return Api(
        prompts, VllmEngine(client, prompts.eos), overlay_settings(client.vllm_config).api_sampling
    )


class VllmEngine:
    """step.Engine. ``client``: vLLM's EngineClient; ``eos``: the id that ends an answer."""

    def __init__(self, client: Any, eos: int) -> None:
        self._client, self._eos = client, eos

    @property
    def context(self) -> int:
        return int(self._client.model_config.max_model_len)

    @property
    def sees_images(self) -> bool:
        config = self._client.model_config.multimodal_config
        return config is not None and config.get_limit_per_prompt("image") > 0

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        reasons_first: bool,
        salt: str | None = None,
        images: Sequence[Any] = (),
    ) -> AsyncGenerator[Step, None]:
        prompt = TokensPrompt(prompt_token_ids=list(ids))
        if salt is not None:
            prompt["cache_salt"] = salt
        if images:
            prompt["multi_modal_data"] = {"image": list(images)}
        begun = False
        try:
            async with contextlib.aclosing(self._steps(prompt, sampling, reasons_first)) as steps:
                async for step in steps:
                    begun = True
                    yield step
            return
        except VLLMValidationError as error:
            if begun or sampling.looser is None:
                raise
            log.info("a schema is enforced in part: %s", error)
        looser = replace(sampling, structured=sampling.looser, looser=None)
        async with contextlib.aclosing(self._steps(prompt, looser, reasons_first)) as steps:
            async for step in steps:
                yield step

    def refusal(self, error: Exception) -> ApiError | None:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, EngineDeadError):
            return ApiError(503, "the engine has stopped; the server's log says why")
        if isinstance(error, GracefulHTTPError):
            return ApiError(int(error.http_status), str(error))
        if isinstance(error, VLLMClientError | ValueError):
            return ApiError(400, _PLACE.sub("", str(error)))
        if isinstance(error, VLLMError) and (status := getattr(error, "status_code", None)):
            return ApiError(int(status), str(error))  # GenerationError, from 0.33 on
        return None

    async def _steps(
        self, prompt: Any, sampling: Sampling, reasons_first: bool
    ) -> AsyncGenerator[Step, None]:
        stream = self._client.generate(
            prompt, parameters(sampling), uuid.uuid4().hex, reasoning_ended=not reasons_first
        )
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield self._step(output, sampling.logprobs or 0)

    def _step(self, output: Any, most: int) -> Step:
        one = output.outputs[0]
        ids, logprobs = list(one.token_ids), None
        if one.logprobs is not None:
            logprobs = [_beside(*pair, most) for pair in zip(ids, one.logprobs, strict=True)]
        reason = one.finish_reason
        if reason not in (None, "stop", "length"):
            raise ApiError(500, f"the engine ended the request ({reason}); its log says why")
        if reason == "stop" and ids and ids[-1] in (self._eos, one.stop_reason):
            ids.pop()
        return Step(
            ids,
            logprobs and logprobs[: len(ids)],
            prompt=len(output.prompt_token_ids or ()),
            cached=int(output.num_cached_tokens or 0),
            reason=cast("Reason | None", reason),
        )


def parameters(sampling: Sampling) -> SamplingParams:
    """Raises ValueError for what vLLM refuses."""
    structured = sampling.structured
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        structured_outputs=None if structured is None else StructuredOutputsParams(**structured),
        detokenize=False,  # the recipe decodes
        output_kind=RequestOutputKind.DELTA,
        **sampling.more,
    )


def _beside(token: int, found: Any, most: int) -> tuple[float, list[tuple[int, float]]]:
    """(the token's log-probability, those of the ``most`` likely ones) from vLLM's map
    id -> Logprob, which holds the sampled token too, likely or not."""
    likely = sorted((one.rank, int(id), float(one.logprob)) for id, one in found.items())
    return float(found[token].logprob), [(id, value) for _, id, value in likely[:most]]
