"""The platform vLLM runs on where there is no GPU: its own CPU platform, opened for V4.1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SparkCpuPlatform(CpuPlatform):
    """Keeps what vLLM's CPU platform would take from V4.1: its block size, chunked prefill and
    prefix cache (it knows only dense MLA), and switches off what needs a GPU driver."""

    # Inductor would ask Triton's driver for a target; the interpreter has none.
    simple_compile_backend = "eager"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        if model is None or getattr(model.hf_config, "model_type", None) != "deepseek_v41":
            super().check_and_update_config(vllm_config)
            return
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        block_size = cache.block_size if cache.user_specified_block_size else 128
        kept = (
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        )
        super().check_and_update_config(vllm_config)
        cache.block_size = block_size
        (
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        ) = kept
        vllm_config.kernel_config.enable_jit_warmup = False
        if vllm_config.engram_config is not None:
            vllm_config.engram_config.cpu_offload = False
            vllm_config.engram_config.dp_shared_memory = False
