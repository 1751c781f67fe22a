"""The model's and the Engram's directory on both nodes: whole, and the same on both."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from launcher.facts.base import Missing, gib
from launcher.facts.trees import CONFIG, INDEX, Tree
from launcher.findings import Finding
from launcher.survey import Survey

TOPIC = "weights"


BOTH = ("head", "worker")


def weights(head: Survey, worker: Survey, needed: Sequence[str] = BOTH) -> list[Finding]:
    """``needed``: the nodes that must have them already. What a step of the boot brings is that
    step's to look at."""
    findings = []
    for survey in (head, worker):
        if survey.name in needed:
            findings += _whole(survey, survey.model, survey.paths.model, "checkpoint", False)
    if set(BOTH) <= set(needed):
        findings += _same(head.model, worker.model, "checkpoint", False)
    return [*findings, *engram_sources(head, worker, needed)]


def engram_sources(head: Survey, worker: Survey, needed: Sequence[str] = BOTH) -> list[Finding]:
    """Only the Engram source, for who needs nothing else."""
    findings = []
    for survey in (head, worker):
        if survey.name in needed:
            findings += _whole(survey, survey.engram, survey.paths.engram, "Engram source", True)
    if set(BOTH) <= set(needed):
        findings += _same(head.engram, worker.engram, "Engram source", True)
    return findings


def packs(survey: Survey) -> list[Finding]:
    """That packed rows are there must be known: a pair that serves from them would be started anew
    without."""
    if not isinstance(survey.packs, Missing):
        return []
    path = shlex.quote(survey.paths.packed)
    return [
        Finding(
            f"whether {survey.paths.packed} on the {survey.name} has packed Engram rows could not"
            f" be seen: {survey.packs.reason}",
            "a directory that can be listed, or none",
            f"on the {survey.name}: ls -l {path}; HEAD_PACKED_DIR and WORKER_PACKED_DIR name it",
            topic=TOPIC,
        )
    ]


def _whole(
    survey: Survey, tree: Tree | Missing | None, path: str, what: str, engram: bool
) -> list[Finding]:
    if tree is None:
        return []
    key = "ENGRAM_DIR" if engram else "MODEL_HOST"
    if survey.name == "worker":
        key = "WORKER_ENGRAM_DIR" if engram else "WORKER_MODEL_DIR"
    where = f"the {what} of the {survey.name}, {path} ({key}),"
    needed = f"{CONFIG}, {INDEX} and every shard that it names"
    if engram:
        needed = f"{CONFIG}, {INDEX} and the shards with the Engram tables"
    mend = f"bring the missing files there, or set {key} to the directory that has them"

    def wrong(found: str, how: str = mend) -> Finding:
        return Finding(f"{where} {found}", needed, how, topic=TOPIC)

    if isinstance(tree, Missing):
        return [
            wrong(
                f"could not be listed: {tree.reason}",
                f"on the {survey.name}: ls -l {shlex.quote(path)}",
            )
        ]
    if not tree.exists:
        return [wrong("does not exist")]
    if not tree.readable:
        return [
            wrong(
                "may not be read by this user", f"on the {survey.name}: ls -ld {shlex.quote(path)}"
            )
        ]
    findings = []
    lacking = [name for name in (CONFIG, INDEX) if not tree.sizes.get(name)]
    shards = tree.tables if engram else tree.shards
    if INDEX not in lacking and not shards:
        findings.append(
            wrong("has an index that names no Engram table" if engram else "has an empty index")
        )
    lacking += [name for name in shards if name not in tree.sizes]
    hollow = [name for name in shards if tree.sizes.get(name) == 0]
    if lacking:
        broken = [name for name in lacking if name in tree.broken]
        links = f" ({len(broken)} are links to nothing)" if broken else ""
        findings.append(wrong(f"lacks {_few(lacking)}{links}"))
    if hollow:
        findings.append(wrong(f"has empty files: {_few(hollow)}"))
    if not engram and not lacking and not hollow and tree.total_size:
        there = tree.bytes_of(shards)
        if there < tree.total_size:
            findings.append(
                wrong(
                    f"has {gib(there)} in its shards, but its index counts "
                    f"{gib(tree.total_size)}: a file is cut off",
                    "download the checkpoint again: what is whole is not fetched twice",
                )
            )
    return findings


def _same(
    head: Tree | Missing | None, worker: Tree | Missing | None, what: str, engram: bool
) -> list[Finding]:
    """The worker's files are the head's: equal description, equal sizes."""
    if not isinstance(head, Tree) or not isinstance(worker, Tree):
        return []
    if not (head.exists and worker.exists):
        return []
    differ = [
        name
        for name in (CONFIG, INDEX)
        if name in head.hashes and name in worker.hashes
        if head.hashes[name] != worker.hashes[name]
    ]
    shards = head.tables if engram else head.shards
    differ += [
        name
        for name in shards
        if head.sizes.get(name) and worker.sizes.get(name)
        if head.sizes[name] != worker.sizes[name]
    ]
    if not differ:
        return []
    return [
        Finding(
            f"the {what} differs between the nodes: {_few(differ)}",
            "the same files on both",
            "copy the head's files to the worker, or download the same revision there",
            topic=TOPIC,
        )
    ]


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
