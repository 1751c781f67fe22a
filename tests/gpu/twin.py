"""vLLM's own V4.1 in which every Engram layer computes twice: over its pinned table and over ours.

A general plugin of the engines that compare them (see engines.py). Two runs of stock vLLM do not
leave the same bits, so both layers get what one step gives: the same ids, the same streams, in the
same graph. The rest of the overlay stays out.
"""

from __future__ import annotations


def register() -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model("DeepseekV41ForCausalLM", "gpu.twin_model:Twinned")
