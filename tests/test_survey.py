"""The one round trip that asks a node for all its facts, and what its Docker daemon says."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spark_facts import OWNER, text

from launcher import survey as surveys
from launcher.errors import LauncherError
from launcher.facts import batch
from launcher.facts.base import Missing
from launcher.facts.disks import expanded
from launcher.facts.docker import Docker, container
from launcher.facts.identity import ClockFact
from launcher.facts.trees import CONFIG, INDEX
from launcher.nodes.base import Done
from launcher.nodes.local import LocalNode
from launcher.survey import FACTS, Paths, ask_docker, survey

CONTAINER = "7d1f4c0be3a95d2286f0c1b7a94e53d8f26a0b9c7e1d4f3a5b6c8d9e0f1a2b3c"


# ---- one round trip ----


def test_the_script_is_constant_and_sound() -> None:
    assert batch.script(FACTS) == batch.script(FACTS)
    checked = subprocess.run(["sh", "-n"], input=batch.script(FACTS), text=True)
    assert checked.returncode == 0


def test_a_survey_of_this_machine(tmp_path: Path) -> None:
    model, cache = tmp_path / "a model's $(touch x)\nhome", tmp_path / "not" / "yet"
    model.mkdir()
    shard = "model-00001-of-00002.safetensors"
    (model / shard).write_bytes(b"x" * 100)
    (model / "model-00002-of-00002.safetensors").symlink_to(tmp_path / "nowhere")
    (model / CONFIG).write_text("{}")
    index = {
        "metadata": {"total_size": 190},
        "weight_map": {
            "layers.0.attn.wq_a.weight": shard,
            "layers.1.engram.embed.weight": "model-00002-of-00002.safetensors",
            "layers.1.engram.wkv.weight": shard,
        },
    }
    (model / INDEX).write_text(json.dumps(index, indent=1))
    began = time.monotonic()
    found = survey("head", LocalNode(), None, Paths(str(model), "", (str(cache), "~/x")))
    assert time.monotonic() - began < 3
    assert found.lost is None and found.engram is None
    assert not isinstance(found.model, Missing | None)
    assert found.model.shards == (shard, "model-00002-of-00002.safetensors")
    assert found.model.tables == ("model-00002-of-00002.safetensors",)
    assert found.model.broken == ("model-00002-of-00002.safetensors",)
    assert found.model.sizes[shard] == 100 and found.model.total_size == 190
    assert set(found.model.hashes) == {CONFIG, INDEX}
    assert not isinstance(found.identity, Missing)
    assert found.identity.uid == os.getuid()
    assert not isinstance(found.clock, Missing)
    assert found.asked[0] <= found.clock <= found.asked[1]
    disk = found.disk(str(cache))
    assert not isinstance(disk, Missing)
    assert (disk.exists, disk.writable) == (False, True) and disk.free > 0
    assert not isinstance(found.disk("~/x"), Missing)
    assert isinstance(found.disk("/never asked"), Missing)
    assert isinstance(found.docker, Missing) and not isinstance(found.listening, Missing)
    assert not list(tmp_path.rglob("x"))


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    found = survey("worker", LocalNode(), None, Paths(str(tmp_path / "no"), str(tmp_path)))
    assert not isinstance(found.model, Missing | None) and not found.model.exists
    assert not isinstance(found.engram, Missing | None)
    assert found.engram.exists and not found.engram.shards


@dataclass(frozen=True)
class Words:
    """A fact whose command a test chooses."""

    argv: tuple[str, ...]
    key: str = "words"
    takes_paths: bool = False

    def parse(self, said: str) -> str:
        if "nonsense" in said:
            raise ValueError("not what was asked")
        return said.strip()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("no-such-program",), "no-such-program is not installed"),
        (("sh", "-c", "no-such-program"), "no-such-program is not installed"),
        (("sh", "-c", "echo first; echo broken >&2; exit 3"), "broken"),
        (("sh", "-c", "exit 3"), "exit status 3"),
        (("echo", "nonsense"), "not what was asked"),
    ],
)
def test_one_fact_that_cannot_be_had_spoils_no_other(argv: tuple[str, ...], why: str) -> None:
    facts = [Words(("echo", "a"), "a"), Words(argv), Words(("echo", "b"), "b")]
    assert batch.ask(LocalNode(), facts) == {"a": "a", "words": Missing(why), "b": "b"}


def test_a_fact_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SECTION_SECONDS", 0.3)
    facts = [Words(("sleep", "9")), Words(("echo", "b"), "b")]
    found = batch.ask(LocalNode(), facts)
    assert found["words"] == Missing("no answer within 0.3 s") and found["b"] == "b"


def test_an_answer_that_is_cut_off() -> None:
    facts = [Words(("x",), "a"), Words(("x",), "b")]
    said = "\n@m begin a\nyes\n\n@m end 0\n\n@m begin b\nhal"
    found = batch.read(facts, "@m", said, "")
    assert found == {"a": "yes", "b": Missing("the node's answer ended before it")}


@given(st.text(max_size=60))
def test_no_text_of_a_node_is_taken_for_a_mark(said: str) -> None:
    out = f"\n@0badc0de begin words\n{said}\n\n@0badc0de end 0\n"
    found = batch.read([Words(("x",))], "@0badc0de", out, "")
    assert found["words"] == (Missing("not what was asked") if "nonsense" in said else said.strip())


class Lost(LocalNode):
    def run(self, argv: Sequence[str], **more: Any) -> Done:
        raise LauncherError("it is not reachable", "a reachable worker", "switch it on")


def test_a_node_that_is_lost_is_one_finding() -> None:
    found = survey("worker", Lost(), None, Paths("/m", "/e", ("/c",)))
    assert found.lost is not None and found.lost.found == "worker: it is not reachable"
    assert found.memory == Missing("it is not reachable") == found.model


def test_home_is_expanded_as_on_the_node() -> None:
    assert expanded("~", "/home/a") == "/home/a"
    assert expanded("~/x", "/home/a") == "/home/a/x"
    assert expanded("/x/~", "/home/a") == "/x/~"


def test_clock() -> None:
    assert ClockFact().parse("1764000000.123456789\n") == pytest.approx(1764000000.123456789)


# ---- Docker ----


class Gone(Exception):
    status_code = 404


class FakeContainer:
    def __init__(self, sparse: dict[str, Any], full: dict[str, Any] | Exception) -> None:
        self.attrs, self.full, self.reloads = sparse, full, 0

    def reload(self) -> None:
        self.reloads += 1
        if isinstance(self.full, Exception):
            raise self.full
        self.attrs = self.full


class FakeDocker:
    def __init__(self, *containers: FakeContainer, image: Exception | None = None) -> None:
        self.said = json.loads(text("docker.json"))
        self.found, self.image = list(containers), image

    def version(self) -> Any:
        return self.said["version"]

    def info(self) -> Any:
        return self.said["info"]

    @property
    def images(self) -> Any:
        return self

    @property
    def containers(self) -> Any:
        return self

    def get(self, name: str) -> Any:
        if self.image is not None:
            raise self.image
        self.attrs = self.said["image"]
        return self

    def list(self, all: bool, sparse: bool) -> Any:
        assert all and sparse
        return self.found


def listed() -> FakeContainer:
    said = json.loads(text("docker.json"))
    return FakeContainer(said["list"][0], said["inspect"])


def test_docker() -> None:
    old = {"Id": "o", "Names": ["/old"], "Image": "x", "State": "exited", "Labels": None}
    stopped = FakeContainer(old, old)
    found = ask_docker(FakeDocker(listed(), stopped), "img", ())
    assert isinstance(found, Docker)
    assert (found.version, found.store) == ("28.3.3", "overlay2") and "nvidia" in found.runtimes
    ours, other = found.containers
    assert ours.gpu and ours.running and ours.owner == OWNER and ours.role == "head"
    assert ours.option("--port") == "8888" and ours.option("--nothing") == ""
    assert not other.running and not other.gpu
    assert stopped.reloads == 0  # each inspection is a trip over ssh


def test_a_container_that_goes_meanwhile_and_an_image_that_is_not_there() -> None:
    going = FakeContainer(listed().attrs, Gone())
    found = ask_docker(FakeDocker(going, image=Gone("no such image")), "img", ())
    assert isinstance(found, Docker) and found.containers == () and found.image is None


def test_a_daemon_that_does_not_answer() -> None:
    class Dead(FakeDocker):
        def version(self) -> Any:
            raise OSError("Connection refused\nmore")

    assert ask_docker(Dead(), "", ()) == Missing("Connection refused")
    assert survey("head", LocalNode(), Dead(), Paths()).docker == Missing("Connection refused")


def test_an_image_that_cannot_be_looked_up() -> None:
    found = ask_docker(FakeDocker(image=OSError("timed out")), "img", ())
    assert isinstance(found, Docker) and found.image == Missing("timed out")


@pytest.mark.parametrize(
    ("host", "env", "gpu"),
    [
        ({"Runtime": "nvidia"}, [], True),
        ({"DeviceRequests": [{"Capabilities": [["gpu"]]}]}, [], True),
        ({"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]}, [], True),
        ({"Devices": [{"PathOnHost": "/dev/nvidia0"}]}, [], True),
        ({"Privileged": True}, ["NVIDIA_VISIBLE_DEVICES=all"], True),
        ({"Privileged": True}, ["NVIDIA_VISIBLE_DEVICES=void"], False),
        ({}, ["NVIDIA_VISIBLE_DEVICES=all"], False),
        ({"DeviceRequests": None, "Devices": None}, [], False),
    ],
)
def test_which_container_has_a_gpu(host: dict[str, Any], env: list[str], gpu: bool) -> None:
    attrs = {"Id": "x", "Name": "/x", "State": {"Status": "running"}, "HostConfig": host,
             "Config": {"Env": env, "Labels": None}}  # fmt: skip
    assert container(attrs).gpu is gpu


def test_a_probe_tries_small_packets_only_when_the_large_are_lost() -> None:
    class Pings(LocalNode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[str] = []

        def run(self, argv: Sequence[str], **more: Any) -> Done:
            self.sizes.append(argv[argv.index("-s") + 1])
            large = int(self.sizes[-1]) > 2000
            name = "ping-too-long.txt" if large else "ping-ok.txt"
            return Done(tuple(argv), 1, text(name).encode(), b"")

    rail = surveys.Rail("enp1s0f1np1", "10.0.0.1", 24, 9000, "rocep1s0f1", 1, 3)
    node = Pings()
    found = surveys.probe(node, rail, replace(rail, address="10.0.0.2"))
    assert node.sizes == ["8972", "72"]
    assert not isinstance(found.small, Missing | None) and found.small.ok
    low = Pings()
    assert surveys.probe(low, replace(rail, mtu=1500), rail).small is None
