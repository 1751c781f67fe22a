"""A node for the guard's stories: /proc as files, a clock, a server, its neighbours, a daemon."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.watch.guard import proc, run
from launcher.watch.guard.core import GIB, Guard, Policy, Sample
from launcher.watch.guard.target import Container

ID = "f00d" * 16
SERVER, CHILD, HOG = 100, 101, 200
MIB = 1 << 20
TOTAL = int(121.69 * GIB)
SYSTEM = 6 * GIB  # what the rest of the node takes
FLOOR = int(1.5 * GIB)  # bytes, of the guards here


@dataclass
class Node:
    """Sizes in bytes. ``private``: anonymous memory by pid; ``driver``: the GPU's."""

    root: Path
    private: dict[int, int] = field(default_factory=lambda: {SERVER: GIB, CHILD: 3 * GIB})
    names: dict[int, str] = field(
        default_factory=lambda: {SERVER: "vllm", CHILD: "VLLM::Worker_TP", HOG: "hf"}
    )
    driver: int = 100 * GIB
    cached: int = 4 * GIB
    shmem: int = 0
    swap_total: int = 0
    swapped: dict[int, int] = field(default_factory=dict)
    full: float | None = 0.0
    cgroup: str = f"0::/system.slice/docker-{ID}.scope"
    now: float = 1000.0
    signals: list[tuple[str, str]] = field(default_factory=list)
    deaf: bool = False  # the server does not end when it is asked
    mute: bool = False  # the daemon does not answer
    names_given: dict[str, str] = field(default_factory=lambda: {"dsv41-exl3-head": ID, ID: ID})

    _written: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def available(self) -> int:
        used = sum(self.private.values()) + self.driver + self.shmem + SYSTEM
        return max(0, TOTAL - used + sum(self.swapped.values()))

    @property
    def up(self) -> bool:
        return SERVER in self.private

    def write(self) -> None:
        """/proc as it reads now."""
        free = max(0, self.available - self.cached)
        anonymous = sum(self.private.values()) - sum(self.swapped.values())
        rows = {
            "MemTotal": TOTAL,
            "MemFree": free,
            "MemAvailable": self.available,
            "Buffers": 0,
            "Cached": min(self.cached, self.available) + self.shmem,
            "Shmem": self.shmem,
            "AnonPages": anonymous + SYSTEM,
            "SwapTotal": self.swap_total,
            "SwapFree": self.swap_total - sum(self.swapped.values()),
        }
        self.root.mkdir(exist_ok=True)
        text = "".join(f"{key}: {size >> 10} kB\n" for key, size in rows.items())
        (self.root / "meminfo").write_text(text)
        pressure = self.root / "pressure" / "memory"
        if self.full is not None:
            pressure.parent.mkdir(exist_ok=True)
            pressure.write_text(
                f"some avg10={self.full:.2f} avg60=0.00 avg300=0.00 total=1\n"
                f"full avg10={self.full:.2f} avg60=0.00 avg300=0.00 total=1\n"
            )
        for entry in self.root.iterdir():
            if entry.name.isdigit() and int(entry.name) not in self.private:
                shutil.rmtree(entry)
                self._written.pop(int(entry.name), None)
        for pid, size in self.private.items():
            self._process(pid, size)

    def _process(self, pid: int, size: int) -> None:
        entry, out = self.root / str(pid), self.swapped.get(pid, 0)
        if self._written.get(pid) == (size, out):
            return
        known = pid in self._written
        self._written[pid] = (size, out)
        entry.mkdir(exist_ok=True)
        (entry / "status").write_text(
            f"Name:\t{self.names.get(pid, 'other')}\nRssAnon:\t{size - out >> 10} kB\n"
            f"RssFile:\t900000 kB\nRssShmem:\t0 kB\nVmSwap:\t{out >> 10} kB\n"
        )
        if known:
            return
        parent = SERVER if pid == CHILD else 1
        rest = " ".join(["S", str(parent), *["0"] * 17, str(pid * 10), "0"])
        (entry / "stat").write_text(f"{pid} (a (name) x) {rest}\n")
        ours = pid in (SERVER, CHILD)
        (entry / "cgroup").write_text(f"{self.cgroup}\n" if ours else "0::/user.slice\n")

    # The daemon.

    def inspect(self, name: str) -> dict[str, Any] | None:
        self._answers()
        if name not in self.names_given or not self.up:
            return None
        return {"Id": ID, "State": {"Running": True, "Pid": SERVER}}

    def kill(self, name: str, signal: str) -> bool:
        self._answers()
        self.signals.append((name, signal))
        if not (self.deaf and signal == "SIGTERM"):
            self.end()
        return True

    def send(self, pid: int, ticks: int, number: int) -> None:
        """Signals past the daemon: the container's processes are root's."""
        raise PermissionError(1, "Operation not permitted")

    def container(self) -> Container:
        return Container("dsv41-exl3-head", self, self.root, self.send)  # type: ignore[arg-type]

    def _answers(self) -> None:
        if self.mute:
            from launcher.watch.guard.engine import DockerFault

            raise DockerFault("no answer")

    def end(self) -> None:
        """The server ends, and its memory is back."""
        for pid in (SERVER, CHILD):
            self.private.pop(pid, None)
            self.swapped.pop(pid, None)
        self.driver = 0


@dataclass
class Story:
    """A run of the guard; ``happens`` changes the node, given the seconds since the start."""

    node: Node
    happens: Callable[[float], None]
    seconds: float = 3600.0
    lines: list[str] = field(default_factory=list)
    lows: list[dict[str, Any]] = field(default_factory=list)
    whys: list[dict[str, Any]] = field(default_factory=list)
    ended_at: float | None = None

    def line(self, text: str) -> None:
        self.lines.append(f"{self.node.now - 1000:.1f} {text}")

    def low(self, told: dict[str, Any]) -> None:
        self.lows.append(told)

    def why(self, told: dict[str, Any]) -> None:
        self.whys.append(told)

    def used(self, pids: Iterable[int]) -> set[Path]:
        return set()

    def clean(self, left: Iterable[Path]) -> list[Path]:
        return []

    def run(self, **policy: Any) -> int | None:
        """The guard's exit status; None when it watched to the story's end."""
        node = self.node
        node.write()
        target = node.container()
        assert target.find()

        def sleep(seconds: float) -> None:
            node.now += seconds
            if node.now - 1000 > self.seconds:
                raise TimeoutError
            self.happens(node.now - 1000)
            node.write()

        try:
            status = run.watch(
                target,
                Guard(Policy(**{"floor": int(1.5 * GIB), **policy})),
                look=lambda: proc.look(target.pids, node.now, node.root),
                notes=self,
                shm=self,
                clock=lambda: node.now,
                wall=lambda: node.now,
                sleep=sleep,
            )
        except TimeoutError:
            return None
        self.ended_at = node.now - 1000
        return status

    def told(self, word: str) -> list[str]:
        return [line for line in self.lines if word in line]


def sample(at: float = 0.0, **more: Any) -> Sample:
    """A look at a node with much memory, but for what is given."""
    plain: dict[str, Any] = {
        "available": 10 * GIB, "free": GIB, "cached": GIB, "shmem": 0, "driver": 0,
        "swap_used": 0, "full": None, "own": (), "others": (),
    }  # fmt: skip
    return Sample(at, **{**plain, **more})
