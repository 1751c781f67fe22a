"""Unified memory."""

from launcher.settings.setting import Setting

KEYS = (
    Setting(
        "DSV41_BOOT_MARGIN_GIB",
        "memory",
        "decimal",
        "12",
        "GiB that must be free beyond the weights before a start",
        limits=(0, 1024),
    ),
    Setting(
        "DSV41_DROP_PAGE_CACHE",
        "memory",
        "flag",
        "1",
        "drop page cache before a start (where sudo asks for no password), and the weights' own"
        " while they are read",
    ),
    Setting(
        "DSV41_PREFILL_EMPTY_CACHE_TOKENS",
        "memory",
        "integer",
        "8192",
        "prompt length from which memory is released between chunks",
        limits=(1, 1048576),
    ),
    Setting(
        "DSV41_PREFILL_EMPTY_CACHE_MEMAVAIL_GIB",
        "memory",
        "decimal",
        "2.5",
        "… and only below this much MemAvailable; 0: always, which costs a fifth of the speed",
        limits=(0, 1024),
    ),
    Setting(
        "DSV41_PREFILL_END_EMPTY_CACHE",
        "memory",
        "flag",
        "0",
        "release once when a prompt is done",
    ),
    Setting(
        "GLM53_INDEXER_WORKSPACE",
        "memory",
        "choice",
        "stock",
        "indexer workspace: stock as vLLM, rightsize by MAX_NUM_SEQS",
        choices=("stock", "rightsize"),
        empty_is_default=False,
    ),
    Setting(
        "DSV41_INDEXER_PREFILL_FACTOR",
        "memory",
        "optional integer",
        "1",
        "rows of the indexer workspace in MAX_MODEL_LEN; vLLM's own is 40; empty: as"
        " GLM53_INDEXER_WORKSPACE says",
        limits=(1, 40),
    ),
    Setting(
        "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
        "memory",
        "integer",
        "256",
        "MiB of indexer logits",
        limits=(1, 65536),
    ),
    Setting(
        "DSV41_MEM_GUARD",
        "memory",
        "flag",
        "0",
        "a guard on each node that stops the server when memory runs out and the server took it",
    ),
    Setting(
        "DSV41_MEM_GUARD_GIB",
        "memory",
        "decimal",
        "1.5",
        "… below this much MemAvailable",
        limits=(0, 1024),
    ),
    Setting(
        "DSV41_MEM_GUARD_SAMPLES",
        "memory",
        "integer",
        "2",
        "… in so many looks in a row, a second apart, half a second once it is low",
        limits=(1, 600),
    ),
    Setting(
        "DSV41_MEM_GUARD_ANY",
        "memory",
        "flag",
        "0",
        "… whoever took it",
    ),
)
