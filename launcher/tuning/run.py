"""Runs the tuner on the head and brings what it found to both nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher.commands.container import LAUNCH, ROLE, Container, NodePlace, container_name
from launcher.console import Console
from launcher.deployment import Rank
from launcher.errors import LauncherError
from launcher.nodes.base import Node
from launcher.record import Record
from launcher.runtimes import throwaway
from launcher.runtimes.base import Runtime
from launcher.settings.values import Settings
from launcher.tuning import table
from launcher.tuning.table import Tuned

TUNER = "dsv41.tuner"  # the label with the owner: for a rank's launch it is not in the way
LIMIT = 1800.0  # seconds; about a minute on an H200
LAST = 8  # lines of what a tuner said that failed


def name_of(settings: Settings) -> str:
    return f"{container_name(settings, 'head')}-tune"


def tuner(rank: Rank, settings: Settings, place: NodePlace, owner: str) -> Container:
    """The GPU and nothing else: no weights, no network."""
    return Container(
        name=name_of(settings),
        image=settings.text("IMAGE"),
        argv=rank.argv,
        env=dict(rank.env),
        labels={LAUNCH: rank.env["SPARK_LAUNCH_ID"], ROLE: rank.role, TUNER: owner},
        mounts=(),
        devices=place.devices,
        gpus=place.gpus,
        ulimits=(),
        aside=True,
    )


@dataclass(frozen=True)
class Tuning:
    """``runtime`` makes the container that `tuner` describes; ``paths`` are the
    table's on each node."""

    runtime: Runtime
    nodes: Mapping[str, Node]
    paths: Mapping[str, PurePosixPath]
    record: Record
    console: Console

    def run(self) -> Tuned | None:
        """Measure, check, and write the table on both nodes; None where the rule is not beaten, and
        then neither has one. Raises LauncherError; then both have what they had."""
        since = self.console.now()

        def tell(line: str) -> None:
            self.record.text("tune", line)
            if not line.startswith(table.MARK):
                self.console.progress(line, since)

        self.console.say("measuring launches on the head's GPU; some minutes")
        ran = throwaway.run(self.runtime, "head", table.argv(), "the tuner", LIMIT, tell)
        if ran.ended:
            said = "\n".join(f"    {line}" for line in ran.lines[-LAST:])
            raise LauncherError(
                f"the tuner {ran.ended}" + (f":\n{said}" if said else ""),
                "a GPU that nothing else uses, and an image with the overlay's kernels for it",
                "./start.sh doctor shows who uses the GPU; nothing was changed",
                self.record.folder / "log.txt",
            )
        try:
            found = table.of_lines(ran.lines)
        except table.NoTable as error:
            raise LauncherError(
                f"the tuner ended well, but {error}",
                "an overlay in the image of the launcher's own version",
                "./start.sh brings the image up to date; nothing was changed",
                self.record.folder / "log.txt",
            ) from error
        self._place(found)
        return found

    def _place(self, found: Tuned | None) -> None:
        """The worker first: a pair whose head has no table, or another, is told and not started."""
        for role in ("worker", "head"):
            path = Path(self.paths[role])
            if found is None:
                self.nodes[role].remove(path)
            else:
                self.nodes[role].write(path, found.text)
        self.record.event("tune", "placed", digest=found.digest if found else "")
