"""A rank's packer in a throwaway container of the serving image, on the rank's node."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher.commands.container import (
    ENGRAM,
    LAUNCH,
    MODEL,
    PACKED,
    ROLE,
    Container,
    Mount,
    NodePlace,
    container_name,
)
from launcher.deployment import Rank, Role
from launcher.errors import LauncherError
from launcher.packing.run import Ended
from launcher.packing.words import PACK, What, argv, translated
from launcher.runtimes.base import Runtime
from launcher.settings.values import Settings

PACKER = "dsv41.packer"  # the label with the owner: for a rank's launch a packer is not in the way
GRACE = 20.0  # seconds to end by itself: it may be waiting for the drive
POLL = 0.5
INSIST = 30.0  # seconds
LOST = 120.0  # seconds without its node, after which it is given up


#: Where a packer finds what it reads.
INSIDE = {"engram": ENGRAM, "model": MODEL}


def name_of(settings: Settings, role: Role, what: What = PACK) -> str:
    return f"{container_name(settings, role)}-{what.verb}"


def packer(
    rank: Rank, settings: Settings, place: NodePlace, owner: str, what: What = PACK
) -> Container:
    """The source to read, the packed files' directory to write, and nothing else."""
    return Container(
        name=name_of(settings, rank.role, what),
        image=settings.text("IMAGE"),
        argv=rank.argv,
        env=dict(rank.env),
        labels={LAUNCH: rank.env["SPARK_LAUNCH_ID"], ROLE: rank.role, PACKER: owner},
        mounts=(place.mount_of(what.source), Mount(place.packed_dir, PACKED, read_only=False)),
        devices=(),
        gpus=False,
        ulimits=(),
        aside=True,
    )


@dataclass(frozen=True)
class ContainerJob:
    """``runtime`` makes the containers that `packer` describes."""

    role: Role
    rank: int
    runtime: Runtime
    place: NodePlace
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    what: What = PACK

    @property
    def where(self) -> str:
        return self.place.packed_dir

    @property
    def node(self) -> str:
        return self.role

    @property
    def key(self) -> str:
        return "HEAD_PACKED_DIR" if self.role == "head" else "WORKER_PACKED_DIR"

    @property
    def _paths(self) -> Mapping[str, str]:
        source = self.place.model_dir if self.what.source == "model" else self.place.engram_dir
        return {PACKED: self.place.packed_dir, INSIDE[self.what.source]: source}

    def run(
        self, extra: Sequence[str], line: Callable[[str], None], stop: threading.Event
    ) -> Ended:
        # A launcher that was killed leaves its packer at work; what it wrote is kept.
        if self.runtime.inspect(self.role).running:
            self.runtime.stop(self.role, GRACE)
        launch = uuid.uuid4().hex[:12]
        words = argv("python3", INSIDE[self.what.source], PACKED, self.rank, extra, self.what)
        rank = Rank(self.rank, self.role, self.role, words, {"SPARK_LAUNCH_ID": launch}, {}, {})
        try:
            self.runtime.start(rank, launch)
            return self._follow(line, stop)
        finally:
            self._end(stop)

    def _end(self, stop: threading.Event) -> None:
        """Remove the container; the runtime saves its log. What cannot be reached is asked again:
        Ctrl-C in a terminal ends the ssh under an open connection, too."""
        until = self.clock() + INSIST
        while (status := self.runtime.stop(self.role, GRACE)).state == "unreachable":
            if self.clock() > until:
                if stop.is_set():
                    raise LauncherError(
                        f"its packer could not be ended: {status.note}",
                        "a node that answers",
                        "nothing is lost: it goes on by itself, and the next"
                        f" ./start.sh {self.what.verb} ends it or finds it done",
                    )
                return
            self.sleep(POLL)

    def _follow(self, line: Callable[[str], None], stop: threading.Event) -> Ended:
        heard = self.clock()
        while True:
            status = self.runtime.inspect(self.role)  # before its last lines are read
            for text in self.runtime.lines(self.role):
                line(translated(text, self._paths))
            if status.state != "unreachable":
                heard = self.clock()
                if not status.running:
                    return Ended(None if status.signal else status.exit_code, status.ending())
            elif self.clock() - heard > LOST:
                raise LauncherError(
                    f"its packer cannot be seen for {LOST:.0f} s: {status.note}",
                    "a node that answers",
                    "./start.sh doctor tells what is wrong; the packer goes on by itself if it can,"
                    f" and the next ./start.sh {self.what.verb} ends it or finds it done",
                )
            if stop.is_set():
                return Ended(None, "was stopped")
            self.sleep(POLL)
