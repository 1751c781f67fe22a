"""Every name of vLLM that the overlay rebinds, in one list.

A hook names what it replaces, the parameters it expects there, what takes its place, why, and on
which device. ``install`` checks each before it touches any; a name that is gone or a signature that
moved is an error with vLLM's version, never a silent fallback. Registries that vLLM offers for this
(quantization, models, platform) are used in plugin.py and need no hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Literal

from spark_overlay.cpu.small import SMALL, slow
from spark_overlay.hook import Hook
from spark_overlay.stand_ins import STAND_INS, StandIn

RENDEZVOUS = Hook(
    "torch.distributed.rendezvous:_create_c10d_store",
    ("hostname", "port", "rank", "world_size", "timeout", "use_libuv"),
    "spark_overlay.serving.rendezvous:create_store",
    "torch's store listens on every interface, not on the address of the init method",
)

SPINWAIT = Hook(
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition",
    ("is_reader", "context", "notify_address", "busy_loop_s"),
    "spark_overlay.waiting:SpinCondition",
    "a reader of the ranks' queue spins for a second, which takes the cores of a small machine",
)
#: Needed before a model is imported, which installs the others.
EARLY = (RENDEZVOUS, SPINWAIT)


def _worker(name: str, parameters: str = "self") -> Hook:
    return Hook(
        f"vllm.v1.worker.gpu_worker:Worker.{name}",
        tuple(parameters.split()),
        f"spark_overlay.memory.worker:SparkWorker.{name}",
        "memory is told at each phase, and given back when a long prompt leaves little of it",
    )


#: Rebound nowhere: methods that our worker class (``--worker-cls``) overrides. It checks them when
#: it is imported.
WORKER = (
    _worker("init_device"),
    _worker("load_model", "self load_dummy_weights"),
    _worker("determine_available_memory"),
    _worker("initialize_from_config", "self kv_cache_config"),
    _worker("compile_or_warm_up_model"),
    _worker("execute_model", "self scheduler_output"),
)

_V41 = "vllm.models.deepseek_v41"
_MODEL, _DRAFT = f"{_V41}.nvidia.model", f"{_V41}.nvidia.dspark"
_ATTENTION, _COMPRESSOR = f"{_V41}.attention", f"{_V41}.compressor"
_MHC_OPS = f"{_V41}.nvidia.ops.mhc"

_PRE = (
    "residual fn hc_scale hc_base rms_eps hc_pre_eps hc_sinkhorn_eps hc_post_mult_value "
    "sinkhorn_repeat pre_mix x norm_weight norm_eps"
)
_FUSED = (
    "x residual post_layer_mix comb_res_mix fn hc_scale hc_base rms_eps hc_pre_eps hc_sinkhorn_eps "
    "hc_post_mult_value sinkhorn_repeat pre_mix norm_weight norm_eps capture_aux"
)
_INDEX_QUERIES = (
    "positions index_q index_q_cos_sin_cache index_weights index_weights_softmax_scale "
    "index_weights_head_scale use_fp4 weights_out_dtype"
)
_KEYS = (
    "k_pre positions cos_sin_cache rms_norm_weight rms_norm_eps k_cache kv_slot_mapping "
    "compress_ratio use_fp4_cache"
)
_LATENTS = "latent positions cos_sin_cache kv_cache slot_mapping compress_ratio fp8_scale"
_POST = "x residual post_layer_mix comb_res_mix"
_TILELANG = {
    "cpu": "vLLM's mHC kernels are TileLang, which compiles for GPUs only",
    "cuda": "vLLM's mHC kernels need TileLang, and DeepGEMM to be fast; ours need Triton and SM80",
}
_FP8_TYPE = (
    "vLLM's kernel converts to e4m3 by a type that Triton does not compile for SM80 and SM86; ours "
    "writes the same bytes by integers"
)


def _mhc(
    device: Literal["cpu", "cuda"], module: str, name: str, parameters: str, replacement: str
) -> Hook:
    return Hook(
        f"{module}:{name}",
        tuple(parameters.split()),
        f"spark_overlay.mhc.{'glue' if device == 'cpu' else 'kernels.ops'}:{replacement}",
        _TILELANG[device],
        device,
    )


HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_MODEL}:_select_dsv4_attn_cls",
        ("vllm_config",),
        "spark_overlay.attention.glue:attention_class",
        "vLLM's attention classes need FlashMLA or FlashInfer kernels (SM90, SM100, SM120 with "
        "128-token pages); ours runs on every device, and attention/select.py says which serves",
    ),
    *(
        Hook(
            f"{backend}.get_supported_kernel_block_sizes",
            ("kv_cache_spec",),
            "spark_overlay.attention.stock:page_sizes",
            "on SM12x vLLM offers pages of 128 only, which its own index kernels refuse there",
        )
        for backend in (
            f"{_V41}.sparse_mla:DeepseekV4SparseMLABackend",
            f"{_V41}.nvidia.flashinfer_sparse:DeepseekV4FlashInferMLASparseBackend",
            "vllm.v1.attention.backends.mla.indexer:DeepseekV41IndexerBackend",
        )
    ),
    Hook(
        f"{_V41}.nvidia.flashinfer_sparse:compute_global_topk_indices_and_lens",
        ("topk_indices", "token_to_req_indices", "block_table", "block_size", "is_valid_token"),
        "spark_overlay.attention.stock:bounded_topk",
        "vLLM loads the block table at any column an index names; beyond its width is no page",
    ),
    Hook(
        f"{_V41}.nvidia.flashmla:DeepseekV4FlashMLAAttention._get_prefill_num_heads",
        ("self",),
        "spark_overlay.attention.stock:padded_prefill_heads",
        "FlashMLA's prefill of 32 heads takes 1.65 times as long as of 64 on SM90",
        since=(0, 33),
    ),
    Hook(
        f"{_MODEL}:Engram",
        None,
        "spark_overlay.engram.glue:SparkEngram",
        "vLLM pins both Engram tables (189 GiB) in host memory; rows are read from files instead",
    ),
    Hook(
        f"{_MODEL}:ParallelLMHead",
        None,
        "spark_overlay.exl3.linear:SparkLMHead",
        "vLLM builds V4.1's lm_head without a quantization config; EXL3 packs it",
    ),
    Hook(
        f"{_DRAFT}:ParallelLMHead",
        None,
        "spark_overlay.exl3.linear:SparkLMHead",
        "the draft's head is the target's and must not be allocated unpacked",
    ),
    Hook(
        f"{_ATTENTION}:DeepseekV41IndexerBackend",
        None,
        "spark_overlay.indexer.glue:SparkIndexerBackend",
        "vLLM offers the index cache 128-token pages only; the GB10's pages have 64",
    ),
    Hook(
        f"{_ATTENTION}:fused_indexer_q_rope_quant",
        tuple(_INDEX_QUERIES.split()),
        "spark_overlay.indexer.glue:fused_indexer_q_rope_quant",
        "vLLM's kernel converts to float8e4nv, which Triton has from sm_89 on only",
    ),
    *(
        Hook(
            f"{module}:get_max_prefill_buffer_size",
            ("vllm_config",),
            "spark_overlay.memory.glue:get_max_prefill_buffer_size",
            "vLLM's indexer workspace holds 40 prompts of full length: 5 GB at a million tokens",
        )
        for module in (_ATTENTION, "vllm.v1.attention.backends.mla.indexer")
    ),
    Hook(
        "vllm.model_executor.model_loader.default_loader:safetensors_weights_iterator",
        ("hf_weights_files", "use_tqdm_on_load", "safetensors_load_strategy", "local_expert_ids"),
        "spark_overlay.memory.glue:safetensors_weights_iterator",
        "the checkpoint's page cache is memory that the GPU's driver cannot take back",
    ),
    *(
        hook
        for device in ("cpu", "cuda")
        for hook in (
            _mhc(device, _MODEL, "mhc_pre_delayed_tilelang", _PRE, "pre_delayed"),
            _mhc(device, _MODEL, "mhc_post_tilelang", _POST, "post"),
            _mhc(device, _DRAFT, "mhc_post_tilelang", _POST, "post"),
            _mhc(device, _MHC_OPS, "mhc_post_tilelang", _POST, "post"),
            _mhc(
                device,
                _MHC_OPS,
                "mhc_fused_post_pre_delayed_tilelang",
                _FUSED,
                "fused_post_pre_delayed",
            ),
        )
    ),
    _mhc("cpu", _MODEL, "hc_collapse_triton", "x pre_mix", "collapse_streams"),
    _mhc("cpu", _DRAFT, "hc_collapse_triton", "x pre_mix", "collapse_streams"),
    Hook(
        f"{_ATTENTION}:indexer_k_norm_rope_store",
        tuple(_KEYS.split()),
        "spark_overlay.attention.inserts.ops:indexer_k_norm_rope_store",
        _FP8_TYPE,
        "cuda",
    ),
    Hook(
        f"{_COMPRESSOR}:rope_quant_insert",
        tuple(_LATENTS.split()),
        "spark_overlay.attention.inserts.ops:rope_quant_insert",
        _FP8_TYPE,
        "cuda",
    ),
    Hook(
        "vllm.model_executor.layers.fused_moe.router.cpu_router:biased_topk_cpu",
        tuple(
            [
                "hidden_states",
                "gating_output",
                "correction_bias",
                "topk",
                "renormalize",
                "scoring_func",
                "num_fused_shared_experts",
                "routed_scaling_factor",
                "apply_routed_scaling_factor_on_output",
            ]
        ),
        "spark_overlay.router.glue:biased_top_k",
        "vLLM's C++ router is compiled for a few expert counts only, not for the draft's top-3",
        "cpu",
    ),
    Hook(
        "torch.cuda:is_current_stream_capturing",
        (),
        "spark_overlay.cpu.glue:not_capturing",
        "the question raises on a torch built without CUDA; nothing captures on a CPU",
        "cpu",
    ),
    Hook(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_triton",
        ("logits", "k", "p", "mask_value"),
        "spark_overlay.cpu.glue:top_k_top_p",
        "the interpreter cannot run its loop over rows, and the engine died of a chat's top_p",
        "cpu",
    ),
    slow(
        f"{_ATTENTION}:fused_q_kv_rmsnorm",
        "qr kv q_weight kv_weight eps",
        "spark_overlay.cpu.glue:fused_q_kv_rmsnorm",
    ),
    slow(
        f"{_ATTENTION}:indexer_k_norm_rope_store",
        _KEYS,
        "spark_overlay.cpu.glue:indexer_k_norm_rope_store",
    ),
    Hook(
        f"{_ATTENTION}:_fill_short_context_topk_indices",
        None,
        "spark_overlay.cpu.glue:fill_short_context",
        "a launch per token under the interpreter; the torch reference fills all at once",
        "cpu",
    ),
    slow(
        f"{_COMPRESSOR}:fused_save_compress_norm",
        "kv_score positions state_cache slot_mapping query_start_loc token_to_req_indices "
        "rms_norm_weight rms_norm_eps compress_ratio latent_out",
        "spark_overlay.cpu.glue:fused_save_compress_norm",
    ),
    slow(
        f"{_COMPRESSOR}:rope_quant_insert",
        _LATENTS,
        "spark_overlay.cpu.glue:rope_quant_insert",
    ),
    Hook(
        "vllm.model_executor.layers.activation:SiluAndMulWithClamp.forward_native",
        ("self", "x"),
        "spark_overlay.cpu.glue:clamped_swiglu",
        "vLLM's native form rounds to bf16 three times; on a GPU, and here, it is rounded once",
        "cpu",
    ),
    slow(
        "vllm.v1.worker.utils:KVBlockZeroer.zero_block_ids",
        "self block_ids",
        "spark_overlay.cpu.glue:zero_block_ids",
    ),
    *SMALL,
)


def for_device(hooks: Iterable[Hook], device: str) -> list[Hook]:
    """The hooks that apply on ``cpu``, on ``cuda``, or on a GPU whose kernels of vLLM's own stay
    (``stock``: arch.py)."""
    return [hook for hook in hooks if hook.device in ("any", device) and hook.serves()]


@cache
def install(device: str) -> None:
    """Check all hooks of a device, then apply them. Once per process; raises HookError before any
    change if one does not fit."""
    chosen: list[Hook | StandIn] = [*for_device(HOOKS, device)]
    if device == "cuda":
        chosen += STAND_INS
    for hook in chosen:
        hook.check()
    for hook in chosen:
        hook.apply()
