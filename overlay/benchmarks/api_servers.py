"""The two servers that api.py measures: vLLM's whole app (``build_app``, ``init_app_state``: its
routes, middleware, handlers) for the rehearsal's checkpoint, with our endpoint plugin or without.

There is no socket: a request goes in as ASGI messages. There is no model: ``Client`` says what it
is told, through vLLM's OutputProcessor, which detokenizes for vLLM's server and not for ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# vLLM, its plugins and Triton read these while they are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_PLUGINS"] = "spark_overlay"
# The rehearsal's positions end long before a prompt of a million characters does.
os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"

import mistral_common
import vllm
from api_inputs import NAME, larger_tokenizer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.renderers.registry import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

from spark_overlay.serving.answer import Answer, Usage
from spark_overlay.serving.prompt import Prompts
from spark_overlay.serving.serve import parser

VLLM: str = vllm.__version__
SIDES, PATH = ("ours", "vllm"), "/v1/chat/completions"
CONTEXT = 1 << 20  # tokens

#: Runs a coroutine on the event loop.
Run = Callable[[Any], Any]
#: From the next tokens, and whether they are the last, to what is sent.
Feed = Callable[[list[int], bool], bytes]


class Client:
    """vLLM's EngineClient as far as the servers ask for it. Each request is answered at once with
    ``tokens`` and the end of text, ``step`` tokens at a time."""

    errored = False
    input_processor = None

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.vllm_config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self._outputs = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self.tokens: Sequence[int] = ()
        self.step = 1
        #: Of the last request: when it came here (by the performance counter), and its ids.
        self.asked, self.prompt = 0.0, [0]

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None: ...

    async def is_tracing_enabled(self) -> bool:
        return False

    async def generate(
        self, prompt: Any, params: SamplingParams, name: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        self.asked, self.prompt = time.perf_counter(), prompt["prompt_token_ids"]
        self._outputs.add_request(_core_request(self.prompt, params, name), None)
        ids = [*self.tokens, self.renderer.tokenizer.eos_token_id]
        for at in range(0, len(ids), self.step):
            last = at + self.step >= len(ids)
            made = EngineCoreOutput(
                name, ids[at : at + self.step], finish_reason=FinishReason.STOP if last else None
            )
            for output in self._outputs.process_outputs([made]).request_outputs:
                yield output


@dataclass
class Bench:
    """Both servers with one tokenizer. ``apps`` by side."""

    name: str
    client: Client
    prompts: Prompts
    apps: dict[str, Any]

    @property
    def chat(self) -> Any:
        """vLLM's handler of Chat Completions."""
        return self.apps["vllm"].state.openai_serving_chat

    def ids(self, text: str) -> list[int]:
        """Of an answer: special tokens are such."""
        found: list[int] = self.client.renderer.tokenizer.encode(text, add_special_tokens=False)
        return found

    def text(self, ids: Sequence[int]) -> str:
        found: str = self.client.renderer.tokenizer.decode(ids)
        return found

    def readers(self, raw: bytes, run: Run) -> dict[str, Callable[[], list[int]]]:
        """By side, from the request to its prompt's ids."""

        def vllm() -> list[int]:
            request = ChatCompletionRequest.model_validate(json.loads(raw))
            _, found = run(self.chat.render_chat_request(request))
            ids: list[int] = found[0]["prompt_token_ids"]
            return ids

        return {"ours": lambda: self.prompts.read(raw, "chat").ids, "vllm": vllm}

    def feeders(self, raw: bytes, run: Run) -> dict[str, Callable[[], Feed]]:
        """By side, what begins an answer to the request."""
        asked = self.prompts.read(raw, "chat")
        request = ChatCompletionRequest.model_validate_json(raw)
        run(self.chat.render_chat_request(request))  # fits the request to the parser
        words = self.chat._effective_chat_template_kwargs(request)
        params = request.to_sampling_params(CONTEXT, {})
        tokenizer = self.client.renderer.tokenizer

        def ours() -> Feed:
            answer = Answer(asked, self.prompts, "id", 0)
            answer.ready(Usage(len(asked.ids)))

            def feed(ids: list[int], last: bool) -> bytes:
                chunks = answer.feed(ids)
                if last:
                    chunks += answer.finish("stop")
                return "".join(answer.events(chunks)).encode()

            return feed

        def vllm() -> Feed:
            parse = self.chat._make_parser(request, tokenizer, words).parse_delta
            core = _core_request(asked.ids, params, "id")
            text = IncrementalDetokenizer.from_new_request(tokenizer, core)

            def feed(ids: list[int], last: bool) -> bytes:
                text.update(ids, False)
                delta = parse(
                    delta_text=text.get_next_output_text(last, True),
                    delta_token_ids=ids,
                    request=request,
                    prompt_token_ids=asked.ids,
                    finished=last,
                )
                if delta is None:
                    return b""
                choice = ChatCompletionResponseStreamChoice(
                    index=0, delta=delta, logprobs=None, finish_reason=None, token_ids=None
                )
                chunk = ChatCompletionStreamResponse(
                    id="id", object="chat.completion.chunk", created=0, choices=[choice],
                    model=NAME,
                )  # fmt: skip
                return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()

            return feed

        return {"ours": ours, "vllm": vllm}


async def make_bench(name: str, checkpoint: Path, tokenizer: Path) -> Bench:
    """``tokenizer``: the folder of tokenizer.json."""
    root, command = parser()
    arguments = root.parse_args([
        "serve", str(checkpoint), "--tokenizer", str(tokenizer), "--served-model-name", NAME,
        "--tokenizer-mode", "deepseek_v41", "--tool-call-parser", "deepseek_v41",
        "--reasoning-parser", "deepseek_v41", "--enable-auto-tool-choice", "--enforce-eager",
        "--dtype", "bfloat16", "--max-model-len", str(CONTEXT),
        "--structured-outputs-config.backend", "xgrammar", "--limit-mm-per-prompt", '{"image": 0}',
    ])  # fmt: skip
    command.validate(arguments)
    arguments.model = arguments.model_tag
    client, apps = Client(arguments), {}
    for side in SIDES:
        os.environ["VLLM_PLUGINS"] = "spark_overlay" if side == "ours" else ""
        app = build_app(arguments, ("generate",), client.model_config)
        await init_app_state(client, app.state, arguments, ("generate",))
        apps[side] = app
    prompts = Prompts((tokenizer / "tokenizer.json").read_text(), [NAME])
    return Bench(name, client, prompts, apps)


async def ask(app: Any, raw: bytes) -> str:
    """The body of the reply to a chat. Raises RuntimeError for another status than 200."""
    pieces = [raw[at : at + 65536] for at in range(0, len(raw), 65536)][::-1]
    replied: list[bytes] = []
    status = 0
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": PATH, "raw_path": PATH.encode(), "query_string": b"",
        "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8888), "state": {},
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        if not pieces:
            await asyncio.Event().wait()  # a client that stays
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        replied.append(message.get("body", b""))

    await app(scope, receive, send)
    if status != 200:
        raise RuntimeError(f"status {status}: {b''.join(replied)[:500]!r}")
    return b"".join(replied).decode()


def write_larger_tokenizer(checkpoint: Path, to: Path) -> None:
    """api_inputs.larger_tokenizer with the newest of Mistral's files, into the folder ``to``."""
    small = json.loads((checkpoint / "tokenizer.json").read_text())
    newest = max((Path(mistral_common.__file__).parent / "data").glob("tekken_*.json"))
    made = larger_tokenizer(small, json.loads(newest.read_text()))
    (to / "tokenizer.json").write_text(json.dumps(made))
    (to / "tokenizer_config.json").write_bytes((checkpoint / "tokenizer_config.json").read_bytes())


def _core_request(ids: list[int], params: SamplingParams, name: str) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name, external_req_id=name, prompt_token_ids=ids, sampling_params=params,
        arrival_time=0.0, mm_features=None, pooling_params=None, lora_request=None,
        cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
