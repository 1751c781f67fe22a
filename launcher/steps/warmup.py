"""The step that sends the usual shapes of requests once, so that no user waits for a compiler.

Triton compiles a kernel for each class of shapes when it first meets it, up to seconds each. A
warm-up that fails is told and stops nothing: the pair serves, only its first requests are slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from launcher.http import Api, NoAnswer
from launcher.smoke.chat import user
from launcher.steps.base import Context, Step, fingerprint
from launcher.steps.ready import api_of, recorded

# With k + 1 tokens of a verify step these meet every power of two from 8 to 256.
LENGTHS = (1, 10, 26, 58, 122, 250)
TOKEN = 33  # an ordinary one
TOKENS = 16
AT_ONCE = 4
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


@dataclass(frozen=True)
class Request:
    told: str
    path: str
    body: dict[str, Any]
    copies: int = 1


def requests(model: str, seqs: int) -> Iterator[Request]:
    """All shapes in the order of sending; ``copies`` of one go out together."""
    for length in LENGTHS:
        body = {"model": model, "prompt": [TOKEN] * length, "max_tokens": TOKENS, "temperature": 0}
        yield Request(f"a prompt of {length} tokens", "/v1/completions", body)
    chat = {"model": model, "messages": [user("Say hello.")], "max_tokens": TOKENS}
    kinds: dict[str, dict[str, Any]] = {
        "a plain chat": {**PLAIN, "temperature": 0},
        "a thinking chat": {**THINKING, "temperature": 0},
        "a sampled chat": PLAIN,
        "top_k": {**PLAIN, "top_k": 40},
        "top_p": {**PLAIN, "top_p": 0.9},
        "top_k and top_p": {**PLAIN, "top_k": 40, "top_p": 0.9},
    }
    for told, more in kinds.items():
        yield Request(told, "/v1/chat/completions", {**chat, **more})
    for copies in range(2, min(seqs, AT_ONCE) + 1):
        yield Request(f"{copies} chats at once", "/v1/chat/completions", {**chat, **PLAIN}, copies)


@dataclass(frozen=True)
class Warmup(Step):
    key: str = "warmup"
    title: str = "warm-up (usual shapes, once)"
    needs: tuple[str, ...] = ("launch",)

    def inputs(self, ctx: Context) -> str:
        wanted = ctx.settings.flag("DSV41_BOOT_SHAPE_WARMUP")
        return fingerprint({"launch_id": recorded(ctx).launch_id, "wanted": wanted})

    def done(self, ctx: Context) -> bool:
        return True  # of this very launch

    def do(self, ctx: Context) -> None:
        if not ctx.settings.flag("DSV41_BOOT_SHAPE_WARMUP"):
            ctx.console.say("  left out: DSV41_BOOT_SHAPE_WARMUP=0")
            return
        within = float(ctx.settings.int("DSV41_WARMUP_REQ_TIMEOUT"))
        model, seqs = recorded(ctx).served_model_name, ctx.settings.int("MAX_NUM_SEQS")
        since = ctx.console.now()
        wanted = list(requests(model, seqs))
        for place, request in enumerate(wanted, 1):
            ctx.console.progress(f"{request.told} ({place} of {len(wanted)})", since)
            fault = send(api_of(ctx), request, within)
            if fault is not None:
                ctx.record.event(self.key, "failed", request=request.told, fault=fault)
                ctx.console.warn(f"warm-up of {request.told}: {fault}; the rest is left out")
                return


def send(api: Api, request: Request, within: float) -> str | None:
    """What was wrong with the answers, None if all are 200."""

    def one(_: int) -> str | None:
        try:
            answer = api.post(request.path, request.body, within)
        except NoAnswer as fault:
            return str(fault)
        return None if answer.status == 200 else f"status {answer.status}: {answer.excerpt()}"

    ask: Callable[[int], str | None] = one
    with ThreadPoolExecutor(request.copies) as pool:
        faults = [fault for fault in pool.map(ask, range(request.copies)) if fault]
    return faults[0] if faults else None
