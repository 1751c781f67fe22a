"""The engines of the GPU checks: one process each, asked everything one configuration is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpu import hidden, launches

TESTS = Path(__file__).resolve().parents[1]
OVERLAY = TESTS.parent / "overlay"
LOGPROBS = 64
REPLY = 12
TOKEN_COST = 0.5  # of a step, where how much of a draft is verified hangs on it
KNOWN = 96  # tokens of a reply whose continuation is known
Step = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """What a start and its answers took on an H200 of 16 cores, three or four engines at once:
    ``cold`` with nothing compiled yet, ``seconds`` with the kept kernels of an earlier run."""

    cold: int
    seconds: int
    kind: Literal["plain", "exl3", "draft", "engram", "bigram"] = "plain"
    overlay: bool = False
    attention: str = ""  # OVERLAY_ATTENTION
    taped: bool = False
    firsts: bool = False  # also the first token after each of many prompts
    again: bool = False  # also the longest prompt anew and after a cached beginning, and a batch
    drafts: bool = False  # replies of a known continuation, and what was drafted and accepted
    launched: bool = False  # also how many kernels a decode step launches (launches.py)
    hidden: bool = False  # held to an SM80, with nothing of newer GPUs to be found (hidden.py)
    engram: bool = False  # both Engram layers in each step (see twin.py)
    options: Mapping[str, Any] = field(default_factory=dict)


EXACT = {"swa_bounded_replay": False}
EAGER = {"enforce_eager": True}
GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}
#: Pieces with attention between them, as EXL3's and Engram's results have them.
PIECES = {"compilation_config": {**GRAPHS["compilation_config"], "cudagraph_mode": "PIECEWISE"}}
#: Of a step that verifies three drafted tokens of each of up to four requests.
DRAFTED = {
    "compilation_config": {
        **PIECES["compilation_config"],
        "cudagraph_capture_sizes": [1, 2, 4, 8, 12, 16],
    },
    "speculative_config": {"method": "dspark", "num_speculative_tokens": 3},
}
#: The same with all of a decode step in one graph, as vLLM does unless told otherwise.
DRAFTED_WHOLE = {**DRAFTED, "compilation_config": {"cudagraph_capture_sizes": [4, 8, 12, 16]}}
NO_WARMUP = {"kernel_config": {"enable_jit_warmup": False}}
CACHED = {"enable_prefix_caching": True}
COUNTED = {"disable_log_stats": False}
#: How much of a draft is verified hangs on its confidence and on what a step costs.
ADAPTIVE = {
    **EXACT,
    **NO_WARMUP,
    **COUNTED,
    **DRAFTED_WHOLE,
    "speculative_config": {
        **DRAFTED_WHOLE["speculative_config"],
        "enable_adaptive_verification": True,
    },
}
CHOSEN: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "portable": {
        "eager": {"taped": True, "options": {**EXACT, **EAGER, **NO_WARMUP}},
        "graphs": {
            "again": True,
            "launched": True,
            "options": {**EXACT, **GRAPHS, **NO_WARMUP, **CACHED},
        },
        "replay": {
            "firsts": True,
            "options": {**GRAPHS, **NO_WARMUP, "max_num_batched_tokens": 2048},
        },
        "draft": {
            "kind": "bigram",
            "drafts": True,
            "options": {**EXACT, **DRAFTED_WHOLE, **NO_WARMUP, **COUNTED},
        },
    },
    "stock": {
        "eager": {"taped": True, "options": {**EXACT, **EAGER, **NO_WARMUP}},
        "draft": {
            "kind": "bigram",
            "drafts": True,
            "options": {**EXACT, **DRAFTED_WHOLE, **NO_WARMUP, **COUNTED},
        },
    },
}
ENGINES: Mapping[str, Engine] = {
    "stock-eager": Engine(172, 49, taped=True, options={**EXACT, **EAGER}),
    "stock-graphs": Engine(173, 47, launched=True, options={**EXACT, **GRAPHS}),
    "stock-replay": Engine(
        173, 47, firsts=True, options={**GRAPHS, "max_num_batched_tokens": 2048}
    ),
    "exl3-eager": Engine(
        163,
        79,
        kind="exl3",
        overlay=True,
        taped=True,
        options={**EXACT, **EAGER, **NO_WARMUP},
    ),
    "exl3-graphs": Engine(
        173, 60, kind="exl3", overlay=True, options={**EXACT, **PIECES, **NO_WARMUP}
    ),
    "exl3-draft": Engine(
        190, 75, kind="draft", overlay=True, options={**EXACT, **DRAFTED, **NO_WARMUP}
    ),
    **{
        # Replay is on, as it is by default, but where nothing is captured.
        f"engram-twin-{mode}": Engine(190, 75, kind="engram", engram=True, options=options)
        for mode, options in (
            ("eager", {**CACHED, **EXACT, **EAGER}),
            ("graphs", {**CACHED, **GRAPHS}),
            ("pieces", {**CACHED, **PIECES}),
        )
    },
}
#: The overlay in bf16 with each of its attention classes.
ENGINES = {
    **ENGINES,
    **{
        f"{'asked-' if choice == 'stock' else ''}{choice}-{name}": Engine(
            190, 132, overlay=True, attention=choice, **how
        )
        for choice, those in CHOSEN.items()
        for name, how in those.items()
    },
}
#: Held to an SM80 with all else hidden: nothing is asked for, the overlay must choose its own.
ENGINES = {
    **ENGINES,
    **{
        f"hidden-{name}": Engine(190, 132, overlay=True, hidden=True, **how)
        for name, how in (
            *CHOSEN["portable"].items(),
            ("adaptive", {**CHOSEN["portable"]["draft"], "options": ADAPTIVE}),
            ("exl3", {"kind": "draft", "options": {**EXACT, **DRAFTED, **NO_WARMUP}}),
        )
    },
}
COMMON: Mapping[str, Any] = {
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
    "max_logprobs": LOGPROBS,
    "kv_cache_memory_bytes": 2 << 30,
    "gpu_memory_utilization": 0.2,
    "enable_prefix_caching": False,
    "dtype": "bfloat16",
    "tokenizer_mode": "deepseek_v41",
    "limit_mm_per_prompt": {"image": 0},
    "disable_log_stats": True,
    "worker_extension_cls": "gpu.watch.GpuProbe",
}
#: The CPU build beside the rehearsal's sizes, to try a check without a GPU.
ON_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "block_size": 64}


def prompts(text: Mapping[str, Any]) -> list[list[int]]:
    """Within the window; beyond it; beyond the top k at ratio 1; and at ratio 2, filtered too."""
    window, top_k = text["sliding_window"], text["index_topk"]
    lengths = (window // 3, 2 * window, top_k + 2 * window, 3 * top_k)
    return [tokens(text, length, seed) for seed, length in enumerate(lengths)]


def many_prompts(text: Mapping[str, Any], count: int = 24) -> list[list[int]]:
    """From two windows on, to the longest."""
    low, high = 2 * text["sliding_window"], 3 * text["index_topk"]
    lengths = [low + (high - low) * i // (count - 1) for i in range(count)]
    return [tokens(text, length, 100 + i) for i, length in enumerate(lengths)]


def tokens(text: Mapping[str, Any], length: int, seed: int) -> list[int]:
    span = text["vocab_size"] - 16
    return [8 + (i * (3571 + 2 * seed) + 97 * seed + (i * i) % 61) % span for i in range(length)]


def engram_steps(text: Mapping[str, Any]) -> list[Step]:
    """Alone and in chunks; after a cached beginning, which n-grams reach back into; a batch. No
    step but of 1, 2 or 4 tokens is so small that a graph would be padded."""
    *_, longest = alone = prompts(text)
    top_k, window = text["index_topk"], text["sliding_window"]
    # The whole of what was asked last, and the first part of it.
    beginnings = (longest, longest[: 2 * top_k + window // 2 + 12])
    cached = [begin + tokens(text, 20 + 5 * seed, seed) for seed, begin in enumerate(beginnings)]
    batch = [tokens(text, 2 * window + 44, 50 + seed) for seed in range(4)]
    plan = [call("probe_classes", name="classes"), call("probe_twins")]
    fresh = {"keep_cache": False}
    asked: tuple[tuple[str, list[list[int]], Step], ...] = (
        ("alone", alone, fresh),
        ("cached", cached, {}),
        ("batch", batch, {**fresh, "together": True}),
    )
    for name, those, how in asked:
        plan.append({**generate(name, those), **how})
        plan.append(call("probe_twins", name=f"{name}-twins"))
    plan.append(call("probe_engram", name="engram"))
    return plan


def steps(engine: Engine, text: Mapping[str, Any], tape: Path) -> list[Step]:
    if engine.engram:
        return engram_steps(text)
    asked = prompts(text)
    plan = [
        call("probe_classes", name="classes"),
        call("probe_rows"),
        generate("replies", asked),
        call("probe_rows", name="rows"),
        call("probe_hidden", name="hidden"),
    ]
    if engine.drafts:
        return [
            call("probe_classes", name="classes"),
            call("probe_verified", TOKEN_COST),
            generate("replies", asked, KNOWN),
            {**generate("batch", asked, KNOWN), "together": True},
            call("probe_verified", name="verified"),
            {"do": "metrics", "name": "metrics"},
            call("probe_hidden", name="hidden"),
        ]
    if engine.again:
        longest = asked[-1]
        window = text["sliding_window"]
        beginning = [*longest[:-window], *tokens(text, window + 30, 9)]
        plan += [
            {**generate("cold", [longest, beginning]), "keep_cache": False},
            {**generate("warm", [longest, beginning]), "keep_cache": True},
            {**generate("batch", asked[:3]), "together": True, "keep_cache": False},
        ]
    if engine.launched:
        plan += launches.steps(asked[-1])
    if engine.firsts:
        plan.append(generate("firsts", many_prompts(text), 1))
    if engine.taped:
        plan += [
            call("probe_record"),
            generate("taped", asked[-1:]),
            call("probe_save", str(tape), name="passes"),
        ]
    return plan


def generate(name: str, asked: Sequence[list[int]], length: int = REPLY) -> Step:
    return {"do": "generate", "name": name, "prompts": list(asked), "max_tokens": length,
            "logprobs": LOGPROBS, "keep_cache": True}  # fmt: skip


def call(method: str, *arguments: Any, name: str = "_") -> Step:
    return {"do": method, "name": name, "args": list(arguments)}


class EngineFailed(RuntimeError):
    """An engine ended without its answers."""


def run(
    name: str,
    text: Mapping[str, Any],
    model: Path,
    scratch: Path,
    *,
    cpu: bool,
    limit: float,
    gpu: int | None = None,
) -> dict[str, Any]:
    """One engine's answers, on the GPU of that number. Raises EngineFailed with the end of its
    log."""
    engine = ENGINES[name]
    task, answers, log, tape = (
        scratch / f"{name}.{kind}" for kind in ("job", "json", "log", "safetensors")
    )
    options = {**COMMON, **engine.options, "model": str(model), **(ON_CPU if cpu else {})}
    if engine.engram:
        told = {"engram_dir": str(model), "engram_store": "file", "engram_stats_seconds": 5}
        options["additional_config"] = {"spark_overlay": told}
    if cpu:
        options.pop("compilation_config", None)
    task.write_text(json.dumps({"engine": options, "steps": steps(engine, text, tape)}))
    worker = TESTS / "rehearsal" / "engine_worker.py"
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(worker), str(task), str(answers)],
            stdout=out, stderr=subprocess.STDOUT, cwd=scratch,
            env=environment(scratch, engine, cpu=cpu)
            | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}),
        )  # fmt: skip
        try:
            status: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            status = f"nothing within {limit:.0f} s"
    if status != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        raise EngineFailed(f"engine {name} ended with {status}; {log} ends with\n{end}")
    found: dict[str, Any] = json.loads(answers.read_text())
    found["seconds"]["whole"] = time.monotonic() - began
    return found


def environment(scratch: Path, engine: Engine, *, cpu: bool) -> dict[str, str]:
    """The stock engine does not find the overlay; the other does, by its entry points. Where two
    Engram layers are compared, the engine finds the twins only."""
    paths = [str(TESTS), str(TESTS / "rehearsal"), str(OVERLAY)]
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    if engine.attention and not cpu:
        more["OVERLAY_ATTENTION"] = engine.attention
    if engine.overlay and not cpu:
        project = tomllib.loads((OVERLAY / "pyproject.toml").read_text())["project"]
        paths.append(str(entry_points(scratch, "spark_overlay", project["entry-points"])))
    if engine.hidden and not cpu:
        paths.append(str(hidden.folder(scratch)))
        more["OVERLAY_FORCE_ARCH"] = "80"
    if engine.engram and not cpu:
        twin = {"vllm.general_plugins": {"spark_twin": "gpu.twin:register"}}
        paths.append(str(entry_points(scratch, "spark_twin", twin)))
    if cpu:
        more |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        more |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **more, "PYTHONPATH": path.rstrip(os.pathsep)}


def entry_points(scratch: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> Path:
    """A folder that makes the checkout an installed distribution; nothing is copied."""
    folder = scratch / f"plugin-{name}"
    info = folder / f"{name}-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.0\n")
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder
