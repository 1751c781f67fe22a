"""All facts of one node, gathered at once; what cannot be had is recorded with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from launcher.errors import LauncherError
from launcher.facts import batch
from launcher.facts import docker as docker_facts
from launcher.facts.base import Missing
from launcher.facts.care import Care, CareFact
from launcher.facts.disks import Disk, DisksFact
from launcher.facts.docker import Container, Docker, Image
from launcher.facts.gpu import DevicesFact, Gpu, GpuApp, GpuAppsFact, GpuFact
from launcher.facts.identity import ClockFact, Identity, IdentityFact
from launcher.facts.interfaces import Interface, InterfacesFact, SpeedsFact
from launcher.facts.kernel import KernelLog, KernelLogFact
from launcher.facts.memory import Memory, MemoryFact
from launcher.facts.packs import Packs, PacksFact
from launcher.facts.ports import Listening, PortsFact
from launcher.facts.probes import Pinged, PingFact, ReadSpeed, ReadSpeedFact
from launcher.facts.roce import Device, RoceFact
from launcher.facts.trees import Tree, TreesFact
from launcher.facts.tuned import TunedFact, TunedTable
from launcher.findings import Finding
from launcher.link import Link, Rail
from launcher.nodes.base import Node

# The clock first: the nearer to the question, the surer the difference.
FACTS: tuple[Any, ...] = (
    ClockFact(),
    IdentityFact(),
    MemoryFact(),
    InterfacesFact(),
    SpeedsFact(),
    RoceFact(),
    PortsFact(),
    DevicesFact(),
    DisksFact(),
    TreesFact(),
    PacksFact(),
    TunedFact(),
    GpuFact(),
    GpuAppsFact(),
)


class DockerClient(Protocol):
    """What is used of the Docker SDK's client."""

    @property
    def images(self) -> Any: ...

    @property
    def containers(self) -> Any: ...

    def version(self) -> Any: ...

    def info(self) -> Any: ...


@dataclass(frozen=True)
class Paths:
    """Of one node, as it names them; a leading ~ is its own home. Empty ones are not asked."""

    model: str = ""
    engram: str = ""
    disks: tuple[str, ...] = ()
    packed: str = ""
    tuned: str = ""


@dataclass(frozen=True)
class Survey:
    name: str  # head, worker
    asked: tuple[float, float]  # the launcher's clock before and after
    identity: Identity | Missing
    clock: float | Missing
    memory: Memory | Missing
    interfaces: tuple[Interface, ...] | Missing
    speeds: dict[str, int] | Missing
    roce: tuple[Device, ...] | Missing
    listening: tuple[Listening, ...] | Missing
    devices: tuple[str, ...] | Missing
    disks: tuple[Disk, ...] | Missing
    model: Tree | Missing | None  # None: not asked
    engram: Tree | Missing | None
    gpus: tuple[Gpu, ...] | Missing
    apps: tuple[GpuApp, ...] | Missing
    docker: Docker | Missing
    paths: Paths = Paths()
    lost: Finding | None = None  # the node itself could not be asked
    packs: Packs | Missing = field(default_factory=Packs)
    tuned: TunedTable | Missing = field(default_factory=TunedTable)

    def disk(self, path: str) -> Disk | Missing:
        if isinstance(self.disks, Missing):
            return self.disks
        found = next((each for each in self.disks if each.path == path), None)
        return Missing(f"df did not answer for {path}") if found is None else found


def survey(
    name: str,
    node: Node,
    docker: DockerClient | None,
    paths: Paths,
    image: str = "",
    *,
    names: Sequence[str] = (),
    no_docker: str = "no connection to the Docker daemon",
    gone: LauncherError | None = None,
    now: Callable[[], float] = time.time,
) -> Survey:
    """Ask one node everything. ``names``: our containers', which are inspected like labelled ones;
    ``gone``: what a node that runs no command has said, which is not asked again.

    Never raises for what the node or its daemon answers, nor when they do not.
    """
    with ThreadPoolExecutor(1) as beside:
        daemon = None if docker is None else beside.submit(ask_docker, docker, image, tuple(names))
        asked = [paths.model, paths.engram, paths.packed, paths.tuned]
        before = now()
        lost: Finding | None = None
        try:
            if gone is not None:
                raise gone
            found = batch.ask(node, FACTS, [*asked, *paths.disks])
        except LauncherError as error:
            lost = Finding(f"{name}: {error.found}", error.needed, error.do_next, topic="node")
            found = {fact.key: Missing(error.found) for fact in FACTS}
        after = now()
        answered = Missing(no_docker) if daemon is None else daemon.result()
    trees = found["trees"]
    return Survey(
        name=name,
        asked=(before, after),
        identity=found["identity"],
        clock=found["clock"],
        memory=found["memory"],
        interfaces=found["interfaces"],
        speeds=found["speeds"],
        roce=found["roce"],
        listening=found["ports"],
        devices=found["devices"],
        disks=_disks(found["disks"], paths),
        model=_tree(trees, 1, paths.model),
        engram=_tree(trees, 2, paths.engram),
        gpus=found["gpu"],
        apps=found["gpu_apps"],
        docker=answered,
        paths=paths,
        lost=lost,
        packs=found["packs"],
        tuned=found["tuned"],
    )


def kernel_log(node: Node) -> KernelLog | Missing:
    found: KernelLog | Missing = batch.one(node, KernelLogFact(), 20.0)
    return found


def care(node: Node) -> Care | Missing:
    found: Care | Missing = batch.one(node, CareFact())
    return found


def read_speed(node: Node, path: str) -> ReadSpeed | Missing:
    found: ReadSpeed | Missing = batch.one(node, ReadSpeedFact(path), 30.0)
    return found


@dataclass(frozen=True)
class Probe:
    """A rail tried with packets of its MTU; ``small`` only when those did not come back."""

    head: Rail
    worker: Rail
    full: Pinged | Missing
    small: Pinged | Missing | None = None


def probe(node: Node, head: Rail, worker: Rail) -> Probe:
    """From the head's side of a rail to the worker's."""

    def ping(mtu: int) -> Pinged | Missing:
        found: Pinged | Missing = batch.one(node, PingFact(head.interface, worker.address, mtu))
        return found

    full = ping(min(head.mtu, worker.mtu))
    if isinstance(full, Missing) or full.ok:
        return Probe(head, worker, full)
    return Probe(head, worker, full, ping(100))


def probes(node: Node, link: Link) -> tuple[Probe, ...]:
    """All rails, from the head."""
    pairs = zip(link.head.rails, link.worker.rails, strict=True)
    return tuple(probe(node, head, worker) for head, worker in pairs)


def ask_docker(client: DockerClient, image: str, names: tuple[str, ...]) -> Docker | Missing:
    """The daemon's facts. The SDK raises a family of its own, requests' and the socket's."""
    try:
        version, info = client.version(), client.info()
        return docker_facts.docker(
            version, info, _image(client, image) if image else None, _containers(client, names)
        )
    except Exception as error:
        return Missing(_reason(error))


def _image(client: DockerClient, name: str) -> Image | Missing | None:
    try:
        return docker_facts.image(client.images.get(name).attrs)
    except Exception as error:
        if getattr(error, "status_code", None) == 404:
            return None
        return Missing(_reason(error))


def _containers(client: DockerClient, names: tuple[str, ...]) -> list[Container]:
    """One request for the list; an inspection only for those that matter, for each is a trip."""
    found = []
    for each in client.containers.list(all=True, sparse=True):
        seen = docker_facts.container(each.attrs)
        if seen.running or seen.owner or seen.name in names:
            try:
                each.reload()
            except Exception as error:
                if getattr(error, "status_code", None) == 404:
                    continue  # removed meanwhile
                raise
            seen = docker_facts.container(each.attrs)
        found.append(seen)
    return found


def _reason(error: Exception) -> str:
    said = str(error).strip() or type(error).__name__
    return said.splitlines()[0][:300]


def _disks(found: Any, paths: Paths) -> tuple[Disk, ...] | Missing:
    if isinstance(found, Missing):
        return found
    asked = (paths.model, paths.engram, paths.packed, paths.tuned, *paths.disks)
    return tuple(
        replace(found[n], path=path) for n, path in enumerate(asked, 1) if path and n in found
    )


def _tree(found: Any, number: int, path: str) -> Tree | Missing | None:
    if not path:
        return None
    if isinstance(found, Missing):
        return found
    tree: Tree | None = found.get(number)
    return Missing(f"{path} could not be listed") if tree is None else tree
