"""Brings the head's directories to what the manifest says: looks, names what is bad, fetches it.

It can be killed anywhere: the manifest with the commit is kept before the first file is touched,
files have their names only when they are whole, and sums are remembered as they are made.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.console import Console
from launcher.errors import LauncherError, UsageError
from launcher.facts.base import gib
from launcher.findings import Finding, refuse
from launcher.nodes.base import Node
from launcher.record import Record
from launcher.weights import manifest as manifests
from launcher.weights import proof, replaced
from launcher.weights.hub import KEYS, PASSING, Hub, HubError
from launcher.weights.manifest import ROLES, Manifest, Part, Role
from launcher.weights.pace import Pace, size
from launcher.weights.proof import NAMES, Fault, Memory
from launcher.weights.tree import DIRECTORIES, of_tree

STEP = "download"
PARTIAL = ".cache/dsv41-partial"  # as in `resume`, which needs the hub's library
TRIES = 3  # rounds that bring no file, one after another
PAUSE = 5.0  # seconds after the first of them, then twice that
SPARE = 1 << 30  # bytes to be left on a disk that is written to


@dataclass(frozen=True, kw_only=True)
class Job:
    """One head and what it should have. ``fetch`` False: only looked at (AUTO_DOWNLOAD=0)."""

    node: Node
    hub: Hub
    directories: Mapping[Role, Path]
    repos: Mapping[Role, str]
    cache_root: Path
    console: Console
    record: Record
    fetch: bool = True
    fresh: bool = False  # every checksum anew
    threads: int = proof.THREADS
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    @property
    def manifest(self) -> Path:
        return self.cache_root / manifests.FILE

    @property
    def memory(self) -> Memory:
        return Memory(self.cache_root / "sums.json", self.fresh)


def bring(job: Job, *, ask: bool = False, update: bool = False) -> Manifest:
    """The manifest, when all that it names is there and right.

    ``ask``: the hub is asked even for a part that was once made from the tree; ``update``: for its
    newest commit. Raises LauncherError with all that is missing or wrong.
    """
    if update and not job.fetch:
        raise UsageError(
            "--update, and AUTO_DOWNLOAD=0: the newest commit is the hub's, which may not be asked",
            "one of them",
            "./start.sh download --update --set AUTO_DOWNLOAD=1, or leave out --update to verify",
        )
    refuse(_no_directory(job))
    had = manifests.load(job.manifest)
    made: Manifest | None = None
    for role in ROLES:
        before = had.part(role) if had and had.has(role) else None
        part = _part(job, role, before, ask, update)
        made = made.with_part(part) if made else Manifest((part,))
    assert made is not None
    manifests.save(job.manifest, made)  # the commit is settled, whatever happens to the files
    faults = {}
    for part in made.parts:
        part, faults[part.role] = _look(job, part)
        made = made.with_part(part)  # with the sums of a tree
    manifests.save(job.manifest, made)
    _tell(job, made, faults)
    bad = {role: found for role, found in faults.items() if found}
    _refuse_what_no_hub_mends(job, made, bad)
    if bad:
        for role in bad:
            clean(job.directories[role], made.part(role))
        refuse(_no_room(job, bad))
        for role, found in bad.items():
            before = had.part(role) if had and had.has(role) else None
            _fetch(job, made.part(role), found, before)
    return made


def _part(job: Job, role: Role, before: Part | None, ask: bool, update: bool) -> Part:
    """What ``role`` should be: as it was settled, as the hub has it, or as the tree is."""
    repo, directory = job.repos[role], job.directories[role]
    settled = before is not None and before.revision and before.repo == repo
    if settled and before is not None and not update:
        return before
    from_tree = before is not None and not before.revision  # a tree is its own measure
    if before is not None and not from_tree and not job.fetch:
        raise UsageError(
            f"{job.manifest} has the checksums of {before.repo}, and {KEYS[role]} is {repo}",
            "a look at the hub, for those of the other (AUTO_DOWNLOAD=0 only verifies)",
            f"AUTO_DOWNLOAD=1; or set {KEYS[role]} back; or, if {directory} is right as it is:"
            f" rm {job.manifest}",
        )
    lost: LauncherError | None = None
    if not job.fetch or (from_tree and not ask):
        try:
            return of_tree(role, directory)
        except LauncherError as error:
            if not job.fetch:
                raise
            lost = error
    try:
        job.console.progress(f"asking the hub for {repo}")
        part = job.hub.resolve(role, repo)
    except HubError as error:
        if lost is not None or settled:
            raise
        try:
            part = of_tree(role, directory)
        except LauncherError as missing:
            error.found += f"; and {missing.found}"
            raise error from missing
        job.console.warn(
            f"{error.found}; {directory} is whole by its own index and is used as it is, without"
            " the hub's checksums. ./start.sh download asks the hub again"
        )
        return part
    job.record.event(STEP, "resolved", role=role, repo=repo, commit=part.revision)
    return part


def _look(job: Job, part: Part) -> tuple[Part, list[Fault]]:
    """Sizes and sums of a part's files; the part with sums that were not known before."""
    directory = job.directories[part.role]
    sizes = proof.look(job.node, str(directory), part.entries, "sizes")
    here = [entry for entry, row in zip(part.entries, sizes, strict=True) if row.state == "ok"]
    rows = {row.name: row for row in sizes}
    if here:
        what = f"checksums of the {NAMES[part.role]}"
        for row in _sums(job, directory, part, [entry.name for entry in here], what):
            rows[row.name] = row
    pairs = [(entry, rows[entry.name]) for entry in part.entries]
    faults = [Fault(entry, row) for entry, row in pairs if row.state != "ok"]
    return proof.summed(part, rows.values()), faults


def _sums(
    job: Job, directory: Path, part: Part, names: Sequence[str], what: str
) -> list[proof.Row]:
    entries = [part.entry(name) for name in names]
    pace = Pace(sum(entry.size for entry in entries))

    def progress(done: int, total: int) -> None:
        job.console.progress(f"{what}: {pace.told(done, job.clock())}")

    return proof.look(
        job.node,
        str(directory),
        entries,
        "sums",
        job.memory,
        threads=job.threads,
        progress=progress,
    )


def _tell(job: Job, made: Manifest, faults: Mapping[Role, Sequence[Fault]]) -> None:
    for part in made.parts:
        found = faults[part.role]
        source = f"{part.repo} at {part.revision[:12]}" if part.revision else "made from the tree"
        whole = f"{len(part.entries)} files, {size(part.size)}"
        where = f"{job.directories[part.role]}"
        if not found:
            job.console.say(f"  {NAMES[part.role]}: {where}: {whole}, all right ({source})")
        else:
            rest = size(sum(fault.entry.size for fault in found))
            what = "to be fetched" if job.fetch else "missing or wrong"
            job.console.say(
                f"  {NAMES[part.role]}: {where}: {len(found)} of {whole}, {what}: {rest} ({source})"
            )
        for fault in found:
            job.record.event(STEP, "fault", role=part.role, file=fault.name, state=fault.state)
            if fault.state != "missing":
                job.console.say(f"    {fault}")
        missing = [fault.name for fault in found if fault.state == "missing"]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            job.console.say(f"    missing: {', '.join(missing[:4])}{more}")


def _refuse_what_no_hub_mends(
    job: Job, made: Manifest, bad: Mapping[Role, Sequence[Fault]]
) -> None:
    wrong: list[Finding] = []
    for role, found in bad.items():
        directory = str(job.directories[role])
        if not job.fetch:
            mend = (
                "AUTO_DOWNLOAD=0 only verifies: bring them there, or ./start.sh download --set"
                f" AUTO_DOWNLOAD=1; if the directory holds another revision: rm {job.manifest}"
            )
            wrong += proof.findings("head", role, directory, found, mend)
            continue
        shut = [fault for fault in found if fault.state == "unreadable"]
        mend = "see ls -lL and dmesg; what cannot be read, take away, then ./start.sh download"
        wrong += proof.findings("head", role, directory, shut, mend)
        if not made.part(role).revision:
            rest = [fault for fault in found if fault.state != "unreadable"]
            mend = "something else writes there: let it end, then run this again"
            wrong += proof.findings("head", role, directory, rest, mend)
    refuse(wrong)


def _no_room(job: Job, bad: Mapping[Role, Sequence[Fault]]) -> list[Finding]:
    """A finding for each file system that is too small for all that comes there."""
    wanted: dict[int, int] = {}
    where: dict[int, Path] = {}
    for role, found in bad.items():
        directory = job.directories[role]
        disk = _disk(directory)
        where.setdefault(disk, directory)
        given = sum(
            _given_back(directory / fault.name)
            + _given_back(directory / PARTIAL / f"{fault.entry.sha256}.part")
            for fault in found
        )
        wanted[disk] = wanted.get(disk, 0) + sum(fault.entry.size for fault in found) - given
    findings = []
    for disk, need in wanted.items():
        free = job.node.free_bytes(where[disk])
        if need + SPARE > free:
            findings.append(
                Finding(
                    f"{gib(free)} free for {where[disk]}",
                    f"{gib(need + SPARE)} there, for what is still to come",
                    "free some space, or set MODEL_HOST or ENGRAM_DIR in .env to another disk"
                    " (what is there already can be moved along)",
                    topic="disk",
                )
            )
    return findings


def _no_directory(job: Job) -> list[Finding]:
    """Where no directory can be: a file has its name, or that of one above it."""
    return [
        Finding(
            f"{DIRECTORIES[role]} is {directory}, and {there} is no directory",
            f"a directory for the {NAMES[role]}, there or to be made",
            f"set {DIRECTORIES[role]} in .env to one, or move {there} away",
            topic="disk",
        )
        for role, directory in job.directories.items()
        if not (there := _existing(directory)).is_dir()
    ]


def _disk(path: Path) -> int:
    return _existing(path).stat().st_dev


def _existing(path: Path) -> Path:
    """``path``, or the first above it that is there."""
    return next(each for each in (path, *path.parents) if each.exists())


def _given_back(path: Path) -> int:
    """Bytes that come free when a bad file goes, which it does before its successor comes."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
    return found.st_blocks * 512 if alone else 0


def clean(directory: Path, part: Part) -> int:
    """Remove what broken-off downloads left half, unless some process still writes it; how many.

    The library gives each try a name of its own and never goes on with one. Our own parts of large
    files are gone on with, if they are of a file that ``part`` has.
    """
    left = list((directory / ".cache" / "huggingface" / "download").glob("*.incomplete"))
    wanted = {f"{entry.sha256}.part" for entry in part.entries}
    left += [path for path in (directory / PARTIAL).glob("*") if path.name not in wanted]
    open_now = _open_files() if left else set()
    gone = 0
    for path in left:
        with contextlib.suppress(OSError):
            if str(path.resolve()) not in open_now:
                path.unlink()
                gone += 1
    return gone


def _open_files() -> set[str]:
    """Files that this user's processes have open."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for each in folder.iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(each))
    return found


def _fetch(job: Job, part: Part, faults: Sequence[Fault], before: Part | None) -> None:
    """Rounds over what is not right yet, until all is or rounds bring nothing. ``before``: what
    the part was."""
    directory = job.directories[part.role]
    folder = str(job.cache_root / "replaced" / part.role)
    ours = before.entries if before else ()
    replaced.keep(job.node, str(directory), folder, faults, ours, job.console)
    left, vain = list(faults), 0
    while left:
        count = len(left)
        error = _round(job, part, left)
        names = [fault.name for fault in left]
        rows = _sums(job, directory, part, names, f"checksums of what came for {part.repo}")
        pairs = ((part.entry(row.name), row) for row in rows)
        left = [Fault(entry, row) for entry, row in pairs if row.state != "ok"]
        job.record.event(STEP, "round", role=part.role, came=count - len(left), left=len(left))
        if not left:
            break
        if error is not None and error.kind not in PASSING:
            raise error
        vain = 0 if len(left) < count else vain + 1
        if vain >= TRIES:
            if error is not None:
                raise error
            refuse(_came_wrong(part, directory, left))
        if vain:
            why = error.found if error else str(left[0])
            job.console.warn(f"{why}; trying again in {PAUSE * vain:.0f} s")
            job.sleep(PAUSE * vain)
    job.console.say(f"  {NAMES[part.role]}: {len(faults)} files fetched, all right", "good")


def _round(job: Job, part: Part, left: Sequence[Fault]) -> HubError | None:
    pace = Pace(sum(fault.entry.size for fault in left))
    began = job.console.now()
    files = f"{len(left)} files" if len(left) > 1 else left[0].name

    def progress(count: int) -> None:
        job.console.progress(f"{part.repo}, {files}: {pace.told(count, job.clock())}", began)

    try:
        job.hub.fetch(part, job.directories[part.role], [fault.name for fault in left], progress)
    except HubError as error:
        return error
    return None


def _came_wrong(part: Part, directory: Path, left: Sequence[Fault]) -> list[Finding]:
    mend = (
        "run this again; if it stays so, a proxy on the way changes files, or the hub's copy is"
        f" broken: see the page of {part.repo}"
    )
    return proof.findings("head", part.role, str(directory), left, mend)


__all__ = ["KEYS", "Job", "bring", "clean"]
