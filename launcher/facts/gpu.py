"""The GPU, its driver, and who computes on it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.facts.base import shell

_CONTAINER = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    uuid: str


@dataclass(frozen=True)
class GpuApp:
    """A process that computes on the GPU; ``container`` is the full id of its container."""

    pid: int
    name: str
    memory: int | None  # bytes; a GB10 may not say
    user: str = ""
    container: str = ""


@dataclass(frozen=True)
class GpuFact:
    key: str = "gpu"
    # Memory is not asked: a GB10 has none of its own and answers [N/A].
    argv: tuple[str, ...] = (
        "nvidia-smi",
        "--query-gpu=name,driver_version,uuid",
        "--format=csv,noheader",
    )
    takes_paths: bool = False

    def parse(self, text: str) -> tuple[Gpu, ...]:
        found = []
        for row in text.splitlines():
            fields = [field.strip() for field in row.split(",")]
            if len(fields) == 3 and all(fields):
                found.append(Gpu(*fields))
        if not found:
            said = text.strip().splitlines()
            raise ValueError(f"nvidia-smi lists no GPU{': ' + said[0] if said else ''}")
        return tuple(found)


@dataclass(frozen=True)
class GpuAppsFact:
    key: str = "gpu_apps"
    argv: tuple[str, ...] = shell(
        "out=$(nvidia-smi --query-compute-apps=pid,process_name,used_memory "
        "--format=csv,noheader,nounits) || exit $?; "
        "printf '%s\\n' \"$out\" | while IFS= read -r row; do "
        'printf "app %s\\n" "$row"; pid=${row%%,*}; '
        'stat -c "user %U" "/proc/$pid" 2>/dev/null; '
        'sed "s/^/cgroup /" "/proc/$pid/cgroup" 2>/dev/null; done; true'
    )
    takes_paths: bool = False

    def parse(self, text: str) -> tuple[GpuApp, ...]:
        found: list[GpuApp] = []
        user, container = "", ""

        def close() -> None:
            if found:
                last = found[-1]
                found[-1] = GpuApp(last.pid, last.name, last.memory, user, container)

        for row in text.splitlines():
            word, _, rest = row.partition(" ")
            if word == "app" and rest.strip():
                # A name may hold commas: it is what stands between the first and the last.
                first, _, more = rest.partition(",")
                name, _, memory = more.rpartition(",")
                if not first.strip().isdigit():
                    continue  # a sentence, such as "No running processes found"
                close()
                user, container = "", ""
                mib = memory.strip()
                size = int(mib) * 2**20 if mib.isdigit() else None
                found.append(GpuApp(int(first), name.strip(), size))
            elif word == "user":
                user = rest.strip()
            elif word == "cgroup" and (match := _CONTAINER.search(rest)):
                container = match[0]
        close()
        return tuple(found)


@dataclass(frozen=True)
class DevicesFact:
    """Character devices a rank's container is given by name."""

    key: str = "devices"
    argv: tuple[str, ...] = shell(
        "for f in /dev/nvidia* /dev/nvidia-caps/* /dev/infiniband/*; do "
        '[ -c "$f" ] && printf "%s\\n" "$f"; done; true'
    )
    takes_paths: bool = False

    def parse(self, text: str) -> tuple[str, ...]:
        return tuple(row for row in text.splitlines() if row.startswith("/dev/"))
