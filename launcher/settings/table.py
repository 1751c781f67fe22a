"""The one table of settings: a key's name, type, default, limits and meaning stand here only.

`.env.example`, the README's table, `config --explain` and the checks are all made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.settings import contract

Kind = Literal[
    "integer",  # int
    "optional integer",  # int | None, empty means none
    "flag",  # 0 or 1
    "choice",  # one of `choices`
    "utilisation",  # str, 0 < u <= 1, kept as typed
    "decimal",  # str, kept as typed
    "stock or integer",  # str
    "ipv4",  # str
    "text",  # str, anything
    "word",  # str, anything that does not start with '-'
    "path",  # str, relative to the repository, ~ is the home of the node it names
]
Value = int | str | None

GROUPS = {
    "nodes": "The two nodes and how they reach each other",
    "serving": "What is served, and how",
    "engram": "Engram tables",
    "weights": "Model files on both nodes",
    "image": "Container image",
    "network": "NCCL between the nodes",
    "memory": "Unified memory",
    "launch": "Start, waiting, compile targets, caches",
    "rehearsal": "The rehearsal on this machine",
}


@dataclass(frozen=True)
class Setting:
    """One key.

    default   as it would stand in `.env`; for most kinds an empty value means the default.
    limits    inclusive bounds of a number.
    reader    "now", or the number of the work item that will read the key; until then it is
              checked and shown, and changes nothing.
    one_shot  may come from the environment in front of the command, when `.env` does not name it.
    secret    never shown, never in argv.
    shown     stands uncommented in `.env.example`.
    """

    key: str
    group: str
    kind: Kind
    default: str
    meaning: str
    reader: str = "now"
    limits: tuple[int, int] = (0, 0)
    choices: tuple[str, ...] = ()
    one_shot: bool = False
    secret: bool = False
    shown: bool = False
    empty_is_default: bool = True

    def read(self, text: str) -> Value:
        """The value of `text`; raises contract.Violation."""
        if "\0" in text:
            raise contract.Violation("must not hold a NUL character")
        if text == "" and self.kind == "optional integer":
            return None
        if text == "" and self.empty_is_default:
            if self.default == "":
                return ""
            text = self.default
        match self.kind:
            case "integer" | "optional integer":
                return contract.integer(text, *self.limits)
            case "flag":
                return contract.flag(text)
            case "choice":
                return contract.choice(text, self.choices)
            case "utilisation":
                return contract.utilisation(text)
            case "decimal":
                return contract.decimal(text, *self.limits)
            case "stock or integer":
                return contract.stock_or_integer(text, *self.limits)
            case "ipv4":
                return contract.ipv4(text)
            case "word":
                return contract.word(text)
            case "text" | "path":
                return text

    @property
    def range_text(self) -> str:
        """The limits in words, empty where there are none."""
        match self.kind:
            case "integer" | "decimal":
                return f"{self.limits[0]}..{self.limits[1]}"
            case "optional integer":
                return f"{self.limits[0]}..{self.limits[1]} or empty"
            case "flag":
                return "0 or 1"
            case "choice":
                return " | ".join(c if c else "(empty)" for c in self.choices)
            case "utilisation":
                return "above 0, at most 1"
            case "stock or integer":
                return f"stock or {self.limits[0]}..{self.limits[1]}"
            case _:
                return ""


PORTS = (1, 65535)
SECONDS = (1, 604800)
BYTES = (1, 1 << 50)

_S = Setting
_NODES = (
    _S(
        "HEAD_IP",
        "nodes",
        "ipv4",
        "10.0.0.1",
        "address of this node on the CX7 link; rank 0 and the rendezvous",
        "03",
        shown=True,
    ),
    _S(
        "WORKER_IP",
        "nodes",
        "ipv4",
        "10.0.0.2",
        "address of the other node on the CX7 link; rank 1 and the ssh target",
        "03",
        shown=True,
    ),
    _S(
        "WORKER_USER",
        "nodes",
        "word",
        "",
        "account on the worker; empty: the same as here",
        "03",
        shown=True,
    ),
    _S(
        "WORKER_HOME", "nodes", "path", "", "home on the worker; empty: asked from the worker", "03"
    ),
    _S(
        "WORKER_SSH",
        "nodes",
        "word",
        "",
        "full ssh destination; empty: WORKER_USER@WORKER_IP",
        "03",
    ),
    _S(
        "HEAD_CX7_IF",
        "nodes",
        "word",
        "enp1s0f1np1",
        "network interface of the link, head",
        "03",
        shown=True,
    ),
    _S(
        "WORKER_CX7_IF",
        "nodes",
        "word",
        "enp1s0f0np0",
        "network interface of the link, worker",
        "03",
        shown=True,
    ),
    _S(
        "HEAD_CX7_IB",
        "nodes",
        "word",
        "rocep1s0f1",
        "RoCE device of the link, head",
        "03",
        shown=True,
    ),
    _S(
        "WORKER_CX7_IB",
        "nodes",
        "word",
        "rocep1s0f0",
        "RoCE device of the link, worker",
        "03",
        shown=True,
    ),
    _S(
        "NCCL_IB_GID_INDEX",
        "nodes",
        "integer",
        "3",
        "RoCE v2 GID index of both nodes",
        "03",
        (0, 255),
        shown=True,
    ),
    _S(
        "HEAD_GID",
        "nodes",
        "optional integer",
        "",
        "GID index of the head; empty: NCCL_IB_GID_INDEX",
        "03",
        (0, 255),
        shown=True,
    ),
    _S(
        "WORKER_GID",
        "nodes",
        "optional integer",
        "",
        "GID index of the worker; empty: NCCL_IB_GID_INDEX",
        "03",
        (0, 255),
        shown=True,
    ),
    _S("MASTER_PORT", "nodes", "integer", "29521", "rendezvous port on the head", "03", PORTS),
    _S("PORT", "nodes", "integer", "8888", "port of the API on the head", limits=PORTS, shown=True),
    _S(
        "BIND",
        "nodes",
        "ipv4",
        "127.0.0.1",
        "address the API listens on; 0.0.0.0 for the whole "
        "network needs VLLM_API_KEY or ALLOW_NO_AUTH=1",
        shown=True,
    ),
    _S("VLLM_API_KEY", "nodes", "text", "", "bearer token of /v1; /health stays open", secret=True),
    _S("ALLOW_NO_AUTH", "nodes", "flag", "0", "serve beyond this machine without a key"),
)
_SERVING = (
    _S(
        "SERVED_MODEL_NAME",
        "serving",
        "word",
        "DeepSeek-v4.1-Flash-EXL3",
        "model name of the API",
        shown=True,
    ),
    _S(
        "QUANTIZATION",
        "serving",
        "choice",
        "",
        "empty or none: as the checkpoint says; exl3 forces it",
        choices=("", "exl3", "none"),
    ),
    _S("ENFORCE_EAGER", "serving", "flag", "0", "1 switches CUDA graphs off"),
    _S(
        "MAX_MODEL_LEN",
        "serving",
        "integer",
        "600000",
        "tokens of one request, prompt and answer",
        limits=(1, 1048576),
        shown=True,
    ),
    _S(
        "MAX_NUM_SEQS",
        "serving",
        "integer",
        "2",
        "requests decoded at once",
        limits=(1, 4096),
        shown=True,
    ),
    _S(
        "MAX_NUM_BATCHED_TOKENS",
        "serving",
        "integer",
        "1024",
        "tokens of one prefill chunk; at least 1025 with images",
        limits=(1, 8388608),
        shown=True,
    ),
    _S(
        "LONG_PREFILL_TOKEN_THRESHOLD",
        "serving",
        "optional integer",
        "",
        "tokens of a chunk one long prompt may take; keep 256 below MAX_NUM_BATCHED_TOKENS",
        limits=(1, 8388608),
    ),
    _S(
        "GPU_MEM_UTIL",
        "serving",
        "utilisation",
        "0.88",
        "share of GPU memory vLLM may plan with; "
        "only a check at start while KV_CACHE_MEMORY_BYTES is set",
        shown=True,
    ),
    _S(
        "KV_CACHE_MEMORY_BYTES",
        "serving",
        "optional integer",
        "2684354560",
        "KV pool of each rank in bytes; empty: vLLM measures",
        limits=BYTES,
        shown=True,
    ),
    _S(
        "KV_BLOCK_SIZE",
        "serving",
        "integer",
        "64",
        "tokens of a KV block; 32 or 64 on SM12x",
        limits=(1, 1024),
    ),
    _S(
        "SPEC_METHOD",
        "serving",
        "choice",
        "dspark",
        "speculative decoding with the checkpoint's own draft",
        choices=("dspark", "none"),
        shown=True,
    ),
    _S(
        "DSPARK_TOKENS", "serving", "integer", "3", "draft tokens a step", limits=(1, 5), shown=True
    ),
    _S(
        "SWA_BOUNDED_REPLAY",
        "serving",
        "flag",
        "1",
        "1: half the prefill, but answers from the prefix cache may differ in last bits; 0: exact",
    ),
    _S(
        "LANGUAGE_MODEL_ONLY", "serving", "flag", "1", "1: text only, no vision weights", shown=True
    ),
    _S(
        "SKIP_MM_PROFILING",
        "serving",
        "flag",
        "1",
        "with images: no profiling run of the vision tower",
    ),
    _S("LIMIT_MM", "serving", "text", '{"image":100}', "with images: JSON limits of a prompt"),
    _S(
        "EXTRA_ARGS",
        "serving",
        "text",
        "",
        "more arguments of `vllm serve`, quoted as in a shell",
        shown=True,
    ),
    _S(
        "PYTORCH_CUDA_ALLOC_CONF",
        "serving",
        "text",
        "expandable_segments:True",
        "torch's CUDA allocator",
    ),
    _S(
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "serving",
        "flag",
        "1",
        "shared experts on the main stream; 0 can deadlock EXL3 kernels",
    ),
    _S(
        "DSV41_EXL3_SERIAL_STREAMS",
        "serving",
        "flag",
        "1",
        "the model's side streams folded into one; 0 can deadlock EXL3 kernels",
        "05",
    ),
    _S(
        "GLM53_SPINWAIT_MS",
        "serving",
        "stock or integer",
        "stock",
        "busy wait on the ranks' shared-memory queue in ms; stock: as vLLM does",
        "10",
        (1, 1000),
        empty_is_default=False,
    ),
)
_ENGRAM = (
    _S(
        "ENGRAM_STORE",
        "engram",
        "choice",
        "file",
        "file: rows are read when needed; memory: "
        "tables are loaded (95 GiB each for the real model)",
        choices=("file", "memory"),
    ),
    _S("DSV41_IO_THREADS", "engram", "integer", "32", "reads in flight", "09", (1, 1024)),
    _S("DSV41_CACHE_GIB", "engram", "decimal", "0", "row cache of a node", "09", (0, 1024)),
    _S(
        "DSV41_STATS_SECONDS",
        "engram",
        "integer",
        "60",
        "seconds between lines of read statistics; 0: none",
        "09",
        (0, 86400),
    ),
    _S(
        "HEAD_PACKED_DIR",
        "engram",
        "path",
        "~/dsv41-engram",
        "packed rows of rank 0 (`pack`)",
        "09",
    ),
    _S(
        "WORKER_PACKED_DIR",
        "engram",
        "path",
        "",
        "packed rows of rank 1; empty: as on the head",
        "09",
    ),
)
_WEIGHTS = (
    _S("MODEL_HOST", "weights", "path", "./model", "EXL3 checkpoint on the head", "04", shown=True),
    _S(
        "ENGRAM_DIR",
        "weights",
        "path",
        "./engram-src",
        "original shards 47 and 48, index and config.json; a whole original tree will do",
        "04",
        shown=True,
    ),
    _S(
        "HF_MODEL_REPO",
        "weights",
        "word",
        "Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw",
        "where the checkpoint comes from",
        "04",
    ),
    _S(
        "HF_ENGRAM_REPO",
        "weights",
        "word",
        "deepseek-ai/DeepSeek-V4.1-Flash",
        "where the Engram tables come from",
        "04",
    ),
    _S(
        "AUTO_DOWNLOAD",
        "weights",
        "flag",
        "1",
        "fetch what is missing at start; 0 only verifies",
        "04",
        shown=True,
    ),
    _S(
        "HF_MAX_WORKERS",
        "weights",
        "integer",
        "8",
        "files downloaded at once",
        "04",
        (1, 64),
        one_shot=True,
    ),
    _S("HF_HUB_ENABLE_HF_TRANSFER", "weights", "flag", "1", "fast download (today: hf-xet)", "04"),
    _S(
        "WEIGHT_SYNC",
        "weights",
        "choice",
        "nfs",
        "how the worker gets the files",
        "04",
        choices=("nfs", "share", "zfs", "rsync", "auto"),
        shown=True,
    ),
    _S(
        "SKIP_SYNC",
        "weights",
        "flag",
        "0",
        "trust what the worker has, after checking it",
        "04",
        one_shot=True,
    ),
    _S(
        "FORCE_SYNC",
        "weights",
        "flag",
        "0",
        "copy again even if nothing changed",
        "04",
        one_shot=True,
    ),
    _S("ENGRAM_SRC", "weights", "path", "", "slim Engram directory; empty: in CACHE_ROOT", "04"),
    _S("HOST_NFS", "weights", "flag", "0", "export with the head's own nfs-server", "04"),
    _S("NFS_SERVER_IP", "weights", "ipv4", "", "address the worker mounts; empty: found", "04"),
    _S("NFS_CLIENTS", "weights", "text", "", "who may mount; empty: the CX7 subnet", "04"),
    _S(
        "NFS_OPTS",
        "weights",
        "text",
        "ro,sync,no_subtree_check,root_squash,fsid=0,crossmnt",
        "options of the export",
        "04",
    ),
    _S(
        "NFS_OPTS_CLIENT",
        "weights",
        "text",
        "nfsvers=4.2,ro,nconnect=8,rsize=1048576,wsize=1048576,hard,timeo=600",
        "options of the mount",
        "04",
    ),
    _S("NFS_IMAGE", "weights", "word", "dsv41-exl3-nfs:local", "image of the exporter", "04"),
    _S("NFS_CONTAINER", "weights", "word", "dsv41-exl3-nfs", "name of the exporter", "04"),
    _S("NFS_EXPORT_ROOT", "weights", "path", "", "root of the export; empty: in CACHE_ROOT", "04"),
    _S(
        "NFS_EXPORT_MODEL",
        "weights",
        "word",
        "dsv41-exl3",
        "name of the checkpoint in the export",
        "04",
    ),
    _S(
        "NFS_EXPORT_ENGRAM",
        "weights",
        "word",
        "dsv41-engram",
        "name of the tables in the export",
        "04",
    ),
    _S(
        "NFS_VOLUME_MODEL",
        "weights",
        "word",
        "dsv41-exl3-weights",
        "Docker volume on the worker",
        "04",
    ),
    _S(
        "NFS_VOLUME_ENGRAM",
        "weights",
        "word",
        "dsv41-exl3-engram",
        "Docker volume on the worker",
        "04",
    ),
    _S(
        "WORKER_MODEL_DIR",
        "weights",
        "path",
        "~/.cache/dsv41-flash-exl3/model",
        "copy on the worker (zfs, rsync)",
        "04",
    ),
    _S(
        "WORKER_ENGRAM_DIR",
        "weights",
        "path",
        "~/.cache/dsv41-flash-exl3/engram-src",
        "copy on the worker (zfs, rsync)",
        "04",
    ),
    _S("ZFS_POOL", "weights", "word", "models", "pool on both nodes", "04"),
    _S("ZFS_HEAD_MODEL_DS", "weights", "word", "", "dataset; empty: ZFS_POOL/dsv41-exl3", "04"),
    _S("ZFS_HEAD_ENGRAM_DS", "weights", "word", "", "dataset; empty: ZFS_POOL/dsv41-engram", "04"),
    _S("ZFS_WORKER_MODEL_DS", "weights", "word", "", "dataset; empty: as on the head", "04"),
    _S("ZFS_WORKER_ENGRAM_DS", "weights", "word", "", "dataset; empty: as on the head", "04"),
    _S("ZFS_WORKER_IP", "weights", "ipv4", "", "address for the stream; empty: WORKER_IP", "04"),
    _S("ZFS_SSH", "weights", "word", "", "ssh destination for the stream; empty: WORKER_SSH", "04"),
    _S("ZFS_SNAP_PREFIX", "weights", "word", "dsv41-sync", "prefix of our snapshots", "04"),
)
_IMAGE = (
    _S(
        "IMAGE",
        "image",
        "word",
        "ghcr.io/miaai-lab/deepseek-v4.1-flash-exl3-2x-dgx-sparks:2.9bpw",
        "image of both ranks",
        "04",
        shown=True,
    ),
    _S("BUILD", "image", "flag", "0", "build here, always", "04", one_shot=True),
    _S(
        "SKIP_BUILD",
        "image",
        "flag",
        "0",
        "keep an image whose recipe differs",
        "04",
        one_shot=True,
    ),
    _S("PULL", "image", "flag", "0", "pull again even if the recipe is equal", "04", one_shot=True),
    _S("SKIP_PULL", "image", "flag", "0", "do not ask the registry", "04", one_shot=True),
    _S(
        "SKIP_SHIP",
        "image",
        "flag",
        "0",
        "do not copy the image to the worker",
        "04",
        one_shot=True,
    ),
    _S(
        "SKIP_OVERLAY_VERIFY",
        "image",
        "flag",
        "0",
        "no self-check of the image on the GPUs",
        "04",
        one_shot=True,
    ),
    _S(
        "IMAGE_PLATFORM",
        "image",
        "word",
        "",
        "os/architecture; empty: as inspected",
        "04",
        one_shot=True,
    ),
    _S("GHCR_USER", "image", "word", "MiaAI-Lab", "account of the registry login", "04"),
    _S(
        "GHCR_TOKEN",
        "image",
        "text",
        "",
        "token of the registry login",
        "04",
        one_shot=True,
        secret=True,
    ),
    _S(
        "IMAGE_SHIP",
        "image",
        "choice",
        "rsync",
        "how the image reaches the worker",
        "04",
        choices=("rsync", "stream", "auto"),
    ),
    _S(
        "IMAGE_SHIP_DIR", "image", "path", "", "where the tar is staged; empty: in CACHE_ROOT", "04"
    ),
    _S("WORKER_IMAGE_SHIP_DIR", "image", "path", "/tmp", "where the tar lands on the worker", "04"),
    _S("IMAGE_SHIP_KEEP", "image", "flag", "0", "keep the staged tar", "04"),
)
_NETWORK = (
    _S(
        "NCCL_DEBUG",
        "network",
        "choice",
        "WARN",
        "verbosity",
        choices=("VERSION", "WARN", "INFO", "TRACE"),
    ),
    _S("NCCL_DEBUG_SUBSYS", "network", "text", "", "subsystems of NCCL_DEBUG=INFO"),
    _S("NCCL_CROSS_NIC", "network", "integer", "0", "rings over different NICs", limits=(0, 2)),
    _S(
        "NCCL_BUFFSIZE",
        "network",
        "integer",
        "1048576",
        "bytes of a channel buffer; they are pinned and thus GPU memory",
        limits=BYTES,
    ),
    _S(
        "NCCL_LL128_BUFFSIZE",
        "network",
        "integer",
        "262144",
        "bytes of an LL128 buffer",
        limits=BYTES,
    ),
    _S("NCCL_PROTO", "network", "text", "^LL128", "protocols"),
    _S("NCCL_MAX_NCHANNELS", "network", "integer", "8", "channels", limits=(1, 64)),
)
_MEMORY = (
    _S(
        "DSV41_BOOT_MARGIN_GIB",
        "memory",
        "decimal",
        "12",
        "GiB that must be free beyond the weights before a start",
        "03",
        (0, 1024),
    ),
    _S(
        "DSV41_DROP_PAGE_CACHE",
        "memory",
        "flag",
        "1",
        "drop the weights' page cache after loading",
        "10",
    ),
    _S(
        "DSV41_PREFILL_EMPTY_CACHE_TOKENS",
        "memory",
        "integer",
        "8192",
        "prompt length from which memory is released between chunks",
        "10",
        (1, 1048576),
    ),
    _S(
        "DSV41_PREFILL_EMPTY_CACHE_MEMAVAIL_GIB",
        "memory",
        "decimal",
        "2.5",
        "… and only below this much MemAvailable",
        "10",
        (0, 1024),
    ),
    _S(
        "DSV41_PREFILL_END_EMPTY_CACHE",
        "memory",
        "flag",
        "0",
        "release once when a prompt is done",
        "10",
    ),
    _S(
        "GLM53_INDEXER_WORKSPACE",
        "memory",
        "choice",
        "stock",
        "indexer workspace: stock as vLLM, rightsize by MAX_NUM_SEQS",
        "10",
        choices=("stock", "rightsize"),
        empty_is_default=False,
    ),
    _S(
        "DSV41_INDEXER_PREFILL_FACTOR",
        "memory",
        "optional integer",
        "",
        "rows of the indexer workspace in MAX_MODEL_LEN; vLLM's own is 40",
        "10",
        (1, 40),
    ),
    _S(
        "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
        "memory",
        "integer",
        "256",
        "MiB of indexer logits",
        limits=(1, 65536),
    ),
    _S("DSV41_MEM_GUARD", "memory", "flag", "0", "stop our own server when memory runs out", "10"),
    _S(
        "DSV41_MEM_GUARD_GIB",
        "memory",
        "decimal",
        "1.5",
        "… below this much MemAvailable",
        "10",
        (0, 1024),
    ),
)
_LAUNCH = (
    _S(
        "READY_TIMEOUT",
        "launch",
        "integer",
        "1500",
        "seconds until the API must answer",
        limits=SECONDS,
    ),
    _S(
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "launch",
        "integer",
        "1800",
        "seconds one step of the model may take",
        limits=SECONDS,
    ),
    _S(
        "DSV41_HANG_SECONDS",
        "launch",
        "integer",
        "420",
        "seconds without progress that count as a hang",
        "03",
        SECONDS,
    ),
    _S("CG_ESTIMATE", "launch", "flag", "1", "vLLM counts CUDA graphs when it profiles memory"),
    _S("DSV41_BOOT_SHAPE_WARMUP", "launch", "flag", "1", "warm usual shapes after the start", "03"),
    _S(
        "DSV41_WARMUP_REQ_TIMEOUT",
        "launch",
        "integer",
        "240",
        "seconds of one warm-up request",
        "03",
        SECONDS,
    ),
    _S("TAIL", "launch", "flag", "0", "follow the log once the API answers", one_shot=True),
    _S("CONTAINER_HEAD", "launch", "word", "dsv41-exl3-head", "container of rank 0", "03"),
    _S("CONTAINER_WORKER", "launch", "word", "dsv41-exl3-worker", "container of rank 1", "03"),
    _S("TORCH_CUDA_ARCH_LIST", "launch", "text", "12.1a", "architecture of torch's builds"),
    _S(
        "FLASHINFER_CUDA_ARCH_LIST",
        "launch",
        "text",
        "12.1a",
        "architecture of FlashInfer's builds",
    ),
    _S(
        "CACHE_ROOT",
        "launch",
        "path",
        "~/.cache/vllm-dsv41-flash-exl3",
        "caches on each node",
        "03",
    ),
    _S("TRITON_HOST_CACHE", "launch", "path", "", "Triton's cache; empty: in CACHE_ROOT", "03"),
    _S("TILELANG_HOST_CACHE", "launch", "path", "", "TileLang's cache; empty: in CACHE_ROOT", "03"),
    _S("WORKER_VLLM_CACHE", "launch", "path", "", "on the worker; empty: in CACHE_ROOT", "03"),
    _S("WORKER_TRITON_CACHE", "launch", "path", "", "on the worker; empty: in CACHE_ROOT", "03"),
    _S("WORKER_TILELANG_CACHE", "launch", "path", "", "on the worker; empty: in CACHE_ROOT", "03"),
)
_REHEARSAL = (
    _S(
        "REHEARSAL_DIR",
        "rehearsal",
        "path",
        ".rehearsal",
        "engine, checkpoint and tables of `rehearse`, some 8 GB",
    ),
)

TABLE: dict[str, Setting] = {
    setting.key: setting
    for setting in (
        *_NODES,
        *_SERVING,
        *_ENGRAM,
        *_WEIGHTS,
        *_IMAGE,
        *_NETWORK,
        *_MEMORY,
        *_LAUNCH,
        *_REHEARSAL,
    )
}
