"""Facts read from what their commands print."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import subprocess
from pathlib import Path

import pytest
from spark_facts import interfaces, roce, text

from launcher import survey as surveys
from launcher.facts.base import Missing
from launcher.facts.disks import DisksFact
from launcher.facts.gpu import GpuApp, GpuAppsFact, GpuFact
from launcher.facts.identity import IdentityFact
from launcher.facts.interfaces import InterfacesFact, SpeedsFact, eui64
from launcher.facts.kernel import KernelLogFact
from launcher.facts.memory import MemoryFact
from launcher.facts.ports import Listening, PortsFact
from launcher.facts.probes import PingFact, ReadSpeedFact
from launcher.facts.roce import ROOT, RoceFact
from launcher.facts.trees import CONFIG, TreesFact
from launcher.nodes.local import LocalNode

CONTAINER = "7d1f4c0be3a95d2286f0c1b7a94e53d8f26a0b9c7e1d4f3a5b6c8d9e0f1a2b3c"


# ---- what the commands print ----


def test_memory() -> None:
    found = MemoryFact().parse(text("meminfo.txt"))
    assert found.total == 127600640 * 1024
    assert found.available == 121634816 * 1024
    assert (found.some, found.full) == (0.0, 0.0)


def test_memory_without_pressure_or_without_memory() -> None:
    only = text("meminfo.txt").split("some ")[0]
    assert MemoryFact().parse(only).full is None
    with pytest.raises(ValueError, match="MemAvailable"):
        MemoryFact().parse("MemTotal: 5 kB\n")


def test_gpu() -> None:
    (gpu,) = GpuFact().parse(text("nvidia-smi.txt"))
    assert (gpu.name, gpu.driver) == ("NVIDIA GB10", "580.95.05")
    with pytest.raises(ValueError, match="No devices were found"):
        GpuFact().parse("No devices were found\n")


def test_processes_on_the_gpu_with_their_containers() -> None:
    assert GpuAppsFact().parse(text("gpu-apps.txt")) == (
        GpuApp(48211, "VLLM::Worker_TP0", 101332 << 20, "root", CONTAINER),
        # A name with a comma in it, and a driver that does not tell the memory.
        GpuApp(3120, "/usr/bin/gnome-remote-desktop, daemon", None, "spark", ""),
    )
    assert GpuAppsFact().parse("app \n") == ()
    assert GpuAppsFact().parse("app No running processes found\n") == ()


def test_identity() -> None:
    found = IdentityFact().parse(text("identity.txt"))
    assert (found.hostname, found.machine, found.kernel) == (
        "spark-2c1f",
        "aarch64",
        "6.14.0-1013-nvidia",
    )
    assert found.home == "/home/spark" and found.uid == 1000 and "docker" in found.groups
    assert (found.system, found.dgx) == ("Ubuntu 24.04.3 LTS", "7.2.3")
    assert "root=UUID=1f5a" in found.cmdline and "rsync" in found.tools
    with pytest.raises(ValueError):
        IdentityFact().parse("")


def test_interfaces() -> None:
    found = {each.name: each for each in interfaces("head")}
    link = found["enp1s0f1np1"]
    assert link.up and link.mtu == 9000 and str(link.ipv4[0]) == "10.0.0.1/24"
    assert not found["enp1s0f0np0"].up
    assert found["lo"].loopback and not link.loopback
    assert str(eui64("4c:bb:47:2c:10:32")) == "fe80::4ebb:47ff:fe2c:1032"
    assert not link.private_link_local
    private = {each.name: each for each in interfaces("head-privacy")}
    assert private["enp1s0f1np1"].private_link_local


@pytest.mark.parametrize("said", ["", "{}", "Object", '[{"ifname": "x"}]'])
def test_interfaces_that_are_none(said: str) -> None:
    with pytest.raises(ValueError):
        InterfacesFact().parse(said)


def test_a_peer_is_no_part_of_the_name() -> None:
    said = json.dumps([{"ifname": "v1@if7", "mtu": 9000, "flags": ["UP"], "addr_info": []}, {}])
    assert [each.name for each in InterfacesFact().parse(said)] == ["v1"]


def test_speeds() -> None:
    assert SpeedsFact().parse(text("speeds.txt"))["enp1s0f1np1"] == 200000
    assert "enp1s0f0np0" not in SpeedsFact().parse(text("speeds.txt"))


def test_listening_ports_only() -> None:
    found = PortsFact().parse(text("proc-net-tcp.txt"))
    assert found == (
        Listening("0.0.0.0", 22, 0),
        Listening("::", 22, 0),
        Listening("::1", 631, 0),
        Listening("127.0.0.1", 8888, 1000),
    )
    with pytest.raises(ValueError):
        PortsFact().parse("")


@pytest.mark.parametrize(
    ("there", "host", "blocks"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "0.0.0.0", True),
        ("0.0.0.0", "10.0.0.1", True),
        ("::", "127.0.0.1", True),
        ("::1", "127.0.0.1", False),
    ],
)
def test_which_listener_is_in_the_way(there: str, host: str, blocks: bool) -> None:
    assert Listening(there, 8888, 0).blocks(host, 8888) is blocks
    assert not Listening(there, 8887, 0).blocks(host, 8888)


def test_roce_devices() -> None:
    found = {each.name: each for each in roce("head")}
    assert set(found) == {"roceP2p1s0f0", "roceP2p1s0f1", "rocep1s0f0", "rocep1s0f1"}
    device = found["rocep1s0f1"]
    assert device.firmware == "28.45.4028" and device.pcie_width == "4"
    (port,) = device.ports
    assert port.active and [gid.index for gid in port.gids] == [0, 1, 2, 3]
    three = port.gid(3)
    assert three is not None and (three.type, three.ipv4) == ("RoCE v2", "10.0.0.1")
    assert device.ports_of("enp1s0f1np1") == (port,) and device.ports_of("lo") == ()
    assert not found["rocep1s0f0"].ports[0].active
    assert "::ffff:10.0.0.1" in port.table()


def test_roce_of_a_machine_without() -> None:
    assert RoceFact().parse("") == ()


def test_roce_command_on_a_tree(tmp_path: Path) -> None:
    """As sysfs has it: every slot is a file, an empty one has no readable type."""
    port = tmp_path / "rocep1s0f1" / "ports" / "1"
    files = {
        "state": "4: ACTIVE",
        "gids/0": "fe80:0000:0000:0000:4ebb:47ff:fe2c:1032",
        "gids/1": "0000:0000:0000:0000:0000:ffff:0a00:0001",
        **{f"gids/{n}": "0000:0000:0000:0000:0000:0000:0000:0000" for n in range(2, 256)},
        "gid_attrs/types/0": "RoCE v2",
        "gid_attrs/types/1": "RoCE v2",
        "gid_attrs/ndevs/0": "enp1s0f1np1",
        "gid_attrs/ndevs/1": "enp1s0f1np1",
    }
    for name, content in files.items():
        path = port / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    argv = [word.replace(ROOT, str(tmp_path)) for word in RoceFact().argv]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    (device,) = RoceFact().parse(done.stdout.replace(str(tmp_path), ROOT))
    assert [(g.index, g.type, g.ipv4) for g in device.ports[0].gids] == [
        (0, "RoCE v2", ""),
        (1, "RoCE v2", "10.0.0.1"),
    ]


def test_kernel_log() -> None:
    found = KernelLogFact().parse(text("kernel-log.txt"))
    assert found.source == "dmesg"
    kinds = [(sign.kind, sign.previous) for sign in found.signs]
    assert kinds == [
        ("link-down", False),
        ("no-memory", False),
        ("no-memory", False),
        ("xid", False),
        ("aer-corrected", False),
        ("aer-fatal", True),
        ("aer-fatal", True),
        ("mlx5", True),
        ("lockup", True),
    ]


def test_kernel_log_command_runs_here() -> None:
    assert not isinstance(surveys.kernel_log(LocalNode()), Missing)


def test_ping() -> None:
    fact = PingFact("enp1s0f1np1", "10.0.0.2", 9000)
    assert "8972" in fact.argv
    good = fact.parse(text("ping-ok.txt"))
    assert good.ok and good.rtt == 0.391 and good.said == ""
    long = fact.parse(text("ping-too-long.txt"))
    assert not long.ok and long.mtu == 1500 and "message too long" in long.said
    assert not fact.parse(text("ping-lost.txt")).ok
    with pytest.raises(ValueError, match="unknown host"):
        fact.parse("ping: unknown host\n")


def test_read_speed(tmp_path: Path) -> None:
    assert ReadSpeedFact("/x").parse(text("dd.txt")).rate == pytest.approx(5.4e9, rel=0.01)
    gone = surveys.read_speed(LocalNode(), str(tmp_path / "a b"))
    assert isinstance(gone, Missing) and "a b" in gone.reason


def test_disks_and_trees_as_printed() -> None:
    disks = DisksFact().parse(text("disks.txt"))
    assert disks[1].mount == "/" and disks[1].writable and disks[1].exists
    assert not disks[2].exists and disks[3].fstype == "nfs4" and not disks[3].writable
    trees = TreesFact().parse(text("trees.txt"))
    assert len(trees[1].shards) == 39 and trees[1].sizes[CONFIG] == 41200133
    assert trees[1].total_size == 210599999000
    assert trees[2].tables == ("model-00047-of-00048.safetensors",
                               "model-00048-of-00048.safetensors")  # fmt: skip
    assert trees[2].broken == ("model-00001-of-00048.safetensors",)
