"""Two Sparks as their facts show them, for tests of the link, the preflight and the doctor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.facts import docker as docker_facts
from launcher.facts.disks import Disk
from launcher.facts.docker import Container, Docker
from launcher.facts.gpu import DevicesFact, GpuFact
from launcher.facts.identity import IdentityFact
from launcher.facts.interfaces import Interface, InterfacesFact, SpeedsFact
from launcher.facts.memory import MemoryFact
from launcher.facts.ports import Listening
from launcher.facts.roce import Device, RoceFact
from launcher.facts.trees import TreesFact
from launcher.link import Side, Wanted
from launcher.preflight import Given
from launcher.survey import Paths, Survey

DATA = Path(__file__).parent / "data" / "facts"
OWNER = "spark-2c1f:/home/spark/kit"
SSH = Listening("0.0.0.0", 22, 0)


def text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def interfaces(name: str) -> tuple[Interface, ...]:
    return InterfacesFact().parse(text(f"ip-{name}.json"))


def roce(name: str) -> tuple[Device, ...]:
    return RoceFact().parse(text(f"roce-{name}.txt"))


def docker(*containers: Container, **more: Any) -> Docker:
    said = json.loads(text("docker.json"))
    found = docker_facts.docker(
        said["version"], said["info"], docker_facts.image(said["image"]), containers
    )
    return replace(found, **more)


def rank(role: str, state: str = "running", launch: str = "ab12", owner: str = OWNER) -> Container:
    labels = {"dsv41.launch": launch, "dsv41.role": role, "dsv41.owner": owner}
    argv = ("python3", "serve", "--port", "8888", "--master-port=29521")
    return Container(f"id-{role}", f"dsv41-exl3-{role}", "img", state, labels, True, argv)


def survey(name: str, **more: Any) -> Survey:
    """A healthy node; ``more`` replaces facts."""
    trees = TreesFact().parse(text("trees.txt"))
    disk = Disk("~/cache", True, True, 3_936_818_806_784, 2_741_035_008_000, "ext4", "nvme", "/")
    healthy = Survey(
        name=name,
        asked=(1000.0, 1000.2),
        identity=replace(IdentityFact().parse(text("identity.txt")), hostname=f"spark-{name}"),
        clock=1000.1,
        memory=MemoryFact().parse(text("meminfo.txt")),
        interfaces=interfaces(name),
        speeds=SpeedsFact().parse(text("speeds.txt")),
        roce=roce(name),
        listening=(SSH,),
        devices=DevicesFact().parse(text("devices.txt")),
        disks=(disk,),
        model=trees[1],
        engram=trees[2],
        gpus=GpuFact().parse(text("nvidia-smi.txt")),
        apps=(),
        docker=docker(),
        paths=Paths("~/model", "~/engram-src", ("~/cache",)),
    )
    return replace(healthy, **more)


WANTED = Wanted(Side("10.0.0.1", prefix="HEAD"), Side("10.0.0.2", prefix="WORKER"))

GIVEN = Given(
    wanted=WANTED,
    owner=OWNER,
    head_container="dsv41-exl3-head",
    worker_container="dsv41-exl3-worker",
    image="ghcr.io/x:2.9bpw",
    bind="127.0.0.1",
    port=8888,
    master_port=29521,
    margin=12.0,
)
