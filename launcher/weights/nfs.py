"""The worker mounts the head's directories over the link: nothing is copied."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from launcher.commands import nfs
from launcher.commands.container import ENGRAM, MODEL, OWNER
from launcher.commands.nfs import Export, Volume
from launcher.errors import LauncherError
from launcher.findings import Finding, refuse, stopping
from launcher.nodes.base import Node
from launcher.weights import proof, volumes
from launcher.weights.backend import STEP, Mounts, Work
from launcher.weights.exporter_image import ExporterImage, image_id, out_of_reach
from launcher.weights.manifest import Role
from launcher.weights.readable import more_under, unreadable

READY = 20.0  # seconds for an exporter to listen
READ = 120.0  # seconds for both ends of some fifty files
ASK = 20.0
TARGETS: Mapping[Role, str] = {"model": MODEL, "engram": ENGRAM}


@dataclass(frozen=True)
class Nfs:
    work: Work
    ready: float = READY
    read: float = READ
    shut: Callable[[str], str] = out_of_reach  # of an image's name: why it cannot be pulled
    name: str = field(default="nfs", init=False)

    @property
    def export(self) -> Export:
        work, text = self.work, self.work.settings.text
        root = str(work.cache_root / "nfs-export")
        if text("NFS_EXPORT_ROOT"):
            root = str(work.settings.path("NFS_EXPORT_ROOT"))
        names: dict[Role, str] = {
            "model": text("NFS_EXPORT_MODEL"),
            "engram": text("NFS_EXPORT_ENGRAM"),
        }
        return Export(
            root=root,
            directories={names[role]: work.sources[role] for role in names},
            address=self.server,
            clients=nfs.clients(text("NFS_CLIENTS"), self.server, work.prefix),
            options=text("NFS_OPTS"),
        )

    @property
    def server(self) -> str:
        return self.work.settings.text("NFS_SERVER_IP") or self.work.address

    @property
    def _image(self) -> ExporterImage:
        return ExporterImage(self.work, self.shut)

    @property
    def _on_host(self) -> bool:
        return self.work.settings.flag("HOST_NFS")

    def mounts(self) -> Mounts:
        text = self.work.settings.text
        how = text("NFS_OPTS_CLIENT")

        def volume(kind: str) -> Volume:
            return Volume.of(
                text(f"NFS_VOLUME_{kind}"), self.server, text(f"NFS_EXPORT_{kind}"), how
            )

        return Mounts({"model": volume("MODEL"), "engram": volume("ENGRAM")})

    def obstacles(self) -> list[Finding]:
        found = [*unreadable(self.work), *more_under(self.export), *self._foreign()]
        for volume in self.mounts().volumes.values():
            found += volumes.not_ours(self.work.worker, volume, self.work.owner)
        if stopping(found) or self._on_host:
            return found
        there = _inspect(self.work.head, self.work.settings.text("NFS_CONTAINER"))
        return found if self._serves(there) else [*found, *self._image.no_base()]

    def bring(self) -> None:
        refuse(self.obstacles())
        work = self.work
        work.head.run(["mkdir", "-p", *_points(self.export)], timeout=30)
        self._export_on_host() if self._on_host else self._export()
        self._await()
        force = work.settings.flag("FORCE_SYNC")
        for volume in self.mounts().volumes.values():
            if volumes.make(work.worker, volume, again=force):
                work.record.event(STEP, "volume", name=volume.name, **volume.options)
                work.console.say(f"  volume {volume.name} on the worker is made")

    def amiss(self) -> list[Finding]:
        # The reading is done in the image, where the worker has it.
        has_it = image_id(self.work.worker, self.work.settings.text("IMAGE"))
        return self.wrong() if has_it else self._not_served()

    def wrong(self) -> list[Finding]:
        work = self.work
        found = self._not_served()
        if found:
            return found
        for role, volume in self.mounts().volumes.items():
            since = work.console.now()
            work.console.progress(f"the worker reads {volume.name}", since)
            found += self._read(role, volume)
        return found

    def _not_served(self) -> list[Finding]:
        found: list[Finding] = []
        for volume in self.mounts().volumes.values():
            found += volumes.unequal(self.work.worker, volume)
        return found or self._silent()

    # -- the exporter

    def _export(self) -> None:
        work, export = self.work, self.export
        name = work.settings.text("NFS_CONTAINER")
        there = _inspect(work.head, name)
        if self._serves(there):
            return
        if there is not None:
            work.console.say(f"  the exporter {name} is made anew")
        self._image.build()  # which may fail: what serves a mount is ended after it
        if there is not None:
            self._end(name)
        done = work.head.run(nfs.exporter(export, self._image.name, name, work.owner), timeout=60)
        if done.status:
            self._end(name)
            raise LauncherError(
                f"the exporter {name} did not start: {done.last(3)}",
                "a container that may export by this kernel's NFS server",
                "mend what Docker says; HOST_NFS=1 exports by the head's own nfs-server instead,"
                " WEIGHT_SYNC=rsync copies",
            )
        work.record.event(STEP, "exporter", name=name, exports=export.text())
        told = f"{', '.join(export.directories)} to {' '.join(export.clients)}"
        work.console.say(f"  the exporter {name} exports {told}")

    def _serves(self, there: Mapping[str, Any] | None) -> bool:
        """Whether this container is the exporter as it is to be."""
        if there is None or there["state"] != "running":
            return False
        same = there["labels"].get(nfs.DESCRIPTION) == self.export.mark()
        return bool(same and there["image"] == image_id(self.work.head, self._image.name))

    def _end(self, name: str) -> None:
        for words in nfs.end(name):
            self.work.head.run(words, timeout=60)

    def _export_on_host(self) -> None:
        """By the head's own server. What needs root is done by root or sudo."""
        work, name = self.work, self.work.settings.text("NFS_CONTAINER")
        commands = nfs.on_host(self.export, name)
        root = os.geteuid() == 0
        if not self._may_export():
            return  # done by hand earlier; the worker's reading will tell
        if _inspect(work.head, name) is not None:  # ours, or it would be in the way
            work.console.say(f"  the exporter {name} is ended: HOST_NFS=1")
            self._end(name)
        for words in commands:
            done = work.head.run(words if root else ("sudo", "-n", *words), timeout=60)
            if done.status:
                raise LauncherError(
                    f"{shlex.join(words)} failed on the head: {done.last(3)}",
                    "the head's own nfs-server, as HOST_NFS=1 wants it",
                    "sudo apt install nfs-kernel-server; or HOST_NFS=0, which exports from a"
                    " container",
                )

    def _may_export(self) -> bool:
        done = ["sh", "-c", '[ "$(id -u)" = 0 ] || sudo -n true']
        return self.work.head.run(done, timeout=ASK).status == 0

    def _no_rights(self) -> list[Finding]:
        """What keeps the head's own server from being used: rights, or that there is none."""
        if not self._may_export():
            if not self._silent():
                return []
            commands = nfs.on_host(self.export, self.work.settings.text("NFS_CONTAINER"))
            return [
                Finding(
                    "HOST_NFS=1, and this account may not change the head's exports",
                    "these commands, once after each boot of the head (apt install"
                    f" nfs-kernel-server before):\n{nfs.as_root(commands)}",
                    "run them on the head, then this again",
                    topic="weights",
                )
            ]
        there = ["sh", "-c", "PATH=$PATH:/usr/sbin:/sbin; command -v exportfs"]
        if self.work.head.run(there, timeout=ASK).status == 0:
            return []
        return [
            Finding(
                "HOST_NFS=1, and the head has no exportfs",
                "the head's own nfs-server",
                "on the head: sudo apt install nfs-kernel-server; HOST_NFS=0 needs none",
                topic="weights",
            )
        ]

    def _await(self) -> None:
        """Until the worker can open a connection to the server."""
        end = time.monotonic() + self.ready
        while found := self._silent():
            if time.monotonic() > end or not self._lives():
                raise LauncherError(found[0].found + self._last(), found[0].needed, found[0].mend)
            time.sleep(0.5)

    def _lives(self) -> bool:
        if self._on_host:
            return True
        there = _inspect(self.work.head, self.work.settings.text("NFS_CONTAINER"))
        return there is not None and there["state"] == "running" and not there["restarts"]

    def _last(self) -> str:
        if self._on_host:
            return ""
        name = self.work.settings.text("NFS_CONTAINER")
        done = self.work.head.run(["docker", "logs", "--tail", "3", name], timeout=ASK)
        return f" (the exporter said: {done.last(3)})"

    def _silent(self) -> list[Finding]:
        """Whether no server answers the worker. A mount of a dead one would wait for minutes."""
        done = self.work.worker.run(nfs.answers(self.server, 5.0), timeout=ASK)
        if done.status == 0:
            return []
        name = self.work.settings.text("NFS_CONTAINER")
        look = "systemctl status nfs-server" if self._on_host else f"docker logs {name}"
        return [
            Finding(
                f"no NFS server answers the worker at {self.server}:{nfs.PORT}: {done.last(1)}",
                "the export on the head within the worker's reach",
                f"on the head: {look}; ./start.sh share exports anew, beside a pair that serves;"
                " a mount that hangs goes on when the server is back",
                topic="weights",
            )
        ]

    # -- looking

    def _foreign(self) -> list[Finding]:
        """Whose exporter is in the way: there is one NFS server in a kernel. Never adopted."""
        work = self.work
        name = work.settings.text("NFS_CONTAINER")
        there = _inspect(work.head, name)
        if there is not None and there["labels"].get(nfs.OWNER) != work.owner:
            whose = there["labels"].get(nfs.OWNER) or "no launcher"
            mend = f"set another NFS_CONTAINER in .env, or on the head: docker rm -f {name}"
            if OWNER in there["labels"]:  # a rank, which may serve
                whose, mend = f"{there['labels'][OWNER]}: no exporter", "set another NFS_CONTAINER"
            return [_finding(f"the head has a container {name}, of {whose}", mend)]
        if self._on_host:
            return self._no_rights()
        if there is not None and there["state"] == "running":
            return []
        listening = work.head.run(
            ["sh", "-c", "cat /proc/net/tcp /proc/net/tcp6 2>/dev/null; true"], timeout=ASK
        ).text
        held = nfs.listening(listening)
        if not held:
            return []
        others = _likely(work.head)
        if others:
            told = ", ".join(others)
            return [
                _finding(
                    f"port {nfs.PORT} of the head is held, it seems by the container {told}",
                    f"end it if it is not needed: docker stop {shlex.join(others)}; or HOST_NFS=1,"
                    " or WEIGHT_SYNC=rsync",
                )
            ]
        if held == {self.server}:
            return []  # a killed exporter leaves it so; the next one knows whether it was ours
        return [
            _finding(
                f"port {nfs.PORT} of the head is held, it seems by its own nfs-server",
                "HOST_NFS=1 exports by it; or sudo systemctl disable --now nfs-server",
            )
        ]

    def _read(self, role: Role, volume: Volume) -> list[Finding]:
        work = self.work
        part = work.manifest.part(role)
        inside = volumes.Through(
            work.worker, volume, TARGETS[role], work.settings.text("IMAGE"), work.owner, self.read
        )
        where = f"volume {volume.name} ({self.server}:/{_directory(volume)})"
        mend = (
            f"./start.sh share exports anew; on the head: ls -lL"
            f" {shlex.quote(work.sources[role])}: files must be readable by all (chmod -R a+rX)"
        )
        try:
            faults = proof.prove(cast(Node, inside), TARGETS[role], part, "ends", timeout=self.read)
        except LauncherError as error:
            raise LauncherError(
                f"the worker could not read the {proof.NAMES[role]} through the {where}:"
                f" {error.found}",
                f"first and last bytes of its {len(part.entries)} files within {self.read:g} s",
                "see docker logs of the exporter on the head and dmesg of the worker; a kernel"
                " without NFS: sudo modprobe nfs. A hung mount goes on when the server is back:"
                " ./start.sh share",
            ) from error
        return proof.findings("worker", role, where, faults, mend)


def _directory(volume: Volume) -> str:
    return volume.options["device"].lstrip(":/")


def _points(export: Export) -> list[str]:
    return [export.root, *(f"{export.root}/{name}" for name in export.directories)]


def _finding(found: str, mend: str) -> Finding:
    needed = f"port {nfs.PORT} and that name for the exporter of this checkout; others are left"
    return Finding(found, needed, mend, topic="weights")


def _inspect(node: Node, name: str) -> dict[str, Any] | None:
    done = node.run(["docker", "container", "inspect", name], timeout=ASK)
    if done.status:
        if "no such container" in done.last(3).lower():
            return None
        raise LauncherError(
            f"Docker on the {node.name} cannot be asked for {name}: {done.last(2)}",
            "a Docker daemon that answers",
            f"on the {node.name}: docker ps",
        )
    found = json.loads(done.text)[0]
    return {
        "state": found["State"]["Status"],
        "restarts": int(found.get("RestartCount", 0)),
        "labels": found["Config"].get("Labels") or {},
        "image": found["Image"],
    }


def _likely(node: Node) -> list[str]:
    """Running containers that look like exporters of NFS."""
    words = ["docker", "ps", "--no-trunc", "--format", "{{.Names}}\t{{.Image}} {{.Command}}"]
    rows = node.run(words, timeout=ASK).text.splitlines()
    return [row.split("\t")[0] for row in rows if "nfs" in row.lower() or "ganesha" in row.lower()]
