"""What a node of the rig has of a Spark's hardware: files and programs that answer as there."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import roce

if TYPE_CHECKING:
    from machine import Node

DRIVER = "580.95.05"
CLASS = "/sys/class/infiniband"
DEVICES = "/sys/rig-devices"

NVIDIA_SMI = f'''\
#!/usr/bin/python3
"""nvidia-smi of a Spark: one GB10 whose memory it cannot tell."""
import sys

GPU = {{
    "index": "0", "name": "NVIDIA GB10", "gpu_name": "NVIDIA GB10",
    "uuid": "GPU-5d1e7c30-0419-4a5b-9c8d-{{node}}",
    "driver_version": "{DRIVER}", "compute_cap": "12.1", "pci.bus_id": "0000000F:01:00.0",
    "count": "1", "persistence_mode": "Enabled", "pstate": "P8", "temperature.gpu": "41",
    "utilization.gpu": "0 %", "power.draw": "4.51 W", "clocks.sm": "208 MHz",
    "clocks.current.sm": "208 MHz", "compute_mode": "Default", "vbios_version": "9A.0B.12.00.03",
}}
GPU["gpu_uuid"] = GPU["uuid"]
APPS = ("pid", "process_name", "used_memory")


def main(words):
    if words == ["-L"]:
        print(f"GPU 0: {{GPU['name']}} (UUID: {{GPU['uuid']}})")
        return 0
    options = dict(word.lstrip("-").partition("=")[::2] for word in words)
    form = options.get("format", "")
    if not form.startswith("csv"):
        print("NVIDIA-SMI {DRIVER}  Driver Version: {DRIVER}  CUDA Version: 13.0")
        return 0
    if "query-gpu" in options:
        names = options["query-gpu"].split(",")
        rows = [[GPU.get(name.strip(), "[N/A]") for name in names]]
    else:
        names = options.get("query-compute-apps", "pid").split(",")
        try:
            told = open("/run/rig/compute-apps").read().splitlines()
        except FileNotFoundError:
            told = []
        found = [dict(zip(APPS, (part.strip() for part in row.split(",")))) for row in told]
        for each in found:
            each["used_gpu_memory"] = each.get("used_memory", "[N/A]")
            each["name"] = each.get("process_name", "")
        rows = [[each.get(name.strip(), GPU.get(name.strip(), "[N/A]")) for name in names]
                for each in found]
    if "noheader" not in form:
        print(", ".join(names))
    for row in rows:
        if "nounits" in form:
            row = [text.removesuffix(" MiB").removesuffix(" %") for text in row]
        print(", ".join(row))
    return 0


sys.exit(main(sys.argv[1:]))
'''

# Docker only asks that this program is there; the real one would put the driver's libraries in.
GPU_HOOK = """\
#!/bin/sh
echo "$@" >>/run/rig/gpu-hook.log
"""

KERNEL_LOG = """\
#!/bin/sh
cat /run/rig/kernel.log
"""


def install(node: Node) -> None:
    for name, text in (
        ("nvidia-smi", NVIDIA_SMI.replace("{node}", node.name[-1].zfill(12))),
        ("nvidia-container-runtime-hook", GPU_HOOK),
        ("dmesg", KERNEL_LOG),
        ("journalctl", KERNEL_LOG),
    ):
        node.write(f"/usr/bin/{name}.rig", text, 0o755)
        node.path(f"/usr/bin/{name}.rig").rename(node.path(f"/usr/bin/{name}"))
    node.kernel_log("[    0.000000] Linux version 6.14.0-1013-nvidia (rig)\n")


def roce_tree(node: Node, device: roce.Device) -> None:
    """Put the device under class/infiniband, in place of what stood there under its name."""
    home = f"{DEVICES}/{device.pci}/infiniband/{device.name}"
    folder = node.path(home)
    if folder.exists():
        attributes = [f"{home}/{path}" for path in node.read(f"{home}/.bound").split()]
        if attributes:
            node.run("umount", *attributes)
        shutil.rmtree(folder)
    for path, text in device.files():
        node.write(f"{home}/{path}", text + "\n")
    # An empty slot has these files too, but reading one is EINVAL: so is this file of proc's
    # where no security module is at work. Elsewhere the file is left out.
    bound = list(device.unreadable()) if _einval(node) else []
    lines = []
    for path in bound:
        node.write(f"{home}/{path}", "")
        lines.append(f"mount --bind /proc/1/attr/current {home}/{path}")
    node.run("sh", "-ec", "\n".join(lines))
    node.write(f"{home}/.bound", "\n".join(bound))
    link = node.path(f"{CLASS}/{device.name}")
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(f"../../rig-devices/{device.pci}/infiniband/{device.name}")


def _einval(node: Node) -> bool:
    return "Invalid argument" in node.run("cat", "/proc/1/attr/current", check=False).err


def meminfo(available: float, total: float) -> str:
    rows = {
        "MemTotal": total,
        "MemFree": available * 0.7,
        "MemAvailable": available,
        "Buffers": 0.2,
        "Cached": available * 0.3,
        "SwapTotal": 0.0,
        "SwapFree": 0.0,
    }
    return "".join(f"{key + ':':<15}{int(gib * 1048576):>9} kB\n" for key, gib in rows.items())
