"""Whether a recorded deployment serves.

/health alone proves little: vLLM's API process answers 200 while a rank is dead. So a pair serves
when both ranks run under one launch id, /health is 200 and /v1/models names the model; a generated
token is the proof through both ranks.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.http import Api, NoAnswer
from launcher.runtimes.base import RankStatus
from launcher.state import DeploymentRecord


class Standing(enum.Enum):
    """How a deployment stands; the value is the exit code of ``status``."""

    SERVING = 0
    DOWN = 1
    HALF_UP = 3
    STARTING = 4


@dataclass(frozen=True)
class Verdict:
    standing: Standing
    reason: str
    ranks: tuple[RankStatus, ...] = ()


def ranks_verdict(launch_id: str, ranks: Sequence[RankStatus]) -> Verdict | None:
    """What the ranks alone decide; None when both run under the launch id and the API decides."""
    found = tuple(ranks)
    ours = [
        rank for rank in found if rank.running and not rank.paused and rank.launch_id == launch_id
    ]
    if len(ours) == len(found):
        return None
    told = []
    for rank in found:
        if rank in ours:
            continue
        if rank.paused:
            told.append(f"the {rank.role} is paused (docker unpause its container)")
        elif rank.running:
            told.append(f"the {rank.role} runs under another launch id ({rank.launch_id})")
        elif rank.state == "unreachable":
            told.append(f"the {rank.role}'s node does not answer: {rank.note}")
        else:
            told.append(f"the {rank.role} {rank.ending()}")
    # A rank that cannot be asked may well run.
    up = any(rank.running or rank.state == "unreachable" for rank in found)
    standing = Standing.HALF_UP if up else Standing.DOWN
    return Verdict(standing, "; ".join(told), found)


def api_fault(api: Api, model: str, within: float, clock: Callable[[], float]) -> str | None:
    """What is wrong with the API, None if it is healthy and names the model; in ``within`` s."""
    deadline = clock() + within
    try:
        answer = api.get("/health", max(0.05, deadline - clock()))
        if answer.status != 200:
            return f"/health answers {answer.status}"
        answer = api.get("/v1/models", max(0.05, deadline - clock()))
    except NoAnswer as fault:
        return str(fault)
    if answer.status == 401:
        return "/v1/models answers 401: VLLM_API_KEY of .env is not the key it was started with"
    if answer.status != 200:
        return f"/v1/models answers {answer.status}: {answer.excerpt()}"
    names = model_names(answer.json())
    if names is None:
        return f"/v1/models answers something else than a list of models: {answer.excerpt()}"
    if model not in names:
        return f"/v1/models names {', '.join(names) or 'nothing'}, not {model}"
    return None


def model_names(body: object) -> list[str] | None:
    """The ids in an answer of /v1/models, None if it is none."""
    if not isinstance(body, dict) or not isinstance(body.get("data"), list):
        return None
    return [str(e["id"]) for e in body["data"] if isinstance(e, dict) and "id" in e]


def token_fault(api: Api, model: str, timeout: float) -> str | None:
    """What is wrong with one generated token, None if it came."""
    body = {"model": model, "prompt": "1 2 3", "max_tokens": 1, "temperature": 0}
    try:
        answer = api.post("/v1/completions", body, timeout)
    except NoAnswer as fault:
        return str(fault)
    if answer.status != 200:
        return f"/v1/completions answers {answer.status}: {answer.excerpt()}"
    found = answer.json()
    try:
        generated = int(found["usage"]["completion_tokens"])
        found["choices"][0]["text"]
    except (KeyError, IndexError, TypeError, ValueError):
        return f"/v1/completions answers something else than a completion: {answer.excerpt()}"
    return None if generated == 1 else f"/v1/completions generated {generated} tokens, not 1"


def judge(
    deployment: DeploymentRecord,
    ranks: Sequence[RankStatus],
    api: Api,
    *,
    boot_id: str,
    within: float = 1.0,
    probe: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Verdict:
    """How the recorded deployment stands now; ``probe`` seconds for one token, None to ask none."""
    found = tuple(ranks)
    # Containers say themselves that they ended; of a process nothing is left but its record.
    if deployment.boot_id != boot_id and not deployment.reach:
        return Verdict(Standing.DOWN, "the machine was started anew since the launch", found)
    decided = ranks_verdict(deployment.launch_id, found)
    if decided is not None:
        return decided
    fault = api_fault(api, deployment.served_model_name, within, clock)
    if fault is None and probe is not None:
        fault = token_fault(api, deployment.served_model_name, probe)
    if fault is None:
        return Verdict(Standing.SERVING, "both ranks run and the API answers", found)
    if deployment.ready is None:
        return Verdict(Standing.STARTING, f"both ranks run; {fault}", found)
    return Verdict(Standing.HALF_UP, f"both ranks run, but it does not serve: {fault}", found)
