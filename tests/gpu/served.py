"""Engines that serve: one process for each rank, started as the launcher starts the pair's.

Arguments and environment are the launcher's own (``deploy``), changed where a host with GPUs and no
RoCE differs from two Sparks; the ranks run under its keepers and are asked over the API.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from settings_root import settings_of

from gpu import engines
from launcher import health, ports
from launcher.deployment import Deployment, Place, Rank, Role, Site, deploy
from launcher.http import Api, NoAnswer
from launcher.rehearsal import HOST, INTERFACE, SERVE
from launcher.runtimes.process import ProcessRuntime

ROOT = engines.TESTS.parent
FORCED, REPLY = 6, engines.REPLY
#: Tokens of the replies that are timed, and of the one whose collectives are counted.
SHORT, LONG = 8, 40
#: What V4.1 is served with where it is compared: no cached prefix, no chunks, so that replay is
#: the reference's.
ASKED = {
    "MAX_MODEL_LEN": "4096",
    "MAX_NUM_SEQS": "4",
    "MAX_NUM_BATCHED_TOKENS": "2048",
    "KV_BLOCK_SIZE": "64",
    "SWA_BOUNDED_REPLAY": "1",
    "LANGUAGE_MODEL_ONLY": "1",
    "QUANTIZATION": "exl3",
    "ENGRAM_STORE": "file",
    "API_SAMPLING": "request",
    "DSPARK_TOKENS": "3",
}
#: NCCL's way to another machine; these GPUs are in one.
RAILS = ("NCCL_IB_", "NCCL_NET")
#: Kept from an earlier run at the places that stage.py's keep.sh packs; compiled for this GPU.
HOSTS_OWN = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCH_CUDA_ARCH_LIST",
             "FLASHINFER_CUDA_ARCH_LIST")  # fmt: skip
EXTRA = ["--no-enable-prefix-caching", "--max-logprobs", str(engines.LOGPROBS),
         "--worker-extension-cls", "gpu.watch.GpuProbe"]  # fmt: skip
EXTRA_CUDA = ["--disable-custom-all-reduce", "--compilation-config.cudagraph_mode", "PIECEWISE",
              "--kernel-config", '{"enable_jit_warmup":false}']  # fmt: skip


class ServedFailed(RuntimeError):
    """Ranks that did not serve; the end of their logs is in the message."""


@dataclass(frozen=True)
class Served:
    """``seconds``: a start and its answers, guessed from run.py's engines on one H200."""

    tp: int
    draft: bool
    seconds: int


SERVED: Mapping[str, Served] = {
    "tp1": Served(1, False, 150),
    "tp1-draft": Served(1, True, 160),
    "tp2": Served(2, False, 130),
    "tp2-draft": Served(2, True, 140),
}


def settings(scratch: Path, draft: bool, cpu: bool) -> Any:
    """The launcher's settings for one engine."""
    import shlex

    extra = EXTRA if cpu else EXTRA + EXTRA_CUDA
    chosen = {
        **ASKED,
        "SPEC_METHOD": "dspark" if draft else "none",
        "KV_CACHE_MEMORY_BYTES": str((64 << 20) if cpu else (2 << 30)),
        "GPU_MEM_UTIL": "0.2",
        "ENFORCE_EAGER": str(int(cpu)),
        "EXTRA_ARGS": shlex.join(extra),
        **({"GLM53_SPINWAIT_MS": "1"} if cpu else {}),
    }
    scratch.mkdir(parents=True, exist_ok=True)
    return settings_of(scratch, overrides=[f"{key}={value}" for key, value in chosen.items()])


def planned(
    chosen: Any, model: Path, scratch: Path, *, tp: int, cpu: bool, gpus: Sequence[int],
    kit: bool = True,
) -> Deployment:  # fmt: skip
    """Both ranks, or the head alone; ``gpus`` by rank. Without ``kit`` NCCL's own defaults."""

    def place(role: Role) -> Place:
        program = (sys.executable, "-m", SERVE)
        rails = () if cpu else ("none",)
        return Place("local", role, HOST, INTERFACE, str(model), str(model), program, rails)

    api = ports.free(HOST)
    site = Site(
        name="rehearsal" if cpu else "pair",
        device="cpu" if cpu else "cuda",
        head=place("head"),
        worker=place("worker"),
        master_port=ports.free(HOST, avoid=(api,)),
        api_host=HOST,
        api_port=api,
        cache_dir=str(scratch / "cache"),
    )
    made = deploy(chosen, site, f"two-{scratch.name}-{time.time_ns():x}")
    ranks = [here(rank, scratch, tp, gpus[rank.rank % len(gpus)], cpu, kit) for rank in made.ranks]
    return dataclasses.replace(made, ranks=tuple(ranks[:tp]))


def here(rank: Rank, scratch: Path, tp: int, gpu: int, cpu: bool, kit: bool = True) -> Rank:
    """The rank as this host needs it: one GPU, no rails, probes; alone if ``tp`` is 1."""
    argv = list(rank.argv)
    if tp == 1:
        for option in ("--nnodes", "--node-rank", "--master-addr", "--master-port"):
            at = argv.index(option)
            del argv[at : at + 2]
        argv[argv.index("--tensor-parallel-size") + 1] = "1"
    own = engines.environment(scratch, engines.Engine(0, 0, overlay=True), cpu=cpu)
    own.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), own["PYTHONPATH"]])
    env = {**{k: v for k, v in own.items() if not k.startswith("NCCL_")}, **rank.env}
    env["VLLM_SERVER_DEV_MODE"] = "1"  # for the probes
    if not cpu:
        rails = RAILS if kit else ("NCCL_",)
        env = {k: v for k, v in env.items() if not k.startswith(rails) and k not in HOSTS_OWN}
        # Multicast over NVLink is what neither Sparks nor every host has.
        env |= {"CUDA_VISIBLE_DEVICES": str(gpu), "NCCL_NVLS_ENABLE": "0"}
        env |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return dataclasses.replace(rank, argv=tuple(argv), env=env)


def kit_env(scratch: Path) -> dict[str, str]:
    """NCCL's settings of the pair, but for its rails."""
    chosen = settings(scratch / "kit", False, cpu=False)
    made = planned(chosen, scratch, scratch / "kit", tp=2, cpu=False, gpus=(0, 1))
    return {key: value for key, value in made.ranks[0].env.items() if key.startswith("NCCL_")}


class Pair:
    """A deployment's ranks (one or two) under the launcher's keepers."""

    def __init__(self, deployment: Deployment, scratch: Path) -> None:
        self.deployment = deployment
        self.runtime = ProcessRuntime(ROOT, scratch / "logs", os.environ)
        self.roles: tuple[Role, ...] = tuple(rank.role for rank in deployment.ranks)
        self.api = Api(HOST, deployment.api_port)

    def start(self, limit: float) -> float:
        """Seconds until all serve. Raises ServedFailed."""
        began = time.monotonic()
        for rank in self.deployment.ranks:
            self.runtime.start(rank, self.deployment.launch_id)
        while fault := self.fault():
            if (dead := self.dead()) or time.monotonic() - began > limit:
                raise ServedFailed(f"{dead or fault}\n{self.ends()}")
            time.sleep(0.3)
        return time.monotonic() - began

    def fault(self) -> str | None:
        return health.api_fault(self.api, self.deployment.served_model_name, 5.0, time.monotonic)

    def dead(self) -> str | None:
        """What the launcher says of the ranks if one is gone."""
        ranks = [self.runtime.inspect(role) for role in self.roles]
        verdict = health.ranks_verdict(self.deployment.launch_id, ranks)
        return None if verdict is None else verdict.reason

    def stop(self) -> None:
        for role in self.roles:
            self.runtime.stop(role, grace=5.0)

    def ends(self, lines: int = 40) -> str:
        told: list[str] = []
        for role in self.roles:
            told.append(f"-- {role}")
            self.runtime.tail(role, lines, told.append)
        return "\n".join(told)

    def complete(
        self, prompt: Sequence[int], length: int, timeout: float = 120.0, logprobs: bool = True
    ) -> dict[str, Any]:
        """Greedy tokens and the likeliest of each place. Raises ServedFailed."""
        body = {
            "model": self.deployment.served_model_name, "prompt": list(prompt), "temperature": 0,
            "max_tokens": length, "ignore_eos": True, "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **({"logprobs": engines.LOGPROBS} if logprobs else {}),
        }  # fmt: skip
        began = time.monotonic()
        choice = self._post("/v1/completions", body, timeout)["choices"][0]
        reply = {"tokens": choice["token_ids"], "seconds": time.monotonic() - began}
        if logprobs:
            places = choice["logprobs"]["top_logprobs"]
            reply["logprobs"] = [
                {name.removeprefix("token_id:"): value for name, value in place.items()}
                for place in places
            ]
        return reply

    def call(self, method: str, *args: Any) -> list[Any]:
        """A probe's answer of each rank."""
        found = self._post("/collective_rpc", {"method": method, "args": list(args)}, 120.0)
        return list(found["results"])

    def _post(self, path: str, body: dict[str, Any], timeout: float) -> Any:
        try:
            answer = self.api.post(path, body, timeout)
        except NoAnswer as fault:
            raise ServedFailed(f"{path}: {fault}") from None
        if answer.status != 200:
            raise ServedFailed(f"{path} answers {answer.status}: {answer.excerpt()}")
        return answer.json()


@contextmanager
def serving(deployment: Deployment, scratch: Path, limit: float) -> Any:
    """Yields a pair that serves, and how long its start took."""
    pair = Pair(deployment, scratch)
    try:
        took = pair.start(limit)
        yield pair, took
    finally:
        pair.stop()


def contexts(text: Mapping[str, Any]) -> list[list[int]]:
    """The texts whose next token every engine is asked for: prompts of many lengths, and prompts
    continued by a reply that none of the engines chose, token by token."""
    found = engines.many_prompts(text)
    for seed, prompt in enumerate(engines.prompts(text)):
        reply = engines.tokens(text, FORCED, 300 + seed)
        found += [prompt + reply[:count] for count in range(1, FORCED + 1)]
    return found


class Quiet:
    """Engines start and answer side by side and are timed one by one, none of the others working.

    An engine leaves when it has answered what is not timed, or when it failed."""

    def __init__(self, working: Iterable[str]) -> None:
        self._working, self._timing = set(working), False
        self._changed = threading.Condition()

    def leave(self, name: str) -> None:
        with self._changed:
            self._working.discard(name)
            self._changed.notify_all()

    @contextmanager
    def alone(self, name: str, limit: float) -> Iterator[None]:
        """Raises ServedFailed if the others still work after ``limit`` seconds."""
        self.leave(name)
        with self._changed:
            free = self._changed.wait_for(lambda: not self._working and not self._timing, limit)
            if not free:
                raise ServedFailed(f"{name} is not timed: others work after {limit:.0f} s")
            self._timing = True
        try:
            yield
        finally:
            with self._changed:
                self._timing = False
                self._changed.notify_all()


def ask(
    name: str, text: Mapping[str, Any], model: Path, scratch: Path, *, cpu: bool,
    gpus: Sequence[int], left: Callable[[], float], quiet: Quiet,
) -> dict[str, Any]:  # fmt: skip
    """Everything one engine is asked; kept in ``scratch`` for a later call. Raises ServedFailed."""
    try:
        return _ask(name, text, model, scratch, cpu, gpus, left, quiet)
    finally:
        quiet.leave(name)


def _ask(
    name: str, text: Mapping[str, Any], model: Path, scratch: Path, cpu: bool,
    gpus: Sequence[int], left: Callable[[], float], quiet: Quiet,
) -> dict[str, Any]:  # fmt: skip
    kept = scratch / f"{name}.answers.json"
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    engine, place = SERVED[name], scratch / name
    began = time.monotonic()
    chosen = settings(place, engine.draft, cpu)
    deployment = planned(chosen, model, place, tp=engine.tp, cpu=cpu, gpus=gpus)
    with serving(deployment, place, max(1.0, left())) as (pair, start):
        pair.call("probe_rows")
        answers: dict[str, Any] = {
            "classes": pair.call("probe_classes"),
            "places": pair.call("probe_place"),
            "replies": [pair.complete(p, REPLY) for p in engines.prompts(text)],
            "nexts": [pair.complete(p, 1) for p in contexts(text)],
            "rows": pair.call("probe_rows"),
        }
        warm = engines.tokens(text, 12, 900)
        pair.complete(warm, SHORT, logprobs=False)
        with quiet.alone(name, max(1.0, left())):
            lengths = (SHORT, LONG)
            timed = {n: pair.complete(warm, n, logprobs=False)["seconds"] for n in lengths}
            pair.call("probe_collectives", True)
            pair.complete(warm, LONG, logprobs=False)
            answers["collectives"] = pair.call("probe_collectives", False)
        answers["timed"] = {str(n): seconds for n, seconds in timed.items()}
        answers["engram"] = pair.call("probe_engram")
    answers["seconds"] = {"start": start, "whole": time.monotonic() - began}
    kept.write_text(json.dumps(answers))
    return answers
