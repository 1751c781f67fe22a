"""vLLM's own V4.1, tapped; where SPARK_GPU_ENGRAM is "file", with our Engram layer and no more.

A general plugin of the engines that are compared (see engines.py). The rest of the overlay stays
out: its attention is another one, and what differs must be the tables' alone.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "SPARK_GPU_ENGRAM"


def register() -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model("DeepseekV41ForCausalLM", "gpu.tapped_model:Tapped")


def ours() -> bool:
    return os.environ[VARIABLE] == "file"


def use_our_engram() -> None:
    """The one hook of the overlay that is wanted."""
    from spark_overlay import hooks

    (hook,) = (h for h in hooks.HOOKS if h.replacement.endswith(":SparkEngram"))
    hook.check()
    hook.apply()


def without_tables(weights: Any) -> Any:
    from spark_overlay.engram.source import is_table_tensor

    return ((name, tensor) for name, tensor in weights if not is_table_tensor(name))
