"""A copy on the worker as ZFS datasets: a snapshot of the head's, sent whole or as what changed."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.clock import folder as stamp
from launcher.commands import rsync, zfs
from launcher.commands.zfs import Snapshot, Tool
from launcher.errors import LauncherError
from launcher.facts.base import gib
from launcher.findings import Finding, refuse
from launcher.image import pipe
from launcher.nodes.base import Done, Node
from launcher.weights.backend import STEP, Mounts, Work, copies_wrong
from launcher.weights.manifest import Role
from launcher.weights.pace import Pace
from launcher.weights.proof import NAMES

ASK = 60.0  # seconds for an answer of zfs
#: What zfs says where its kernel module, or the daemon of zfs-fuse, is not running.
ABSENT = ("modules are not loaded", "zfs-fuse daemon", "/dev/zfs", "modprobe zfs")
BEAT = 0.5  # seconds between two progress lines
DATASETS = {
    "model": ("ZFS_HEAD_MODEL_DS", "ZFS_WORKER_MODEL_DS", "dsv41-exl3"),
    "engram": ("ZFS_HEAD_ENGRAM_DS", "ZFS_WORKER_ENGRAM_DS", "dsv41-engram"),
}


@dataclass(frozen=True)
class Zfs:
    work: Work
    name: str = field(default="zfs", init=False)

    def mounts(self) -> Mounts:
        return Mounts()

    def wrong(self) -> list[Finding]:
        return copies_wrong(self.work, "./start.sh without SKIP_SYNC=1 sends the head's datasets")

    def amiss(self) -> list[Finding]:
        return self.wrong()

    def datasets(self, role: Role) -> tuple[str, str]:
        """Of the head and of the worker."""
        text = self.work.settings.text
        head, worker, usual = DATASETS[role]
        ours = text(head) or f"{text('ZFS_POOL')}/{usual}"
        return ours, text(worker) or ours

    def obstacles(self) -> list[Finding]:
        work = self.work
        found: list[Finding] = []
        for part in work.manifest.parts:
            ours, theirs = self.datasets(part.role)
            source, target = work.sources[part.role], work.targets[part.role]
            try:
                here = _tool(work.head)
                told = _get(work.head, here, ours, "mountpoint")
                if told is None or _real(work.head, told["mountpoint"]) != _real(work.head, source):
                    where = "there is none" if told is None else f"it is at {told['mountpoint']}"
                    found.append(
                        _finding(
                            f"the head's dataset {ours} does not hold the"
                            f" {NAMES[part.role]} {source}: {where}",
                            f"zfs create -p -o mountpoint={shlex.quote(source)} {ours} before the"
                            f" download; {DATASETS[part.role][0]} names another",
                        )
                    )
                    continue
                there = _tool(work.worker)
                parent = theirs.rpartition("/")[0]
                pool = _get(work.worker, there, theirs, "available")
                base = pool or _get(work.worker, there, parent, "available")
                if base is None:
                    found.append(
                        _finding(
                            f"the worker has no dataset {parent}",
                            f"on the worker: zpool list; ZFS_POOL and {DATASETS[part.role][1]}"
                            " name what is received into",
                        )
                    )
                    continue
                found += self._foreign(part.role, here, there, target, pool is not None)
                common = self._common(part.role, here, there)
                if common is None and int(base["available"]) < part.size:
                    found.append(
                        _finding(
                            f"the worker's {parent} has {gib(int(base['available']))} free, and"
                            f" {gib(part.size)} are to come",
                            "free some space there",
                        )
                    )
            except LauncherError as error:
                found.append(_finding(error.found, error.do_next))
        return found

    def bring(self) -> None:
        refuse(self.obstacles())
        for part in self.work.manifest.parts:
            self._send(part.role)

    # -- one dataset

    def _foreign(
        self, role: Role, here: Tool, there: Tool, target: str, exists: bool
    ) -> list[Finding]:
        """A dataset of the worker that shares no snapshot with the head's may hold anything."""
        if not exists or self._common(role, here, there) is not None:
            return []
        theirs = self.datasets(role)[1]
        return [
            _finding(
                f"the worker's dataset {theirs} shares no snapshot with the head's, and may hold"
                " what nobody has elsewhere",
                f"look at it, then on the worker: sudo zfs destroy -r {theirs}",
            )
        ]

    def _common(self, role: Role, here: Tool, there: Tool) -> Snapshot | None:
        ours, theirs = self.datasets(role)
        return zfs.newest_common(
            _snapshots(self.work.head, here, ours), _snapshots(self.work.worker, there, theirs)
        )

    def _send(self, role: Role) -> None:
        work = self.work
        ours, theirs = self.datasets(role)
        here, there = _tool(work.head), _tool(work.worker)
        common = self._common(role, here, there)
        name = f"{work.settings.text('ZFS_SNAP_PREFIX')}-{stamp(time.time())}"
        taken = {each.name for each in _snapshots(work.head, here, ours)}
        while name in taken:
            name += "x"
        _must(work.head, zfs.snapshot(here, ours, name))
        last = _snapshots(work.head, here, ours)[-1]
        if common is not None:
            behind = _snapshots(work.worker, there, theirs)
            mine = next(each for each in behind if each.guid == common.guid)
            _must(work.worker, zfs.rollback(there, mine))  # what was changed there since
        told = "what changed since " + common.name if common else "all of it"
        work.console.say(f"  {NAMES[role]}: {ours} to {theirs}, {told}")
        work.record.event(
            STEP, "sending", dataset=ours, snapshot=name, since=common and common.name
        )
        try:
            self._stream(zfs.send(here, last, common), zfs.receive(there, theirs), ours, here)
        except LauncherError:
            work.head.run(zfs.destroy(here, last), timeout=ASK)
            raise
        self._place(role, there, theirs)
        for node, tool, dataset in ((work.head, here, ours), (work.worker, there, theirs)):
            prefix = work.settings.text("ZFS_SNAP_PREFIX")
            for old in zfs.outdated(_snapshots(node, tool, dataset), prefix, [last.guid]):
                node.run(zfs.destroy(tool, old), timeout=ASK)  # one more is no harm

    def _stream(
        self, send: Sequence[str], receive: Sequence[str], dataset: str, tool: Tool
    ) -> None:
        work = self.work
        words = [*self._ssh(), shlex.join(receive)]
        told = _get(work.head, tool, dataset, "used") or {}
        pace, since = Pace(int(told.get("used", "0") or 0)), work.console.now()
        beat = [0.0]

        def tick(moved: int) -> None:
            now = time.monotonic()
            if now - beat[0] >= BEAT:
                beat[0] = now
                work.console.progress(pace.told(moved, now), since)

        ended = pipe.through(send, words, tick)
        if not ended.well:
            raise LauncherError(
                f"zfs send | recv of {dataset} ended with {ended.statuses}: "
                + (ended.said[1] or ended.said[0] or "nothing was said"),
                "a stream received whole: what came of it is discarded by the worker",
                "mend what zfs says (rights: zfs allow, or sudo -n zfs), then ./start.sh again",
            )

    def _ssh(self) -> list[str]:
        """ssh to who receives: ZFS_SSH, else the worker, at ZFS_WORKER_IP where that is set. There
        it is still the worker, with its account and its host key, by another cable."""
        work, text = self.work, self.work.settings.text
        to = work.worker.destination()  # writes the configuration that ssh reads
        endpoint, config, more = work.worker.endpoint, work.worker.config, []
        if text("ZFS_SSH"):
            user, _, host = text("ZFS_SSH").rpartition("@")
            endpoint = replace(endpoint, host=host, user=user or endpoint.user)
            config = work.worker.folder / "zfs-config"
            config.write_text(endpoint.config(work.worker.include))
        elif text("ZFS_WORKER_IP"):
            more = ["-o", f"HostName={text('ZFS_WORKER_IP')}", "-o", f"HostKeyAlias={to.known_as}"]
        *words, host = endpoint.ssh(config)  # options stand before the host
        return [*words, *rsync.FAST, *more, host]

    def _place(self, role: Role, there: Tool, theirs: str) -> None:
        """Mounted where the worker's containers take it from, to be read only."""
        work, where = self.work, self.work.targets[role]
        told = _get(work.worker, there, theirs, "mountpoint", "mounted", "readonly") or {}
        if told.get("mountpoint") != where or told.get("readonly") != "on":
            for words in zfs.settle(there, theirs, where):
                _must(work.worker, words)
        told = _get(work.worker, there, theirs, "mounted") or {}
        if told.get("mounted") != "yes":
            _must(work.worker, zfs.mount(there, theirs))


def _tool(node: Node) -> Tool:
    """How zfs is called there, with the rights to change something. Raises LauncherError."""
    root = node.run(["id", "-u"], timeout=20).text.strip() == "0"
    for tool in zfs.TOOLS:
        if node.run(["sh", "-c", 'command -v "$1"', "sh", tool[0]], timeout=20).status:
            continue
        if root:
            return tool
        by_sudo = zfs.by_sudo(tool)
        sudo = node.run(["sh", "-c", "command -v sudo"], timeout=20).status == 0
        if sudo and node.run([*by_sudo, "list", "-H", "-o", "name"], timeout=ASK).status == 0:
            return by_sudo
        return tool  # delegated by zfs allow, perhaps: zfs itself says what is not
    raise LauncherError(
        f"the {node.name} has no zfs",
        "ZFS on both nodes",
        f"on the {node.name}: sudo apt install zfsutils-linux; or WEIGHT_SYNC=nfs",
    )


def _get(node: Node, tool: Tool, dataset: str, *properties: str) -> dict[str, str] | None:
    done = node.run(zfs.get(tool, dataset, *properties), timeout=ASK)
    if done.status:
        if "does not exist" in done.last(3):
            return None
        raise _failed(node, done)
    return zfs.values(done.text)


def _snapshots(node: Node, tool: Tool, dataset: str) -> tuple[Snapshot, ...]:
    done = node.run(zfs.snapshots(tool, dataset), timeout=ASK)
    if done.status:
        if "does not exist" in done.last(3):
            return ()
        raise _failed(node, done)
    return zfs.listed(done.text, dataset)


def _must(node: Node, argv: Sequence[str]) -> None:
    done = node.run(argv, timeout=ASK)
    if done.status:
        raise _failed(node, done)


def _failed(node: Node, done: Done) -> LauncherError:
    found = f"{shlex.join(done.argv[:6])} on the {node.name} failed: {done.last(2)}"
    if any(word in done.last(9) for word in ABSENT):
        return LauncherError(
            found,
            "ZFS that runs on both nodes",
            f"on the {node.name}: sudo apt install zfsutils-linux, sudo modprobe zfs; or"
            " WEIGHT_SYNC=nfs",
        )
    return LauncherError(
        found,
        "rights for it: as root, by sudo without a password, or by zfs allow",
        f"on the {node.name}: sudo zfs allow $USER send,snapshot,receive,create,mount,rollback,"
        "destroy,mountpoint,readonly DATASET; mounting needs root or sudo",
    )


def _real(node: Node, path: str) -> str:
    return node.run(["realpath", "-m", "--", path], timeout=20).text.strip() or str(Path(path))


def _finding(found: str, mend: str) -> Finding:
    return Finding(found, "datasets of both nodes for zfs send | recv", mend, topic="weights")
