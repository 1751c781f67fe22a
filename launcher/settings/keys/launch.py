"""Start, waiting, compile targets, caches."""

from launcher.settings.setting import SECONDS, Setting

KEYS = (
    Setting(
        "READY_TIMEOUT",
        "launch",
        "integer",
        "1500",
        "seconds until the API must answer",
        limits=SECONDS,
    ),
    Setting(
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "launch",
        "integer",
        "1800",
        "seconds one step of the model may take",
        limits=SECONDS,
    ),
    Setting(
        "DSV41_HANG_SECONDS",
        "launch",
        "integer",
        "420",
        "seconds without progress that count as a hang",
        limits=SECONDS,
    ),
    Setting(
        "CG_ESTIMATE", "launch", "flag", "1", "vLLM counts CUDA graphs when it profiles memory"
    ),
    Setting("DSV41_BOOT_SHAPE_WARMUP", "launch", "flag", "1", "warm usual shapes after the start"),
    Setting(
        "DSV41_WARMUP_REQ_TIMEOUT",
        "launch",
        "integer",
        "240",
        "seconds of one warm-up request",
        limits=SECONDS,
    ),
    Setting("TAIL", "launch", "flag", "0", "follow the log once the API answers", one_shot=True),
    Setting(
        "CONTAINER_ULIMITS",
        "launch",
        "text",
        "memlock=-1 stack=67108864 core=0",
        "limits of both containers, name=value (soft and hard)",
    ),
    Setting("CONTAINER_HEAD", "launch", "word", "dsv41-exl3-head", "container of rank 0"),
    Setting("CONTAINER_WORKER", "launch", "word", "dsv41-exl3-worker", "container of rank 1"),
    Setting("TORCH_CUDA_ARCH_LIST", "launch", "text", "12.1a", "architecture of torch's builds"),
    Setting(
        "FLASHINFER_CUDA_ARCH_LIST",
        "launch",
        "text",
        "12.1a",
        "architecture of FlashInfer's builds",
    ),
    Setting(
        "CACHE_ROOT",
        "launch",
        "path",
        "~/.cache/vllm-dsv41-flash-exl3",
        "caches on each node",
    ),
    Setting("TRITON_HOST_CACHE", "launch", "path", "", "Triton's cache; empty: in CACHE_ROOT"),
    Setting("TILELANG_HOST_CACHE", "launch", "path", "", "TileLang's cache; empty: in CACHE_ROOT"),
    Setting("WORKER_VLLM_CACHE", "launch", "path", "", "on the worker; empty: in CACHE_ROOT"),
    Setting("WORKER_TRITON_CACHE", "launch", "path", "", "on the worker; empty: in CACHE_ROOT"),
    Setting("WORKER_TILELANG_CACHE", "launch", "path", "", "on the worker; empty: in CACHE_ROOT"),
)
