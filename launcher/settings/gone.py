"""Keys of earlier two-Spark kits that mean nothing here, each with the reason.

A `.env` that still names one is refused with that reason rather than with a guess at a typo.
"""

from __future__ import annotations

_KERNELS = "a switch of other kernels; ours choose by shape"
_FIXED_PATH = "a path inside the image, fixed now"
_ENGRAM = "part of the other row store; ours has DSV41_IO_THREADS and DSV41_CACHE_GIB"

GONE: dict[str, str] = {
    "TP": "always 2, one rank a node",
    "NNODES": "always 2",
    "KV_CACHE_DTYPE": "vLLM chooses the only layout that this model has",
    "CHAT_TEMPLATE": "prompts are rendered by the deepseek_v41 encoder, not by a template",
    "CHAT_TEMPLATE_HOST": "prompts are rendered by the deepseek_v41 encoder, not by a template",
    "MODEL_DIR": _FIXED_PATH,
    "ENGRAM_MOUNT": _FIXED_PATH,
    "PACKED_MOUNT": _FIXED_PATH,
    "EXPECTED_SHARDS": "the manifest lists every file with its size",
    "ENGRAM_SHARDS": "the manifest lists every file with its size",
    "NFS_SHARE": "WEIGHT_SYNC says whether anything is exported",
    "HF_EXPORT_ROOT": "another project's exporter is never adopted; see NFS_EXPORT_ROOT",
    "HEAD_ENGRAM_ZFS_MOUNT": "read from the dataset",
    "USE_HOST_NCCL": "the image's NCCL is the one that was tested",
    "NCCL_HOST_DIR": "the image's NCCL is the one that was tested",
    "WORKER_NCCL_HOST_DIR": "the image's NCCL is the one that was tested",
    "NCCL_SO_NAME": "the image's NCCL is the one that was tested",
    "EXL3_FUSED_MOE": _KERNELS,
    "EXL3_MOE_ROW_TILE": _KERNELS,
    "EXL3_TEMP_ROWS_FUSED": _KERNELS,
    "EXL3_FAT_SORTED": _KERNELS,
    "EXL3_FAT_BATCHED": _KERNELS,
    "EXL3_FAT_KERNEL": _KERNELS,
    "EXL3_FAT_GROUPED": _KERNELS,
    "DSV41_EXL3_MOE_X": _KERNELS,
    "DSV41_COOPERATIVE_MOE": _KERNELS,
    "DSV41_RESIDENT_SCALES": _ENGRAM,
    "DSV41_CACHE_WAYS": _ENGRAM,
    "DSV41_ENGRAM_DISABLE": "a model without Engram answers wrongly",
    "DSV41_SKIP_MIXED_WARMUP": "vLLM's own warm-up runs as it is",
    "GLM53_SUPPRESS_STOPS_IN_REASONING": "no switch: stop strings are not to cut the reasoning",
    "GLM53_MIXED_PREFILL_CHUNK": "use LONG_PREFILL_TOKEN_THRESHOLD",
}
