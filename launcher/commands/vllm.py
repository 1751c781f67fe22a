"""The argv of `vllm serve` for one rank of two. Pure."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Literal

from launcher.settings.values import Settings

# Decode batches of 1 to 4 requests with 1 to 6 tokens each.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 18, 24)
_WIDTHS = 16  # requests up to which every width has a graph of its own

_PARSER = "deepseek_v41"


@dataclass(frozen=True)
class RankPlace:
    """What differs between the ranks, or between sites, on the command line."""

    rank: int
    device: Literal["cpu", "cuda"]
    model_dir: str
    engram_dir: str
    master_addr: str
    master_port: int
    api_host: str
    api_port: int
    packed_dir: str = ""  # of this rank's packed rows; empty: there is none
    prepared_dir: str = ""  # of this rank's prepared weights; empty: there is none


def serve_arguments(settings: Settings, place: RankPlace) -> tuple[str, ...]:
    """`serve <model> …`, to be appended to the program that understands vLLM's subcommands.

    Both ranks get the same arguments but for the rank, its own directories, and the API's address
    (rank 0) or `--headless` (rank 1). No secret is among them, and no cache dtype or MoE backend:
    vLLM finds both from the checkpoint.
    """
    s = settings
    arguments = ["serve", place.model_dir, "--served-model-name", s.text("SERVED_MODEL_NAME")]
    if place.rank == 0:
        arguments += ["--host", place.api_host, "--port", str(place.api_port)]
    else:
        arguments += ["--headless"]
    arguments += [
        "--tensor-parallel-size", "2",
        "--nnodes", "2",
        "--node-rank", str(place.rank),
        "--master-addr", place.master_addr,
        "--master-port", str(place.master_port),
        "--distributed-executor-backend", "mp",
        "--tokenizer-mode", _PARSER,
        "--tool-call-parser", _PARSER,
        "--reasoning-parser", _PARSER,
        # By default the first request's schema would choose one for all that follow.
        "--structured-outputs-config.backend", "xgrammar",
        "--enable-auto-tool-choice",
        "--enable-prefix-caching",
        "--worker-cls", "spark_overlay.memory.worker.SparkWorker",
    ]  # fmt: skip
    arguments += _precision(s, place.device) + _sizes(s) + _graphs(s, place.device)
    if not s.flag("SWA_BOUNDED_REPLAY"):
        arguments += ["--no-swa-bounded-replay"]
    if s.text("SPEC_METHOD") == "dspark":
        draft = {"method": "dspark", "num_speculative_tokens": s.int("DSPARK_TOKENS")}
        arguments += ["--speculative-config", _json(draft)]
    arguments += _modalities(s)
    overlay = {
        "engram_dir": place.engram_dir,
        "engram_store": s.text("ENGRAM_STORE"),
        **({"engram_packed_dir": place.packed_dir} if place.packed_dir else {}),
        **({"weights_prepared_dir": place.prepared_dir} if place.prepared_dir else {}),
        "engram_io_threads": s.int("DSV41_IO_THREADS"),
        "engram_cache_gib": s.number("DSV41_CACHE_GIB"),
        "engram_stats_seconds": s.int("DSV41_STATS_SECONDS"),
        "api_sampling": s.text("API_SAMPLING"),
        **_memory(s),
    }
    arguments += ["--additional-config", _json({"spark_overlay": overlay})]
    return (*arguments, *_extra(s))


def _memory(s: Settings) -> dict[str, object]:
    factor = indexer_factor(s)
    return {
        "memory_drop_page_cache": s.flag("DSV41_DROP_PAGE_CACHE"),
        "memory_release_tokens": s.int("DSV41_PREFILL_EMPTY_CACHE_TOKENS"),
        "memory_release_below_gib": s.number("DSV41_PREFILL_EMPTY_CACHE_MEMAVAIL_GIB"),
        "memory_release_at_end": s.flag("DSV41_PREFILL_END_EMPTY_CACHE"),
        **({} if factor is None else {"indexer_prefill_factor": factor}),
    }


STOCK_INDEXER_FACTOR = 40  # vLLM's own


def indexer_factor(s: Settings) -> int | None:
    """Prompts of MAX_MODEL_LEN that the indexer's workspace holds; None: as vLLM has it, 40."""
    if (asked := s.maybe_int("DSV41_INDEXER_PREFILL_FACTOR")) is not None:
        return asked
    if s.text("GLM53_INDEXER_WORKSPACE") == "rightsize":
        return min(STOCK_INDEXER_FACTOR, s.int("MAX_NUM_SEQS"))
    return None


def _precision(s: Settings, device: str) -> list[str]:
    forced = ["--quantization", "exl3"] if s.text("QUANTIZATION") == "exl3" else []
    # On a CPU vLLM would take float32 for a checkpoint whose config names no dtype.
    return forced + (["--dtype", "bfloat16"] if device == "cpu" else [])


def _sizes(s: Settings) -> list[str]:
    sizes = [
        "--max-model-len", str(s.int("MAX_MODEL_LEN")),
        "--max-num-seqs", str(s.int("MAX_NUM_SEQS")),
        "--max-num-batched-tokens", str(s.int("MAX_NUM_BATCHED_TOKENS")),
    ]  # fmt: skip
    if (threshold := s.maybe_int("LONG_PREFILL_TOKEN_THRESHOLD")) is not None:
        sizes += ["--long-prefill-token-threshold", str(threshold)]
    sizes += ["--block-size", str(s.int("KV_BLOCK_SIZE"))]
    if (pool := s.maybe_int("KV_CACHE_MEMORY_BYTES")) is not None:
        sizes += ["--kv-cache-memory-bytes", str(pool)]
    return [*sizes, "--gpu-memory-utilization", s.text("GPU_MEM_UTIL")]


def _graphs(s: Settings, device: str) -> list[str]:
    autotune = ["--no-enable-flashinfer-autotune"] if device == "cuda" else []
    if s.flag("ENFORCE_EAGER"):
        return [*autotune, "--enforce-eager"]
    extra = _extra(s)
    if any(word.split("=")[0].replace("_", "-") in CAPTURE_OPTIONS for word in extra):
        return autotune
    return [*autotune, CAPTURE_OPTIONS[0], *map(str, capture_sizes(s))]


def capture_sizes(s: Settings) -> list[int]:
    """Tokens of the decode steps that get a CUDA graph: with DSpark k + 1 a request are verified,
    and a step whose width has no graph runs without one, or padded to the next."""
    width = s.int("DSPARK_TOKENS") + 1 if s.text("SPEC_METHOD") == "dspark" else 1
    requests = s.int("MAX_NUM_SEQS")
    widths = {n * width for n in range(1, min(requests, _WIDTHS) + 1)}
    return sorted({*_SIZES, *widths, requests * width})


CAPTURE_OPTIONS = ("--cudagraph-capture-sizes", "--max-cudagraph-capture-size")


def _modalities(s: Settings) -> list[str]:
    if s.flag("LANGUAGE_MODEL_ONLY"):
        return ["--language-model-only"]
    profiling = ["--skip-mm-profiling"] if s.flag("SKIP_MM_PROFILING") else []
    limits = _json(json.loads(s.text("LIMIT_MM")))
    return ["--mm-encoder-tp-mode", "data", "--limit-mm-per-prompt", limits, *profiling]


def _extra(s: Settings) -> list[str]:
    return shlex.split(s.text("EXTRA_ARGS"))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
