"""What is served, and how."""

from launcher.settings.setting import BYTES, Setting

KEYS = (
    Setting(
        "SERVED_MODEL_NAME",
        "serving",
        "word",
        "DeepSeek-v4.1-Flash-EXL3",
        "model name of the API",
        shown=True,
    ),
    Setting(
        "QUANTIZATION",
        "serving",
        "choice",
        "",
        "empty or none: as the checkpoint says; exl3 forces it",
        choices=("", "exl3", "none"),
    ),
    Setting("ENFORCE_EAGER", "serving", "flag", "0", "1 switches CUDA graphs off"),
    Setting(
        "MAX_MODEL_LEN",
        "serving",
        "integer",
        "600000",
        "tokens of one request, prompt and answer",
        limits=(1, 1048576),
        shown=True,
    ),
    Setting(
        "MAX_NUM_SEQS",
        "serving",
        "integer",
        "2",
        "requests decoded at once",
        limits=(1, 4096),
        shown=True,
    ),
    Setting(
        "MAX_NUM_BATCHED_TOKENS",
        "serving",
        "integer",
        "1024",
        "tokens of one prefill chunk; at least 1025 with images",
        limits=(1, 8388608),
        shown=True,
    ),
    Setting(
        "LONG_PREFILL_TOKEN_THRESHOLD",
        "serving",
        "optional integer",
        "",
        "tokens of a chunk one long prompt may take; keep 256 below MAX_NUM_BATCHED_TOKENS",
        limits=(1, 8388608),
    ),
    Setting(
        "GPU_MEM_UTIL",
        "serving",
        "utilisation",
        "0.88",
        "share of GPU memory vLLM may plan with; "
        "only a check at start while KV_CACHE_MEMORY_BYTES is set",
        shown=True,
    ),
    Setting(
        "KV_CACHE_MEMORY_BYTES",
        "serving",
        "optional integer",
        "2684354560",
        "KV pool of each rank in bytes; empty: vLLM measures",
        limits=BYTES,
        shown=True,
    ),
    Setting(
        "KV_BLOCK_SIZE",
        "serving",
        "integer",
        "64",
        "tokens of a KV block; 32 or 64 on SM12x",
        limits=(1, 1024),
    ),
    Setting(
        "SPEC_METHOD",
        "serving",
        "choice",
        "dspark",
        "speculative decoding with the checkpoint's own draft",
        choices=("dspark", "none"),
        shown=True,
    ),
    Setting(
        "DSPARK_TOKENS", "serving", "integer", "3", "draft tokens a step", limits=(1, 5), shown=True
    ),
    Setting(
        "SWA_BOUNDED_REPLAY",
        "serving",
        "flag",
        "1",
        "1: half the prefill, but answers from the prefix cache may differ in last bits; 0: exact",
    ),
    Setting(
        "LANGUAGE_MODEL_ONLY", "serving", "flag", "1", "1: text only, no vision weights", shown=True
    ),
    Setting(
        "SKIP_MM_PROFILING",
        "serving",
        "flag",
        "1",
        "with images: no profiling run of the vision tower",
    ),
    Setting("LIMIT_MM", "serving", "text", '{"image":100}', "with images: JSON limits of a prompt"),
    Setting(
        "API_SAMPLING",
        "serving",
        "choice",
        "official",
        "temperature and top_p of chats: as DeepSeek's API has them (while thinking 1.0 and at "
        "least 0.95), or as each request names them",
        choices=("official", "request"),
    ),
    Setting(
        "EXTRA_ARGS",
        "serving",
        "text",
        "",
        "more arguments of `vllm serve`, quoted as in a shell",
        shown=True,
    ),
    Setting(
        "PYTORCH_CUDA_ALLOC_CONF",
        "serving",
        "text",
        "expandable_segments:True",
        "torch's CUDA allocator",
    ),
    Setting(
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "serving",
        "flag",
        "1",
        "shared experts on the main stream; 0 is as safe: the overlay's EXL3 kernels share nothing"
        " between streams, and compute the shared expert with the routed ones",
    ),
    Setting(
        "DSV41_EXL3_SERIAL_STREAMS",
        "serving",
        "flag",
        "1",
        "the model's side streams folded into one; without effect: the overlay's EXL3 kernels run"
        " on any number of streams",
    ),
    Setting(
        "OVERLAY_ATTENTION",
        "serving",
        "choice",
        "",
        "attention on both GPUs; portable: the overlay's kernels; stock: vLLM's class (on a GB10"
        " FlashInfer); empty: what ./start.sh tune recorded, else stock where FlashInfer is",
        choices=("", "portable", "stock"),
    ),
    Setting(
        "GLM53_SPINWAIT_MS",
        "serving",
        "stock or integer",
        "stock",
        "busy wait on the ranks' shared-memory queue in ms; stock: as vLLM does",
        limits=(1, 1000),
        empty_is_default=False,
    ),
)
