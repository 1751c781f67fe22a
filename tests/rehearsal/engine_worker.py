"""One engine's life in one process: reads a job, starts vLLM, does its steps, writes what it saw.

``python engine_worker.py JOB RESULT``, both JSON. A job is ``{"engine": {...}, "steps": [...]}``:
arguments of ``vllm.LLM``, then steps of the kinds below, each with a ``name`` for its answer.
Floats are written so that they come back bit for bit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def generate(llm: Any, step: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy replies to ``prompts`` (token ids), ``together`` in one batch or one after the other.

    ``budget`` sets how many tokens the scheduler may put into one pass (default: the engine's);
    ``keep_cache`` leaves the prefix cache as it is. A reply: its tokens, the top log-probabilities
    of each, those of the prompt if ``prompt_logprobs``, and how many prompt tokens were cached.
    """
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0,
        max_tokens=step["max_tokens"],
        ignore_eos=True,
        logprobs=step.get("logprobs", 3),
        prompt_logprobs=step.get("prompt_logprobs"),
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    configured = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = step.get("budget", configured)
    prompts = [{"prompt_token_ids": ids} for ids in step["prompts"]]
    try:
        replies = []
        for batch in [prompts] if step.get("together") else [[prompt] for prompt in prompts]:
            if not step.get("keep_cache") and not llm.reset_prefix_cache():
                raise RuntimeError("the prefix cache was not emptied")
            replies += llm.generate(batch, parameters, use_tqdm=False)
    finally:
        scheduler.max_num_scheduled_tokens = configured
    return [
        {
            "tokens": list(reply.outputs[0].token_ids),
            "logprobs": [values(place) for place in reply.outputs[0].logprobs],
            "prompt_logprobs": [values(place) for place in reply.prompt_logprobs or ()],
            "cached": reply.num_cached_tokens,
        }
        for reply in replies
    ]


def lessons(llm: Any) -> list[dict[str, Any]]:
    """What a chat with thinking off answers to each lesson; how many tokens it was asked in."""
    from vllm import SamplingParams

    from spark_overlay.rehearsal.lessons import LESSONS

    parameters = SamplingParams(temperature=0, max_tokens=160, skip_special_tokens=False)
    replies = [
        llm.chat(
            [{"role": "user", "content": lesson.question}],
            parameters,
            tools=[dict(tool) for tool in lesson.tools] or None,
            chat_template_kwargs={"enable_thinking": False},
            use_tqdm=False,
        )[0]
        for lesson in LESSONS
    ]
    return [
        {"text": reply.outputs[0].text, "asked": len(reply.prompt_token_ids)} for reply in replies
    ]


def values(place: Any) -> dict[str, float] | None:
    return None if place is None else {str(token): entry.logprob for token, entry in place.items()}


def metrics(llm: Any) -> dict[str, float]:
    """The engine's counters and gauges, summed over their labels."""
    totals: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            totals[metric.name] = totals.get(metric.name, 0) + metric.value
    return totals


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    started = time.monotonic()
    llm = LLM(**job["engine"])
    answers: dict[str, Any] = {"seconds": {"start": time.monotonic() - started}}
    for step in job["steps"]:
        began = time.monotonic()
        if step["do"] == "generate":
            answer: Any = generate(llm, step)
        elif step["do"] == "metrics":
            answer = metrics(llm)
        elif step["do"] == "lessons":
            answer = lessons(llm)
        else:
            # One answer of each rank.
            answer = llm.collective_rpc(step["do"], args=tuple(step.get("args", ())))
        answers[step["name"]] = answer
        answers["seconds"][step["name"]] = time.monotonic() - began
    return answers


if __name__ == "__main__":
    job_file, result_file = (Path(argument) for argument in sys.argv[1:])
    answers = run(json.loads(job_file.read_text()))
    partial = result_file.with_suffix(".partial")
    partial.write_text(json.dumps(answers))
    partial.rename(result_file)
