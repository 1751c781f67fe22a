"""Brings the head's image to the worker, whole or not at all.

It travels under a name of its own; the worker's IMAGE becomes it when its layers there are those of
the head. What a broken transfer left on either node is gone on with.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher.commands import rsync
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.facts.base import gib
from launcher.facts.docker import Image
from launcher.findings import Finding, refuse
from launcher.image import identity, pipe, staged
from launcher.image.store import ImageStore
from launcher.nodes.base import Node
from launcher.nodes.ssh import SshNode
from launcher.record import Record

STEP = "image"
SILENCE = 30  # seconds without a byte, after which rsync gives up
LOAD = 3600.0  # seconds
#: rsync's ends by the way: a socket, the protocol's stream, a time limit, ssh itself.
BROKEN = (10, 12, 30, 35, 255)

# $1 is this account's alone; nobody else can have put a file or a link there.
_OURS = '[ -d "$1" ] && [ ! -L "$1" ] && [ -O "$1" ] && [ -w "$1" ]'
_FOLDER = 'mkdir -p -- "$(dirname -- "$1")" && (mkdir -m 700 -- "$1" 2>/dev/null || :) && ' + _OURS


@dataclass(frozen=True)
class Ship:
    """``folder`` is the head's for the tar, ``far`` the worker's; ``platform`` of the image."""

    head: Node
    worker: SshNode
    here: ImageStore
    there: ImageStore
    name: str
    platform: str
    folder: Path
    far: PurePosixPath
    keep: bool
    record: Record
    console: Console

    def ship(self, how: str, image: Image) -> None:
        """``how``: rsync, stream, or auto: rsync where there is room for the tar, else stream.
        Raises LauncherError; then the worker's IMAGE is what it was."""
        way, passed_over, short = self._way(how, image)
        for each in passed_over:
            self.console.warn(f"{each.found}; needed: {each.needed}; it is streamed")
        refuse(short)
        travelling = f"dsv41-ship:{identity.key(image.layers)}"
        self.here.tag(self.name, travelling)
        try:
            self._by_rsync(travelling, image) if way == "rsync" else self._by_stream(travelling)
            self._arrived(travelling, image)
        finally:
            self.here.untag(travelling)
        self.clean()

    def look_ahead(self, how: str, image: Image) -> None:
        """Raises LauncherError where there is no room for it."""
        refuse(self._way(how, image)[2])

    # -- the ways

    def _way(self, how: str, image: Image) -> tuple[str, list[Finding], list[Finding]]:
        """How it travels, what keeps auto from rsync, and what keeps it from travelling at all."""
        if how == "stream":
            return how, [], self._load_room(image)
        short = self._room(image)
        if short and how == "auto":
            return "stream", short, self._load_room(image)
        return "rsync", [], short

    def _by_rsync(self, travelling: str, image: Image) -> None:
        tar, target = self._tar, str(self._far)
        size = staged.reusable(tar, image.layers)
        since = self.console.now()
        if size is None:
            self.console.say(f"  saving the image to {tar}")
            argv = self._save_argv(travelling)
            size = staged.save(
                argv, tar, image.layers, lambda n: self.console.progress(f"saved {_gb(n)}", since)
            )
        there = self.worker.size(Path(target)) or 0
        rest = f", {_gb(min(there, size))} of it is there" if there else ""
        self.console.say(f"  copying {_gb(size)} to the worker, {target}{rest}")
        self.record.event(STEP, "copying", size=size, there=there, target=target)
        words = rsync.push(
            self.worker.endpoint, self.worker.config, [str(tar)], target,
            "--times", "--partial", "--inplace", f"--timeout={SILENCE}", "--chmod=F600",
            "--outbuf=N", "--info=progress2", fast=True,
        )  # fmt: skip
        since = self.console.now()

        def line(text: str) -> None:
            if told := re.match(r"\s*([\d,.]+)\s+(\d+)%\s+(\S+)", text):
                self.console.progress(f"copied {told[2]} %, {told[3]}", since)

        ended = pipe.follow(words, line)
        if not ended.well:
            raise self._not_copied(ended.statuses[0], ended.said[0], size)
        if (found := self.worker.size(Path(target))) != size:
            raise LauncherError(
                f"{target} on the worker has {found} bytes, the head's {tar} {size}",
                "equal copies",
                "./start.sh again: what is there is gone on with",
            )
        self.console.say("  loading it on the worker")
        done = self.worker.run(["docker", "load", "--quiet", "--input", target], timeout=LOAD)
        if done.status:
            said = done.last(5)
            if "no space left" not in said.lower():
                self.worker.remove(Path(target))  # whatever is wrong with it, copied anew
            raise self._not_loaded(said)

    def _by_stream(self, travelling: str) -> None:
        self.console.say("  streaming the image to the worker; broken off, it begins anew")
        since = self.console.now()
        *words, host = self.worker.endpoint.ssh(self.worker.config)
        load = (*words, *rsync.FAST, host, "docker load --quiet")
        ended = pipe.through(
            self._save_argv(travelling),
            load,
            lambda n: self.console.progress(f"streamed {_gb(n)}", since),
        )
        if not ended.well:
            # The load's words first: a save whose reader has gone says that alone.
            raise self._not_loaded(ended.said[1] or ended.said[0] or f"ended with {ended.statuses}")

    def _arrived(self, travelling: str, image: Image) -> None:
        found = self.there.find(travelling)
        if found is None or not identity.same(found, image):
            layers = () if found is None else found.layers
            self.there.untag(travelling)
            # Equal in size and time, rsync would keep them for ever.
            self.worker.remove(Path(self._far))
            staged.remove(self._tar)
            raise LauncherError(
                f"what the worker loaded is another image: "
                f"{identity.first_difference(image.layers, layers)}",
                "the head's layers on the worker, in the same order",
                f"./start.sh again saves and copies it anew; docker image inspect {self.name} on"
                " both nodes shows what is there (the worker's name was not moved)",
            )
        self.there.tag(travelling, self.name)
        self.there.untag(travelling)

    def clean(self) -> None:
        """Once the worker has the image by any way: take away what a copy that broke off has left
        of its tar on both nodes. Ours alone, by name, and by our folder or note beside it. What
        cannot be taken away is told; the image is there all the same."""
        parent = str(self._far.parent)
        try:
            if self.worker.run(["sh", "-c", _OURS, "sh", parent], timeout=30).status == 0:
                self.worker.remove(Path(self._far))
            if not self.keep:
                with contextlib.suppress(NotADirectoryError):  # a stream needs no folder
                    staged.discard(self._tar)
        except (OSError, LauncherError) as error:
            why = error.found if isinstance(error, LauncherError) else str(error)
            self.console.warn(f"what a broken-off copy may have left of the image stays: {why}")

    # -- places and room

    @property
    def _tar(self) -> Path:
        return self.folder / (re.sub(r"[^\w.-]", "_", self.name) + ".tar")

    @property
    def _far(self) -> PurePosixPath:
        return self.far / "dsv41-ship" / self._tar.name

    def _save_argv(self, travelling: str) -> list[str]:
        said = self.head.run(["docker", "save", "--help"], timeout=30).text
        asked = ["docker", "version", "--format", "{{.Client.APIVersion}}"]
        api = self.head.run(asked, timeout=30).text
        return staged.save_argv(travelling, self.platform, said, api)

    def _room(self, image: Image) -> list[Finding]:
        """What is short of space for the tar on both nodes, and for the loaded image."""
        found = []
        size = staged.reusable(self._tar, image.layers)
        if size is None:
            size = image.size
            need = size + _spare(size)
            staged.remove(self._tar)  # of another image; its room is free again
            if (free := self.head.free_bytes(self.folder)) < need:
                found.append(_short("head", str(self.folder), free, need, "IMAGE_SHIP_DIR"))
        parent = str(self._far.parent)
        done = self.worker.run(["sh", "-c", _FOLDER, "sh", parent], timeout=30)
        if done.status:
            return [
                *found,
                Finding(
                    f"{parent} on the worker cannot be used: {done.last(2) or 'it is not ours'}",
                    "a folder of this account there, for the image's tar",
                    "set WORKER_IMAGE_SHIP_DIR in .env to a directory of yours",
                    topic="disk",
                ),
            ]
        there = self.worker.size(Path(self._far)) or 0
        need = max(0, size - there) + _spare(size)
        if self._one_disk(parent):
            need += self._load_need(image)
        else:
            found += self._load_room(image)
        if (free := self.worker.free_bytes(Path(parent))) < need:
            found.append(_short("worker", parent, free, need, "WORKER_IMAGE_SHIP_DIR"))
        return found

    def _load_room(self, image: Image) -> list[Finding]:
        root = self.there.root()
        need = self._load_need(image)
        if (free := self.worker.free_bytes(Path(root))) < need:
            return [_short("worker", root, free, need, "")]
        return []

    def _load_need(self, image: Image) -> int:
        """Layers that are there are not stored again; the first ones are the large ones."""
        old = self.there.find(self.name)
        shared = old is not None and old.layers[:1] == image.layers[:1]
        return _spare(image.size) + (0 if shared else image.size)

    def _one_disk(self, folder: str) -> bool:
        done = self.worker.run(["stat", "-c", "%d", "--", folder, self.there.root()], timeout=30)
        return done.status == 0 and len(set(done.text.split())) == 1

    # -- what went wrong

    def _not_copied(self, status: int, said: str, size: int) -> LauncherError:
        if "no space left" in said.lower():
            return LauncherError(
                f"the worker's {self._far.parent} is full: {said}",
                f"{_gb(size)} there",
                "free some, or set WORKER_IMAGE_SHIP_DIR in .env to another disk; ./start.sh then "
                "goes on with what is there",
            )
        if status in BROKEN:
            return LauncherError(
                f"the copy to the worker broke off (rsync ended with {status}): {said}",
                "a link that holds",
                "./start.sh again: it goes on where it broke off",
            )
        return LauncherError(
            f"rsync to the worker ended with {status}: {said}",
            "rsync on both nodes, and rights to write there",
            f"mend what it says: {self._far.parent} on the worker; then ./start.sh goes on",
        )

    def _not_loaded(self, said: str) -> LauncherError:
        if "no space left" in said.lower():
            return LauncherError(
                f"the worker's Docker has no room for the image: {said}",
                f"space in {self.there.root()} on the worker",
                "on the worker: docker system df tells what is there, docker image prune frees it; "
                "./start.sh then goes on with what is there",
            )
        return LauncherError(
            f"the worker did not load the image: {said}",
            "a whole image, loaded by the worker's Docker",
            "./start.sh again; ./start.sh doctor tells what is wrong with the node",
        )


def _spare(size: int) -> int:
    return max(16 << 20, size // 5)


def _short(node: str, folder: str, free: int, need: int, key: str) -> Finding:
    mend = f"free some, or set {key} in .env to another disk" if key else "docker image prune there"
    return Finding(
        f"the {node} has {gib(free)} free in {folder}",
        f"{gib(need)} there for the image on its way",
        f"{mend}; IMAGE_SHIP=stream needs no room for a tar",
        topic="disk",
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
