"""Rules that need more than one setting, or more than a value's form. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from launcher.commands import nfs
from launcher.settings.secret import Secret
from launcher.settings.setting import Value

# Options of `vllm serve` that EXTRA_ARGS may not repeat: vLLM would silently take the last one,
# and what the launcher shows, checks and waits for would no longer be what runs.
_BY_SETTING = {
    "--host": "BIND",
    "--port": "PORT",
    "--api-key": "VLLM_API_KEY",
    "--served-model-name": "SERVED_MODEL_NAME",
    "--quantization": "QUANTIZATION",
    "-q": "QUANTIZATION",
    "--enforce-eager": "ENFORCE_EAGER",
    "--max-model-len": "MAX_MODEL_LEN",
    "--max-num-seqs": "MAX_NUM_SEQS",
    "--max-num-batched-tokens": "MAX_NUM_BATCHED_TOKENS",
    "--long-prefill-token-threshold": "LONG_PREFILL_TOKEN_THRESHOLD",
    "--gpu-memory-utilization": "GPU_MEM_UTIL",
    "--kv-cache-memory-bytes": "KV_CACHE_MEMORY_BYTES",
    "--block-size": "KV_BLOCK_SIZE",
    "--speculative-config": "SPEC_METHOD and DSPARK_TOKENS",
    "--spec-method": "SPEC_METHOD",
    "--spec-tokens": "DSPARK_TOKENS",
    "--language-model-only": "LANGUAGE_MODEL_ONLY",
    "--limit-mm-per-prompt": "LIMIT_MM",
    "--skip-mm-profiling": "SKIP_MM_PROFILING",
    "--master-port": "MASTER_PORT",
}
_FIXED = {
    "--tensor-parallel-size": "always 2",
    "-tp": "always 2",
    "--nnodes": "always 2",
    "-n": "always 2",
    "--node-rank": "the launcher gives each rank its own",
    "-r": "the launcher gives each rank its own",
    "--headless": "only rank 1 is headless",
    "--master-addr": "the head's address",
    "--distributed-executor-backend": "always mp",
    "--worker-cls": "the overlay's, which cares for memory",
    "--additional-config": "the launcher's own channel to the overlay",
    "--tokenizer-mode": "always deepseek_v41",
    "--tool-call-parser": "always deepseek_v41",
    "--reasoning-parser": "always deepseek_v41",
    "--structured-outputs-config.backend": "always xgrammar",
    "--enable-auto-tool-choice": "always on",
    "--enable-prefix-caching": "always on",
    "--mm-encoder-tp-mode": "always data",
    "--no-swa-bounded-replay": "set SWA_BOUNDED_REPLAY",
    "--kv-cache-dtype": "vLLM chooses the only layout that this model has",
}


# Who may read the weights over the network, and that nobody may write.
_NFS = {
    "NFS_CLIENTS": nfs.wrong_clients,
    "NFS_OPTS": nfs.wrong_options,
    "NFS_OPTS_CLIENT": nfs.wrong_mount,
}


def violations(values: Mapping[str, Value | Secret]) -> list[tuple[str, str]]:
    """Every broken rule: the key at fault and what to read after its name."""
    return [
        *(("BIND", message) for message in _exposure(values)),
        *(("EXTRA_ARGS", message) for message in _extra_args(values)),
        *(("LIMIT_MM", message) for message in _image_limits(values)),
        *((key, message) for key, wrong in _NFS.items() if (message := wrong(str(values[key])))),
    ]


def _exposure(values: Mapping[str, Value | Secret]) -> list[str]:
    bind = str(values["BIND"])
    if bind.startswith("127.") or values["VLLM_API_KEY"] or values["ALLOW_NO_AUTH"]:
        return []
    return [
        f"{bind} opens the API to the network without a key; set VLLM_API_KEY, or "
        "ALLOW_NO_AUTH=1 if that is meant"
    ]


def _extra_args(values: Mapping[str, Value | Secret]) -> list[str]:
    try:
        arguments = shlex.split(str(values["EXTRA_ARGS"]))
    except ValueError as problem:
        return [f"cannot be split into words: {str(problem).lower()}"]
    found = []
    seen: set[str] = set()
    for position, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        name, _, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in seen:
            found.append(f"gives {name} twice; vLLM would take the last without a word")
        seen.add(name)
        if name in _BY_SETTING:
            found.append(f"must not repeat {name}; set {_BY_SETTING[name]}")
        elif name in _FIXED:
            found.append(f"must not hold {name}: {_FIXED[name]}")
        elif name == "--moe-backend":
            backend = value or "".join(arguments[position + 1 : position + 2])
            if backend == "marlin":
                found.append("must not choose the marlin MoE backend: it cannot read EXL3 experts")
    return found


def _image_limits(values: Mapping[str, Value | Secret]) -> list[str]:
    if values["LANGUAGE_MODEL_ONLY"]:
        return []
    try:
        limits = json.loads(str(values["LIMIT_MM"]))
    except ValueError:
        limits = None
    if isinstance(limits, dict):
        return []
    return ['must be a JSON object such as {"image":100}']
