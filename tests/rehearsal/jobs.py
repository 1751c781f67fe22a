"""What the tests ask of which engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import Job, Step

#: Of the rehearsal checkpoint; a prompt beyond their sum at ratio 2 makes every part choose.
WINDOW, TOP_K = 32, 16
#: The scheduler's budgets in the chunk tests: groups of ratio 2 are cut open by the odd one.
BUDGETS = {"odd": 23, "even": 32}
TAPE_BUDGET = 64
#: Tokens of a reply; of one whose prompt is what matters; of one twice as long.
REPLY, SHORT, FAR = 6, 2, 12
#: Layer and rank of the deliberate faults.
FAULT_LAYER, FAULT_RANK = 4, 1

COMMON: Mapping[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 64,
    "dtype": "bfloat16",
    "tokenizer_mode": "deepseek_v41",
    "limit_mm_per_prompt": {"image": 0},
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "worker_extension_cls": "probe.Probe",
}
EXACT = {"swa_bounded_replay": False}


def prompt(length: int, stride: int = 37, start: int = 11, span: int = 480) -> list[int]:
    """Ordinary tokens, no two neighbours alike."""
    return [(i * stride + start) % span + 5 for i in range(length)]


#: The second and the last are longer than the window; the last than window and top-k as well.
PROMPTS = [prompt(9), prompt(70, 41), prompt(47, 53), prompt(180, span=490)]
LONG = PROMPTS[-1]
#: Those that replay touches.
SERVED = [PROMPTS[1], LONG]
#: The long one's first two pages, then other text.
BRANCH = LONG[:130] + prompt(50, 29, 3)
TEXTS = [prompt(1, start=s) + prompt(n, 61, s) for s, n in ((60, 12), (200, 40), (330, 200))]


def generate(name: str, prompts: list[list[int]], length: int = REPLY, **more: Any) -> Step:
    return {"do": "generate", "name": name, "prompts": prompts, "max_tokens": length, **more}


def call(method: str, *arguments: Any, name: str = "_") -> Step:
    return {"do": method, "name": name, "args": list(arguments)}


def counted(step: Step) -> tuple[Step, ...]:
    """A step and, under ``<name> passes``, the tokens of each forward pass it took."""
    return call("probe_steps"), step, call("probe_steps", name=f"{step['name']} passes")


def forced(name: str) -> tuple[Step, ...]:
    """The tape's request once more, every layer fed from the tape."""
    return (
        call("probe_force", "{tape}"),
        generate(f"{name} reply", [LONG]),
        call("probe_errors", name=name),
    )


def speculative(tokens: int) -> Mapping[str, Any]:
    return {"speculative_config": {"method": "dspark", "num_speculative_tokens": tokens}}


METRICS: Step = {"do": "metrics", "name": "metrics"}
SWAP = call("probe_swap_groups", FAULT_LAYER, FAULT_RANK)

JOBS: Mapping[str, Job] = {
    "plain": Job(
        options=EXACT,
        steps=(
            generate("alone", PROMPTS, prompt_logprobs=1),
            generate("again", PROMPTS),
            *(
                step
                for name, budget in BUDGETS.items()
                for step in counted(
                    generate(name, PROMPTS, SHORT, budget=budget, prompt_logprobs=1)
                )
            ),
            *counted(generate("batch", PROMPTS, together=True, prompt_logprobs=1)),
            generate("branch cold", [BRANCH], SHORT),
            generate("long cold", [LONG], SHORT),
            *counted(generate("long warm", [LONG], SHORT, keep_cache=True)),
            *counted(generate("branch warm", [BRANCH], SHORT, keep_cache=True)),
            call("probe_modules", name="modules"),
            call("probe_allocated", name="allocated"),
            call("probe_packed", name="packed"),
            call("probe_record"),
            generate("taped", [LONG], budget=TAPE_BUDGET),
            call("probe_save", "{tape}", name="tape"),
        ),
    ),
    # Another store and another way to the same chunks: the budget by vLLM's own option.
    "memory": Job(
        store="memory",
        options={**EXACT, "max_num_batched_tokens": 65},
        steps=(
            generate("alone", PROMPTS, SHORT, prompt_logprobs=1),
            call("probe_modules", name="modules"),
            call("probe_allocated", name="allocated"),
        ),
    ),
    # As it is served: bounded replay on.
    "replay": Job(
        steps=(
            generate("alone", SERVED, FAR),
            generate("branch cold", [BRANCH], SHORT),
            generate("long cold", [LONG], SHORT),
            generate("long warm", [LONG], SHORT, keep_cache=True),
            generate("branch warm", [BRANCH], SHORT, keep_cache=True),
        ),
    ),
    # Read plainly; what it says is compared with what the native reads of "plain" make.
    "draft3": Job(
        store="plain",
        options={**EXACT, **speculative(3)},
        steps=(
            generate("alone", PROMPTS),
            generate("batch", PROMPTS, together=True),
            METRICS,
            call("probe_packed", name="packed"),
            call("probe_modules", name="modules"),
            call("probe_allocated", name="allocated"),
        ),
    ),
    # As it is served, against "replay".
    "draft5": Job(options=speculative(5), steps=(generate("alone", SERVED, FAR), METRICS)),
    "constructed": Job(
        variant="constructed",
        options=speculative(5),
        steps=(generate("alone", TEXTS, 36), METRICS),
    ),
    # Our worker class, which the launcher names; memory given back whatever there is.
    "cared": Job(
        options={
            **EXACT,
            "max_num_batched_tokens": 128,
            "worker_cls": "spark_overlay.memory.worker.SparkWorker",
        },
        overlay={"memory_release_tokens": 256, "memory_release_below_gib": 0},
        steps=(
            generate("alone", [LONG], SHORT),
            generate("prompt", [prompt(320)], SHORT),
        ),
    ),
    # Every lesson as a user asks it, with the replay that the real pair serves with.
    "lessons": Job(variant="taught", steps=({"do": "lessons", "name": "said"},)),
    "pair": Job(
        options={
            **EXACT,
            "max_num_batched_tokens": TAPE_BUDGET,
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
        },
        after="plain",
        steps=(
            call("probe_packed", name="packed"),
            call("probe_modules", name="modules"),
            call("probe_allocated", name="allocated"),
            generate("alone", [LONG], SHORT),
            generate("again", [LONG], SHORT),
            *forced("right"),
            SWAP,
            *forced("swapped groups"),
            SWAP,
            call("probe_shift_experts", FAULT_LAYER, FAULT_RANK, 0),
            *forced("shifted experts"),
        ),
    ),
}
