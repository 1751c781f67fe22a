"""The image of the NFS exporter, on the head: whether it is of this recipe, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launcher.commands import nfs
from launcher.errors import LauncherError
from launcher.findings import Finding
from launcher.image.store import ImageStore
from launcher.nodes.base import Node
from launcher.nodes.daemon import daemon
from launcher.weights.backend import STEP, Work

BUILD = 1800.0
ASK = 20.0
RECIPE = ("Dockerfile", "entrypoint.sh")


def out_of_reach(name: str) -> str:
    """Why the head's Docker could not pull it, "" if it could; nothing is pulled."""
    return ImageStore("head", lambda: daemon(None)).out_of_reach(name)


@dataclass(frozen=True)
class ExporterImage:
    work: Work
    shut: Callable[[str], str] = out_of_reach

    @property
    def name(self) -> str:
        return self.work.settings.text("NFS_IMAGE")

    @property
    def _folder(self) -> str:
        return str(self.work.folder / "docker" / "nfs")

    @property
    def _recipe(self) -> Mapping[str, bytes]:
        folder = self.work.folder / "docker" / "nfs"
        return {name: (folder / name).read_bytes() for name in RECIPE}

    def no_base(self) -> list[Finding]:
        """What can be seen now to keep `build` from ending well: where something is to be built,
        the base is there or can be pulled. Whether Debian's packages can be had is not asked."""
        if self._right():
            return []
        base = nfs.base(self._recipe["Dockerfile"].decode())
        if image_id(self.work.head, base):
            return []
        self.work.console.progress(f"asking for the base {base}", self.work.console.now())
        if not (wrong := self.shut(base)):
            return []
        return [
            Finding(
                f"the exporter's image {self.name} is to be built; its base {base} is not on the"
                f" head, and its Docker cannot pull it: {wrong}",
                "a base that is there, or can be pulled, once",
                f"on the head: docker pull {base}, or docker load it; HOST_NFS=1 needs no image,"
                " WEIGHT_SYNC=rsync neither",
                topic="weights",
            )
        ]

    def build(self) -> None:
        """Nothing where it is there. Raises LauncherError."""
        if self._right():
            return
        work = self.work
        since = work.console.now()
        work.console.say(f"  building the exporter's image {self.name}")
        built = work.head.run(
            nfs.build(self.name, nfs.recipe(self._recipe), self._folder),
            timeout=BUILD,
            line=lambda line: work.record.text(STEP, line),
            tick=lambda: work.console.progress(f"building {self.name}", since),
        )
        if built.status:
            raise LauncherError(
                f"the exporter's image {self.name} could not be built: {built.last(3)}",
                "its base and Debian's packages within reach, once",
                "see the log; HOST_NFS=1 needs no image, WEIGHT_SYNC=rsync neither",
            )

    def _right(self) -> bool:
        asked = ("--format", f'{{{{index .Config.Labels "{nfs.RECIPE}"}}}}', self.name)
        done = self.work.head.run(["docker", "image", "inspect", *asked], timeout=ASK)
        return done.status == 0 and done.text.strip() == nfs.recipe(self._recipe)


def image_id(node: Node, image: str) -> str:
    """The id of the node's image of that name; "" where there is none."""
    words = ["docker", "image", "inspect", "--format", "{{.Id}}", image]
    done = node.run(words, timeout=ASK)
    return done.text.strip() if done.status == 0 else ""
