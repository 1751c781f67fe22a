"""A copy on the worker by several rsyncs at once; each file is summed there while others travel."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.commands import rsync
from launcher.errors import LauncherError
from launcher.facts.base import gib
from launcher.findings import Finding, refuse
from launcher.image import pipe
from launcher.image.pipe import Ended
from launcher.weights import proof, replaced
from launcher.weights.backend import STEP, Mounts, Work
from launcher.weights.lanes import calls, lanes
from launcher.weights.manifest import Entry, Part, Role
from launcher.weights.pace import Pace, size
from launcher.weights.proof import NAMES, Fault, Memory, Row

SPARE = 1 << 30  # bytes to be left on a disk that is written to
SUMMING = 2  # files summed at once on the worker
KEYS: Mapping[Role, str] = {"model": "WORKER_MODEL_DIR", "engram": "WORKER_ENGRAM_DIR"}
LOOK = 0.5  # seconds between two progress lines
AGAIN = "./start.sh again goes on with what is there"
UNREADABLE = "see ls -lL and dmesg there; what cannot be read, take away, then ./start.sh again"


@dataclass(frozen=True)
class Rsync:
    work: Work
    name: str = field(default="rsync", init=False)
    follow: Callable[[Sequence[str], Callable[[str], None]], Ended] = pipe.follow

    def obstacles(self) -> list[Finding]:
        found = []
        for node in (self.work.head, self.work.worker):
            if node.run(["sh", "-c", "command -v rsync"], timeout=20).status:
                found.append(
                    Finding(
                        f"the {node.name} has no rsync",
                        "rsync on both nodes",
                        f"on the {node.name}: sudo apt install rsync",
                        topic="weights",
                    )
                )
        if not found:
            found += self._no_directory() or self._room(self._looked())
        return found

    def _no_directory(self) -> list[Finding]:
        """Where no directory can be: a file has its name, or that of one above it."""
        ask = 'p=$1; while [ ! -e "$p" ]; do p=$(dirname -- "$p"); done; test -d "$p" || echo "$p"'
        found = []
        for role, where in self.work.targets.items():
            done = self.work.worker.run(["sh", "-c", ask, "sh", where], timeout=20)
            if there := done.text.strip():
                found.append(
                    Finding(
                        f"{KEYS[role]} is {where}, and {there} of the worker is no directory",
                        f"a directory for the {NAMES[role]}, there or to be made",
                        f"set {KEYS[role]} in .env to one, or move {there} away on the worker",
                        topic="weights",
                    )
                )
        return found

    def mounts(self) -> Mounts:
        return Mounts()

    def wrong(self) -> list[Finding]:
        """Every checksum; one that was made of a file of that size and time is remembered."""
        mend = f"./start.sh without SKIP_SYNC=1 copies them; {AGAIN}"
        found: list[Finding] = []
        for part in self.work.manifest.parts:
            where = self.work.targets[part.role]
            part = self._with_sums(part)
            bad = self._sum(part, part.entries, f"checksums of the worker's {NAMES[part.role]}")
            found += proof.findings("worker", part.role, where, bad, mend)
        return found

    def amiss(self) -> list[Finding]:
        return self.wrong()

    def bring(self) -> None:
        work = self.work
        looked = self._looked()
        refuse(self._room(looked))
        for part in work.manifest.parts:
            rows = looked[part.role]
            part = self._with_sums(part)
            force = work.settings.flag("FORCE_SYNC")
            bad = self._unequal(part, rows, force)
            where = work.targets[part.role]
            if not bad:
                work.console.say(f"  {NAMES[part.role]}: {where} on the worker is whole")
                continue
            wrong = self._wrong_here(part, rows, bad, force)
            shut = [fault for fault in wrong if fault.state == "unreadable"]
            refuse(proof.findings("worker", part.role, where, shut, UNREADABLE))
            self._make(where)
            self._see_to(part, where, wrong, force)
            self._copy(part, [fault.entry for fault in bad], where, rows, force)

    # -- what is there

    def _looked(self) -> dict[Role, list[Row]]:
        """Sizes of the worker's files."""
        work = self.work
        return {
            part.role: proof.look(work.worker, work.targets[part.role], part.entries, "sizes")
            for part in work.manifest.parts
        }

    def _unequal(self, part: Part, rows: Sequence[Row], force: bool) -> list[Fault]:
        """Files that are to be copied: of another size, or with other bytes."""
        pairs = list(zip(part.entries, rows, strict=True))
        if force:
            return [Fault(entry, row) for entry, row in pairs]
        bad = [Fault(entry, row) for entry, row in pairs if row.state != "ok"]
        there = [entry for entry, row in pairs if row.state == "ok"]
        return bad + self._sum(part, there, "checksums on the worker")

    def _sum(
        self, part: Part, entries: Sequence[Entry], what: str = "", fresh: bool = False
    ) -> list[Fault]:
        """Sum files on the worker; those that are not right. ``fresh``: whatever is remembered."""
        if not entries:
            return []
        work = self.work
        few = replace(part, entries=tuple(entries))
        pace = Pace(few.size)

        def progress(done: int, total: int) -> None:
            if what:
                work.console.progress(f"{what}: {pace.told(done, time.monotonic())}")

        where = work.targets[part.role]
        memory = Memory(work.memory.path, fresh)
        return proof.prove(work.worker, where, few, "sums", memory, progress=progress)

    def _with_sums(self, part: Part) -> Part:
        """With the head's sums, where the manifest was made from a tree."""
        if all(entry.digest for entry in part.entries):
            return part
        work = self.work
        where = work.sources[part.role]
        work.console.progress(f"checksums of {where}")
        return proof.summed(part, proof.look(work.head, where, part.entries, "sums", work.memory))

    def _room(self, looked: dict[Role, list[Row]]) -> list[Finding]:
        """A finding for each of the worker's file systems that is too small; what is there of a
        file counts."""
        work = self.work
        needed: dict[str, int] = {}
        free: dict[str, tuple[str, int]] = {}
        for part in work.manifest.parts:
            where = work.targets[part.role]
            rows = zip(part.entries, looked[part.role], strict=True)
            missing = sum(max(0, entry.size - max(0, row.size)) for entry, row in rows)
            disk = self._disk(where)
            needed[disk] = needed.get(disk, 0) + missing
            free.setdefault(disk, (where, work.worker.free_bytes(Path(where))))
        return [
            Finding(
                f"the worker has {gib(free[disk][1])} free for {free[disk][0]}",
                f"{gib(need + SPARE)} there, for what is still to be copied",
                "free some space there, or set WORKER_MODEL_DIR and WORKER_ENGRAM_DIR to another"
                " disk; WEIGHT_SYNC=nfs needs none",
                topic="disk",
            )
            for disk, need in needed.items()
            if need and need + SPARE > free[disk][1]
        ]

    def _disk(self, path: str) -> str:
        """What tells file systems of the worker apart."""
        ask = 'p=$1; while [ ! -e "$p" ]; do p=$(dirname -- "$p"); done; stat -c %d -- "$p"'
        return self.work.worker.run(["sh", "-c", ask, "sh", path], timeout=20).text.strip()

    # -- the copying

    def _make(self, where: str) -> None:
        done = self.work.worker.run(["mkdir", "-p", "--", where], timeout=30)
        if done.status:
            raise LauncherError(
                f"{where} cannot be made on the worker: {done.last(2)}",
                "directories that the worker's account may make and write",
                f"on the worker: sudo mkdir -p {shlex.quote(where)} && sudo chown $USER"
                f" {shlex.quote(where)}; WORKER_MODEL_DIR and WORKER_ENGRAM_DIR name them",
            )

    def _wrong_here(
        self, part: Part, rows: Sequence[Row], bad: Sequence[Fault], force: bool
    ) -> list[Fault]:
        """What the worker has under a name of the manifest and is not that. With ``force`` the
        large files are compared by rsync alone."""
        wrong = [fault for fault in bad if fault.state not in ("ok", "missing")]
        if force:
            pairs = zip(part.entries, rows, strict=True)
            sized = [entry for entry, row in pairs if row.state == "ok"]
            small = [entry for entry in sized if entry.size <= replaced.SMALL]
            wrong += self._sum(part, small, fresh=True)
        return wrong

    def _see_to(self, part: Part, where: str, wrong: Sequence[Fault], force: bool) -> None:
        """Name what is wrong, keep copies of small files, and take away what cannot become right
        by adding to it."""
        work = self.work
        useless = [] if force else [each for each in wrong if each.row.size >= each.entry.size]
        for fault in wrong:
            work.record.event(STEP, "wrong", file=fault.name, state=fault.state)
            if force or fault in useless:
                work.console.warn(f"on the worker {fault}; it is copied anew")
            else:
                work.console.say(f"  on the worker {fault}; the rest is sent")
        folder = f"{work.far_cache_root}/replaced/{part.role}"
        ours = self._begun(part, wrong)
        replaced.keep(work.worker, where, folder, wrong, ours, work.console)
        for fault in useless:
            work.worker.remove(Path(where) / fault.name)

    def _begun(self, part: Part, wrong: Sequence[Fault]) -> list[Entry]:
        """The beginnings of small files, as long as what the worker has of them: a copy that broke
        off left those."""
        found = []
        for fault in wrong:
            size, name = fault.row.size, fault.name
            if 0 < size < min(fault.entry.size, replaced.SMALL + 1):
                ask = 'head -c "$1" -- "$2" | sha256sum'
                path = f"{self.work.sources[part.role]}/{name}"
                done = self.work.head.run(["sh", "-c", ask, "sh", str(size), path], timeout=60)
                found.append(Entry(name, size, sha256=done.text.split()[0]))
        return found

    def _copy(
        self, part: Part, entries: Sequence[Entry], where: str, rows: Sequence[Row], force: bool
    ) -> None:
        """All ``entries`` in streams. Raises LauncherError; what came is kept."""
        work = self.work
        shared = lanes(entries, work.settings.int("RSYNC_STREAMS"))
        had = {row.name: 0 if force else max(0, row.size) for row in rows}
        total = sum(max(0, entry.size - had.get(entry.name, 0)) for entry in entries)
        work.console.say(
            f"  {NAMES[part.role]}: {len(entries)} files, {size(total)} to copy to {where}, in"
            f" {len(shared)} streams"
        )
        work.record.event(STEP, "copying", role=part.role, files=len(entries), bytes=total)
        source = work.sources[part.role]
        moved = [0] * len(shared)
        stop = threading.Event()
        sums: list[Future[list[Fault]]] = []
        lock = threading.Lock()

        def lane(at: int, mine: Sequence[Entry], pool: ThreadPoolExecutor) -> None:
            before = 0
            for some in calls(mine):
                if stop.is_set():
                    return
                argv = rsync.bulk(
                    work.worker.endpoint, work.worker.config, source,
                    [entry.name for entry in some], where, again=force,
                )  # fmt: skip
                done = before

                def line(text: str, done: int = done) -> None:
                    if told := re.match(r"\s*([\d,.]+)\s+\d+%", text):
                        moved[at] = done + int(re.sub(r"\D", "", told[1]))

                ended = self.follow(argv, line)
                if not ended.well:
                    stop.set()
                    raise _not_copied(ended, where)
                before = moved[at]
                with lock:
                    sums.append(pool.submit(self._sum, part, some, fresh=force))

        work.worker.destination()  # writes the configuration that rsync's ssh reads
        since = work.console.now()
        pace = Pace(total)
        with ThreadPoolExecutor(SUMMING) as pool, ThreadPoolExecutor(len(shared)) as streams:
            runs = [streams.submit(lane, at, mine, pool) for at, mine in enumerate(shared)]
            try:
                while not all(run.done() for run in runs):
                    time.sleep(LOOK)
                    work.console.progress(pace.told(sum(moved), time.monotonic()), since)
            except BaseException:
                stop.set()
                raise
            for run in runs:
                run.result()
            bad = [fault for each in sums for fault in each.result()]
        if bad:
            refuse(
                proof.findings(
                    "worker",
                    part.role,
                    where,
                    bad,
                    f"see dmesg of both nodes (drive, memory); {AGAIN}",
                )
            )
        work.console.say(f"  {NAMES[part.role]}: copied, every checksum is right", "good")


def _not_copied(ended: Ended, where: str) -> LauncherError:
    status, said = ended.statuses[0], ended.said[0]
    if "No space left" in said:
        mend = f"free some space on the worker: df -h {shlex.quote(where)}; {AGAIN}"
    elif status in rsync.BROKEN:
        mend = f"see that the link is up (./start.sh doctor); {AGAIN}"
    else:
        mend = f"mend what rsync says; {AGAIN}"
    return LauncherError(
        f"rsync to {where} on the worker ended with {status}: {said[-400:] or 'it said nothing'}",
        "each file copied whole",
        mend,
    )
