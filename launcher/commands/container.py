"""The container of one rank: what Docker is told, from a rank and what is known of its node. Pure.

Inside, both nodes look alike (`MODEL`, `ENGRAM`, `CACHE`), so that the ranks' arguments differ in
what must differ only. No secret is in a container's arguments, environment or labels: it is in a
file that is mounted (see `SECRET_ENV`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from launcher.commands.nfs import Volume
from launcher.deployment import Rank, Role
from launcher.errors import UsageError
from launcher.settings.values import Settings

MODEL, ENGRAM, CACHE = "/model", "/engram-src", "/cache"
PACKED = "/engram-packed"
SECRET_ENV = "/run/spark/secret.env"
SECRETS = "dsv41-secrets"  # in the cache root: a folder an owner, in it one a launch
SECRET_VARIABLE = "SPARK_SECRET_ENV"  # names the file to the overlay's serve

LAUNCH, ROLE = "dsv41.launch", "dsv41.role"
OWNER, FINGERPRINT = "dsv41.owner", "dsv41.fingerprint"

STOP_TIMEOUT = 60  # seconds that Docker itself gives it, when it is not the launcher who stops


@dataclass(frozen=True)
class Mount:
    """A path of the node; with ``volume`` that volume, whose name ``source`` is then."""

    source: str
    target: str
    read_only: bool = True
    volume: Volume | None = None

    def __post_init__(self) -> None:
        if self.volume is not None:
            if self.source != self.volume.name or not self.target.startswith("/"):
                raise ValueError(f"{self.source!r} on {self.target!r} is not {self.volume.name}")
            if self.volume.options.get("type") != "nfs" or not self.read_only:
                raise ValueError(f"volume {self.source!r} is not of type nfs, to be read only")
            return
        # Docker takes a source without a slash for the name of a volume, which it makes, empty.
        if not self.source.startswith("/") or not self.target.startswith("/"):
            raise ValueError(f"a mount needs absolute paths: {self.source!r} on {self.target!r}")

    def told(self) -> dict[str, Any]:
        """As Docker's API has it. Of type "bind" a missing source is an error; a missing volume
        would be made, so it goes with its options: it can never be an empty one."""
        told: dict[str, Any] = {
            "Type": "bind" if self.volume is None else "volume",
            "Source": self.source,
            "Target": self.target,
            "ReadOnly": self.read_only,
        }
        if self.volume is not None:
            driver = {"Name": "local", "Options": dict(self.volume.options)}
            told["VolumeOptions"] = {"NoCopy": True, "DriverConfig": driver}
        return told


@dataclass(frozen=True)
class Ulimit:
    name: str
    soft: int
    hard: int


@dataclass(frozen=True)
class NodePlace:
    """What a rank's container takes from its node; paths are the node's, absolute.

    devices  device nodes that exist there and that the container gets.
    mounts   beside the model, the tables and the caches.
    packed_dir  packed rows; empty: the rank has none.
    volumes  mounted in place of model_dir and engram_dir: made and proven by the weights step.
    """

    model_dir: str
    engram_dir: str
    cache_root: str
    vllm_cache: str = ""  # empty: in cache_root, as the next two
    triton_cache: str = ""
    tilelang_cache: str = ""
    devices: tuple[str, ...] = ()
    gpus: bool = True
    mounts: tuple[Mount, ...] = ()
    packed_dir: str = ""
    volumes: Mapping[Literal["model", "engram"], Volume] = field(default_factory=dict)

    def mount_of(self, what: Literal["model", "engram"]) -> Mount:
        """Of the checkpoint or the tables, at its place in a container."""
        path, target = {"model": (self.model_dir, MODEL), "engram": (self.engram_dir, ENGRAM)}[what]
        volume = self.volumes.get(what)
        return Mount(path, target) if volume is None else Mount(volume.name, target, True, volume)


@dataclass(frozen=True)
class Container:
    """One container, ready to be made. `secret_file` is on the node, empty without secrets.

    aside  it serves nothing: no network, no memory shared with others, no capability.
    """

    name: str
    image: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    labels: Mapping[str, str]
    mounts: tuple[Mount, ...]
    devices: tuple[str, ...]
    gpus: bool
    ulimits: tuple[Ulimit, ...]
    secret_file: str = ""
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    aside: bool = False

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the Docker SDK's `create_container`, but for the host's part."""
        return {
            "image": self.image,
            "name": self.name,
            # Whatever the image would start, or add to what is started, is not wanted.
            "entrypoint": [self.argv[0]],
            "command": list(self.argv[1:]),
            "environment": dict(self.env),
            "labels": dict(self.labels),
            "stop_timeout": STOP_TIMEOUT,
            "healthcheck": {"test": ["NONE"]},
        }

    def host(self) -> dict[str, Any]:
        """Keyword arguments of the Docker SDK's `create_host_config`."""
        limits = [{"name": one.name, "soft": one.soft, "hard": one.hard} for one in self.ulimits]
        every_gpu = [{"count": -1, "capabilities": [["gpu"]]}]
        return {
            "network_mode": "none" if self.aside else "host",
            "ipc_mode": "private" if self.aside else "host",
            # A private /dev/shm all the same: what the ranks of a node leave there, however they
            # end, goes with the container. With the host's it would stay and hold memory.
            "tmpfs": {"/dev/shm": "rw,nosuid,nodev,mode=1777"},
            "init": True,
            # The kernel cannot see whose the GPU's memory is: it shall end the rank first.
            "oom_score_adj": 1000,
            "cap_add": [] if self.aside else ["SYS_PTRACE", "IPC_LOCK"],
            "ulimits": limits,
            # Named one by one beside `gpus`: the access that the GPU hook grants is lost when
            # systemd reloads.
            "devices": [f"{path}:{path}:rwm" for path in self.devices],
            "device_requests": every_gpu if self.gpus else [],
            "mounts": [mount.told() for mount in self.mounts],
            "restart_policy": {"Name": "no"},
            # Its log is read through Docker, so it must be of a kind that can be read.
            "log_config": {"type": "json-file", "config": {"max-size": "64m", "max-file": "4"}},
        }

    def writable(self) -> tuple[str, ...]:
        """Directories of the node that must be made before."""
        return tuple(mount.source for mount in self.mounts if not mount.read_only)

    def secret_text(self) -> bytes:
        """The file of `secret_file`: a NAME=value a line, values as JSON strings."""
        rows = (f"{name}={json.dumps(value)}\n" for name, value in self.secret_env.items())
        return "".join(rows).encode()


def container(
    rank: Rank, settings: Settings, place: NodePlace, *, owner: str, fingerprint: str = ""
) -> Container:
    """The container of `rank`. `owner` tells whose it is: the head's host name and the checkout."""
    launch_id = rank.env["SPARK_LAUNCH_ID"]
    cache = PurePosixPath(place.cache_root)
    vllm = place.vllm_cache or str(cache / "vllm")
    triton = place.triton_cache or str(cache / "triton")
    tilelang = place.tilelang_cache or str(cache / "tilelang")
    mounts = [
        place.mount_of("model"),
        place.mount_of("engram"),
        Mount(vllm, f"{CACHE}/vllm", read_only=False),
        Mount(triton, f"{CACHE}/triton", read_only=False),
        Mount(tilelang, f"{CACHE}/tilelang", read_only=False),
        Mount(str(cache / "flashinfer"), "/root/.cache/flashinfer", read_only=False),
        *([Mount(place.packed_dir, PACKED)] if place.packed_dir else []),
        *place.mounts,
    ]
    env = dict(rank.env)
    secret_file = ""
    if rank.secret_env:
        mark = hashlib.sha256(owner.encode()).hexdigest()[:12]
        secret_file = str(cache / SECRETS / mark / launch_id / "secret.env")
        mounts.append(Mount(secret_file, SECRET_ENV))
        env[SECRET_VARIABLE] = SECRET_ENV
    return Container(
        name=container_name(settings, rank.role),
        image=settings.text("IMAGE"),
        argv=rank.argv,
        env=env,
        labels={
            LAUNCH: launch_id,
            ROLE: rank.role,
            OWNER: owner,
            **({FINGERPRINT: fingerprint} if fingerprint else {}),
        },
        mounts=tuple(mounts),
        devices=place.devices,
        gpus=place.gpus,
        ulimits=_no_cores(ulimits(settings.text("CONTAINER_ULIMITS"))),
        secret_file=secret_file,
        secret_env=rank.secret_env,
    )


def _no_cores(limits: tuple[Ulimit, ...]) -> tuple[Ulimit, ...]:
    """A core file of a rank is as large as its weights: none, unless it was asked for by name."""
    if any(limit.name == "core" for limit in limits):
        return limits
    return (*limits, Ulimit("core", 0, 0))


def container_name(settings: Settings, role: Role) -> str:
    return settings.text("CONTAINER_HEAD" if role == "head" else "CONTAINER_WORKER")


def place_of(
    settings: Settings,
    role: Role,
    home: str,
    *,
    devices: tuple[str, ...] = (),
    gpus: bool = True,
    mounts: tuple[Mount, ...] = (),
) -> NodePlace:
    """The node of `role` as the settings have it. `home` is the home directory there."""
    keys: dict[Role, tuple[str, ...]] = {
        "head": (
            "MODEL_HOST",
            "ENGRAM_DIR",
            "",
            "TRITON_HOST_CACHE",
            "TILELANG_HOST_CACHE",
            "HEAD_PACKED_DIR",
        ),
        "worker": (
            "WORKER_MODEL_DIR",
            "WORKER_ENGRAM_DIR",
            "WORKER_VLLM_CACHE",
            "WORKER_TRITON_CACHE",
            "WORKER_TILELANG_CACHE",
            "WORKER_PACKED_DIR" if settings.text("WORKER_PACKED_DIR") else "HEAD_PACKED_DIR",
        ),
    }
    # A relative path starts at the checkout; the worker has none.
    start = str(settings.root) if role == "head" else home

    def path(key: str) -> str:
        text = settings.text(key) if key else ""
        return on_node(text, home, start) if text else ""

    model, engram, vllm, triton, tilelang, packed = (path(key) for key in keys[role])
    return NodePlace(
        model_dir=model,
        engram_dir=engram,
        cache_root=path("CACHE_ROOT"),
        vllm_cache=vllm,
        triton_cache=triton,
        tilelang_cache=tilelang,
        devices=devices,
        gpus=gpus,
        mounts=mounts,
        packed_dir=packed,
    )


def on_node(text: str, home: str, start: str) -> str:
    """A path as a node has it: `~` is `home` there, a relative one starts at `start`."""
    if text == "~" or text.startswith("~/"):
        text = home + text[1:]
    return str(PurePosixPath(start) / text)


RLIMITS = frozenset(
    (
        "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice", "nofile", "nproc",
        "rss", "rtprio", "rttime", "sigpending", "stack",
    )
)  # fmt: skip
_ULIMIT = re.compile(r"([a-z]+)=(-1|\d+)(?::(-1|\d+))?")


def ulimits(text: str) -> tuple[Ulimit, ...]:
    """ "core=0 nofile=1024:4096" → one a word; raises UsageError for anything else."""
    found = []
    for word in text.split():
        match = _ULIMIT.fullmatch(word)
        name, soft, hard = match.groups() if match else ("", "", "")
        low, high = int(soft or 0), int(hard or soft or 0)
        if name not in RLIMITS or (high != -1 and (low == -1 or low > high)):
            raise UsageError(
                f"{word!r} in CONTAINER_ULIMITS",
                "name=value or name=soft:hard with soft <= hard, -1 for no limit; names:"
                f" {', '.join(sorted(RLIMITS))}",
                "mend CONTAINER_ULIMITS in .env, such as: memlock=-1 stack=67108864 core=0",
            )
        found.append(Ulimit(name, low, high))
    return tuple(found)
