"""`.env.example` and the README say what the table says; the file as it is changes nothing."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from pathlib import Path

from settings_root import settings_of

from launcher.settings import dotenv
from launcher.settings.example import example
from launcher.settings.gone import GONE
from launcher.settings.readme import BEGIN, END, block
from launcher.settings.table import TABLE

FILE = Path(__file__).resolve().parents[1] / ".env.example"


def test_the_file_is_what_the_table_makes() -> None:
    assert FILE.read_text(encoding="utf-8") == example(), (
        "run ./start.sh config --example > .env.example"
    )


def test_as_shipped_it_gives_the_defaults(tmp_path: Path) -> None:
    plain = {setting.key: resolved.value for setting, resolved in settings_of(tmp_path).items()}
    shipped = settings_of(tmp_path, example())
    assert {setting.key: resolved.value for setting, resolved in shipped.items()} == plain


def test_every_key_stands_in_it_once_and_only_one_shots_and_secrets_are_never_active() -> None:
    lines = [line.lstrip("#") for line in example().splitlines() if not line.startswith("# ")]
    named = [line.partition("=")[0] for line in lines if "=" in line]
    assert sorted(named) == sorted(TABLE)
    active = {entry.key for entry in dotenv.parse(example())[0]}
    assert active == {key for key, setting in TABLE.items() if setting.shown}
    assert not [key for key in active if TABLE[key].one_shot or TABLE[key].secret]


def test_uncommenting_every_line_is_legal_and_still_the_defaults(tmp_path: Path) -> None:
    text = "\n".join(
        line[1:] if line.startswith("#") and not line.startswith("# ") and line != "#" else line
        for line in example().splitlines()
    )
    everything = settings_of(tmp_path, text)
    plain = settings_of(tmp_path)
    assert [r.value for _, r in everything.items()] == [r.value for _, r in plain.items()]


def test_the_readme_has_every_key_and_those_that_are_gone() -> None:
    readme = (FILE.parent / "README.md").read_text(encoding="utf-8")
    begin, end = readme.index(BEGIN), readme.index(END) + len(END)
    assert readme[begin:end] == block(), (
        "run ./start.sh config --readme and put it between its marks in README.md"
    )


# Those that the kit before this one read, without aliases that differ in GLM53_ or DSV41_ only.
KIT = """
HEAD_IP WORKER_IP WORKER_USER WORKER_HOME WORKER_SSH HEAD_CX7_IF WORKER_CX7_IF HEAD_CX7_IB
WORKER_CX7_IB NCCL_IB_GID_INDEX HEAD_GID WORKER_GID MASTER_PORT PORT TP NNODES NCCL_DEBUG
NCCL_DEBUG_SUBSYS NCCL_CROSS_NIC NCCL_BUFFSIZE NCCL_LL128_BUFFSIZE NCCL_PROTO NCCL_MAX_NCHANNELS
USE_HOST_NCCL NCCL_HOST_DIR WORKER_NCCL_HOST_DIR NCCL_SO_NAME IMAGE GHCR_USER GHCR_TOKEN
IMAGE_PLATFORM IMAGE_SHIP IMAGE_SHIP_DIR WORKER_IMAGE_SHIP_DIR IMAGE_SHIP_KEEP BUILD SKIP_BUILD
SKIP_PULL PULL SKIP_SHIP SKIP_OVERLAY_VERIFY MODEL_HOST ENGRAM_DIR HF_MODEL_REPO HF_ENGRAM_REPO
AUTO_DOWNLOAD EXPECTED_SHARDS ENGRAM_SHARDS HF_MAX_WORKERS HF_HUB_ENABLE_HF_TRANSFER CACHE_ROOT
ENGRAM_SRC WEIGHT_SYNC NFS_SHARE NFS_VOLUME_MODEL NFS_VOLUME_ENGRAM NFS_EXPORT_MODEL
NFS_EXPORT_ENGRAM NFS_SERVER_IP NFS_CLIENTS NFS_IMAGE NFS_CONTAINER HF_EXPORT_ROOT NFS_EXPORT_ROOT
NFS_OPTS NFS_OPTS_CLIENT WORKER_MODEL_DIR WORKER_ENGRAM_DIR ZFS_POOL ZFS_HEAD_MODEL_DS
ZFS_HEAD_ENGRAM_DS ZFS_WORKER_MODEL_DS ZFS_WORKER_ENGRAM_DS ZFS_WORKER_IP ZFS_SSH ZFS_SNAP_PREFIX
HEAD_ENGRAM_ZFS_MOUNT FORCE_SYNC SKIP_SYNC HEAD_PACKED_DIR WORKER_PACKED_DIR PACKED_MOUNT
TRITON_HOST_CACHE TILELANG_HOST_CACHE WORKER_VLLM_CACHE WORKER_TRITON_CACHE WORKER_TILELANG_CACHE
SERVED_MODEL_NAME QUANTIZATION ENFORCE_EAGER MAX_MODEL_LEN MAX_NUM_SEQS MAX_NUM_BATCHED_TOKENS
LONG_PREFILL_TOKEN_THRESHOLD GPU_MEM_UTIL KV_CACHE_MEMORY_BYTES KV_BLOCK_SIZE KV_CACHE_DTYPE
SPEC_METHOD DSPARK_TOKENS LANGUAGE_MODEL_ONLY SKIP_MM_PROFILING LIMIT_MM CHAT_TEMPLATE
CHAT_TEMPLATE_HOST EXTRA_ARGS EXL3_FUSED_MOE EXL3_FAT_GROUPED EXL3_TEMP_ROWS_FUSED EXL3_FAT_KERNEL
EXL3_FAT_SORTED EXL3_FAT_BATCHED EXL3_MOE_ROW_TILE DSV41_EXL3_MOE_X DSV41_CACHE_GIB
DSV41_RESIDENT_SCALES DSV41_IO_THREADS DSV41_CACHE_WAYS DSV41_STATS_SECONDS DSV41_ENGRAM_DISABLE
DSV41_MEM_GUARD DSV41_MEM_GUARD_GIB DSV41_BOOT_MARGIN_GIB DSV41_DROP_PAGE_CACHE
DSV41_SKIP_MIXED_WARMUP DSV41_PREFILL_EMPTY_CACHE_TOKENS DSV41_PREFILL_EMPTY_CACHE_MEMAVAIL_GIB
DSV41_PREFILL_END_EMPTY_CACHE DSV41_INDEXER_PREFILL_FACTOR VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
PYTORCH_CUDA_ALLOC_CONF DSV41_EXL3_SERIAL_STREAMS VLLM_DISABLE_SHARED_EXPERTS_STREAM
GLM53_SUPPRESS_STOPS_IN_REASONING GLM53_MIXED_PREFILL_CHUNK GLM53_INDEXER_WORKSPACE
GLM53_SPINWAIT_MS VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS READY_TIMEOUT DSV41_HANG_SECONDS CG_ESTIMATE
VLLM_API_KEY DSV41_BOOT_SHAPE_WARMUP DSV41_WARMUP_REQ_TIMEOUT TORCH_CUDA_ARCH_LIST
FLASHINFER_CUDA_ARCH_LIST MODEL_DIR ENGRAM_MOUNT TAIL
"""


def test_every_key_of_the_kit_exists_or_is_gone_with_a_reason() -> None:
    assert not [key for key in KIT.split() if key not in TABLE and key not in GONE]
    assert not set(TABLE) & set(GONE)
