"""What is deployed: two ranks on two nodes, each with its argv, environment and ports. Pure.

The rehearsal (two processes on this machine) and the pair (two containers on two Sparks) differ
in the `Site` only; `deploy` is the one way from settings to what a rank is started with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from launcher.commands.vllm import RankPlace, serve_arguments
from launcher.settings.values import Settings

Role = Literal["head", "worker"]
Device = Literal["cpu", "cuda"]

# All that a rank inherits from the process that starts it; the rest of its environment is `env`.
PASS_THROUGH = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Place:
    """One rank's node as the rank sees it: inside its container, if it has one.

    program     the words before `serve`, such as a Python and `-m` a module.
    hcas        RoCE devices of the link, one a rail.
    gid_index   RoCE v2 GID index of all rails; None: NCCL finds each rail's own.
    packed_dir  packed Engram rows of this rank; empty: it reads from engram_dir.
    prepared_dir  prepared weights of this rank; empty: it reads its share of model_dir.
    """

    node: str
    role: Role
    host: str
    interface: str
    model_dir: str
    engram_dir: str
    program: tuple[str, ...]
    hcas: tuple[str, ...] = ()
    gid_index: int | None = None
    packed_dir: str = ""
    prepared_dir: str = ""


@dataclass(frozen=True)
class Site:
    """Where a deployment lives. `extra_env` adds variables that `deploy` does not set itself."""

    name: Literal["rehearsal", "pair"]
    device: Device
    head: Place
    worker: Place
    master_port: int
    api_host: str
    api_port: int
    cache_dir: str
    extra_env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rank:
    """One rank, ready for a runtime. `ports` are those it listens on, by name."""

    rank: int
    role: Role
    node: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    secret_env: Mapping[str, str] = field(repr=False)
    ports: Mapping[str, int]

    def process_env(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a plain process that `environ`'s owner starts."""
        inherited = {name: environ[name] for name in PASS_THROUGH if name in environ}
        return {**inherited, **self.env, **self.secret_env}


@dataclass(frozen=True)
class Deployment:
    """Both ranks. `fingerprint` is equal for two deployments that differ in `launch_id` only."""

    name: str
    launch_id: str
    ranks: tuple[Rank, Rank]
    served_model_name: str
    api_host: str
    api_port: int
    fingerprint: str

    def rank_of(self, role: Role) -> Rank:
        return self.ranks[0 if role == "head" else 1]


def deploy(settings: Settings, site: Site, launch_id: str) -> Deployment:
    """The deployment of `settings` at `site`; `launch_id` marks both ranks of one start."""
    if (site.head.role, site.worker.role) != ("head", "worker"):
        raise ValueError("a site has one head and one worker")
    ranks = (
        _rank(settings, site, site.head, 0, launch_id),
        _rank(settings, site, site.worker, 1, launch_id),
    )
    return Deployment(
        name=site.name,
        launch_id=launch_id,
        ranks=ranks,
        served_model_name=settings.text("SERVED_MODEL_NAME"),
        api_host=site.api_host,
        api_port=site.api_port,
        fingerprint=_fingerprint(site.name, ranks),
    )


def _rank(settings: Settings, site: Site, place: Place, rank: int, launch_id: str) -> Rank:
    arguments = serve_arguments(
        settings,
        RankPlace(
            rank=rank,
            device=site.device,
            model_dir=place.model_dir,
            engram_dir=place.engram_dir,
            packed_dir=place.packed_dir,
            prepared_dir=place.prepared_dir,
            master_addr=site.head.host,
            master_port=site.master_port,
            api_host=site.api_host,
            api_port=site.api_port,
        ),
    )
    env = {
        **_common_env(settings, site, place),
        **(_cuda_env(settings, place) if site.device == "cuda" else _cpu_env()),
        "SPARK_LAUNCH_ID": launch_id,
    }
    if clash := sorted(env.keys() & site.extra_env.keys()):
        raise ValueError(f"extra_env of the site must not set {', '.join(clash)}")
    key = settings.secret("VLLM_API_KEY")
    return Rank(
        rank=rank,
        role=place.role,
        node=place.node,
        argv=(*place.program, *arguments),
        env={**env, **site.extra_env},
        secret_env={"VLLM_API_KEY": key.reveal()} if key and rank == 0 else {},
        ports={"api": site.api_port, "master": site.master_port} if rank == 0 else {},
    )


def _common_env(settings: Settings, site: Site, place: Place) -> dict[str, str]:
    spin = settings.text("GLM53_SPINWAIT_MS")
    return {
        **({} if spin == "stock" else {"SPARK_SPINWAIT_MS": spin}),
        "VLLM_HOST_IP": place.host,
        "GLOO_SOCKET_IFNAME": place.interface,
        "NCCL_SOCKET_IFNAME": place.interface,
        "TP_SOCKET_IFNAME": place.interface,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": f"{site.cache_dir}/vllm",
        "TRITON_CACHE_DIR": f"{site.cache_dir}/triton",
        "TILELANG_CACHE_DIR": f"{site.cache_dir}/tilelang",
        # vLLM loads plugins that add routes only where they are named, and then only the named.
        "VLLM_PLUGINS": "spark_overlay",
        # vLLM forks by default; a forked child inherits the plugin's threads and patches half-made.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(
            settings.int("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS")
        ),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(settings.int("READY_TIMEOUT")),
    }


def _cpu_env() -> dict[str, str]:
    return {
        # triton reads this when it is imported, which is before any plugin of ours runs.
        "TRITON_INTERPRET": "1",
        # Two ranks share the cores: binding each to "its" cores would put both on the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def _cuda_env(settings: Settings, place: Place) -> dict[str, str]:
    if not place.hcas:
        raise ValueError(f"the {place.role} has no RoCE device: NCCL would take any, or none")
    # An empty index would be read as 0, the link-local GID; without one NCCL looks for an IPv4 GID.
    index = {} if place.gid_index is None else {"NCCL_IB_GID_INDEX": str(place.gid_index)}
    env = {
        # "=": these names and no others that begin like them.
        "NCCL_IB_HCA": "=" + ",".join(place.hcas),
        **index,
        "NCCL_IB_ADDR_FAMILY": "AF_INET",
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_ROCE_VERSION_NUM": "2",
        "NCCL_IB_MERGE_NICS": "0",
        "NCCL_NET": "IB",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_IGNORE_CPU_AFFINITY": "1",
        "CUDA_LAUNCH_BLOCKING": "0",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": str(int(settings.flag("CG_ESTIMATE"))),
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM": str(
            int(settings.flag("VLLM_DISABLE_SHARED_EXPERTS_STREAM"))
        ),
    }
    for key in (
        "NCCL_CROSS_NIC",
        "NCCL_BUFFSIZE",
        "NCCL_LL128_BUFFSIZE",
        "NCCL_MAX_NCHANNELS",
        "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
    ):
        env[key] = str(settings.int(key))
    for key in (
        "NCCL_DEBUG",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_PROTO",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_CUDA_ARCH_LIST",
        "FLASHINFER_CUDA_ARCH_LIST",
        "OVERLAY_ATTENTION",
    ):
        if text := settings.text(key):
            env[key] = text
    return env


# A GID index moves with link events; the pair that serves holds its connections all the same.
_OF_THE_MOMENT = ("SPARK_LAUNCH_ID", "NCCL_IB_GID_INDEX")


def _fingerprint(name: str, ranks: tuple[Rank, Rank]) -> str:
    """sha256 over everything a rank is started with, but for what differs at each look."""
    described = [
        {
            "node": rank.node,
            "argv": rank.argv,
            "env": {key: text for key, text in rank.env.items() if key not in _OF_THE_MOMENT},
            "secret_env": dict(rank.secret_env),
        }
        for rank in ranks
    ]
    canonical = json.dumps([name, described], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
