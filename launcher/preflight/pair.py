"""Containers that are there already: our pair whole or in part, and those of others."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from launcher.facts.base import Missing, gib
from launcher.facts.docker import Container
from launcher.findings import Finding, Level
from launcher.preflight.given import Given
from launcher.survey import Survey

TOPIC = "containers"
CHECKER = "dsv41.checker"
LARGE = 1 << 30  # bytes on the GPU from which another program is in the way


@dataclass(frozen=True)
class Standing:
    """How our pair stands.

    absent   neither node has a container of this checkout.
    up       one launch runs on both.
    half-up  one rank runs without the other.
    mixed    both run, of two launches.
    ended    what is left has ended.
    """

    state: Literal["absent", "up", "half-up", "mixed", "ended"]
    head: Container | None
    worker: Container | None
    launch: str = ""

    @property
    def broken(self) -> bool:
        return self.state in ("half-up", "mixed")

    def of(self, node: str) -> Container | None:
        return self.head if node == "head" else self.worker


def standing(owner: str, head: Survey, worker: Survey) -> Standing:
    mine = _ours(owner, head), _ours(owner, worker)
    present = [each for each in mine if each is not None]
    running = [each for each in present if each.running]
    launches = {each.launch for each in running}
    if not present:
        return Standing("absent", None, None)
    launch = launches.copy().pop() if len(launches) == 1 else ""
    if not running:
        return Standing("ended", *mine)
    if len(running) == 1:
        return Standing("half-up", *mine, launch)
    return Standing("up" if len(launches) == 1 else "mixed", *mine, launch)


def containers(
    given: Given, head: Survey, worker: Survey, half_up: Level = "warn"
) -> list[Finding]:
    findings = []
    pair = standing(given.owner, head, worker)
    for survey in (head, worker):
        findings += _foreign(given, survey)
        findings += _forgotten(given, survey)
        findings += _busy_gpu(given, survey)
    # A node that could not be asked makes a pair look half.
    if (
        pair.broken
        and not isinstance(head.docker, Missing)
        and not isinstance(worker.docker, Missing)
    ):
        findings.append(_broken(pair, half_up))
    return findings


def _ours(owner: str, survey: Survey) -> Container | None:
    if isinstance(survey.docker, Missing):
        return None
    mine = [
        each
        for each in survey.docker.containers
        if each.owner == owner and each.role in ("", survey.name)
    ]
    # Of several the running one counts: the others are left over.
    return next((each for each in mine if each.running), mine[0] if mine else None)


def _broken(pair: Standing, level: Level) -> Finding:
    def told(container: Container | None) -> str:
        if container is None:
            return "has none"
        how = "runs" if container.running else f"is {container.state}"
        ended = container.state == "exited" and container.exit_code is not None
        code = f" with code {container.exit_code}" if ended else ""
        return f"{how}{code} (launch {container.launch or 'unknown'})"

    what = "half of the pair is up" if pair.state == "half-up" else "the ranks are of two launches"
    mend = "./start.sh stop takes both down"
    if level == "warn":
        mend = "nothing: both ranks are ended and started as one"
    return Finding(
        f"{what}: the head's container {told(pair.head)}, the worker's {told(pair.worker)}",
        "both ranks of one launch, or none",
        mend,
        level,
        TOPIC,
    )


def _foreign(given: Given, survey: Survey) -> list[Finding]:
    """Containers with our name or our labels that are not this checkout's. Never removed."""
    if isinstance(survey.docker, Missing):
        return []
    name = given.container(survey.name)
    found = []
    for each in survey.docker.containers:
        if each.owner == given.owner:
            continue
        if each.name == name:
            whose = f"belongs to {each.owner}" if each.owner else "is not of this launcher"
            found.append(
                Finding(
                    f"the {survey.name} has a container {each.name} ({each.state}) that {whose}",
                    "that name free, or of this checkout: nothing foreign is removed",
                    _end(each, survey.name)
                    + f", or set another CONTAINER_{survey.name.upper()} in .env",
                    topic=TOPIC,
                )
            )
        elif each.owner and each.running:
            found.append(
                Finding(
                    f"the {survey.name} runs {each.name}, a rank of another checkout: {each.owner}",
                    "no other pair on these nodes",
                    _end(each, survey.name),
                    topic=TOPIC,
                )
            )
    return found


def _forgotten(given: Given, survey: Survey) -> list[Finding]:
    """Running containers of this checkout that no record and no setting names any more."""
    if isinstance(survey.docker, Missing):
        return []
    names = (given.container(survey.name), *given.kept)
    return [
        Finding(
            f"the {survey.name} runs {each.name}, which this checkout started under that name",
            f"no rank beside {given.container(survey.name)}",
            f"on the {survey.name}: docker rm -f {shlex.quote(each.name)}; or set"
            f" CONTAINER_{survey.name.upper()} back to it, then ./start.sh stop",
            topic=TOPIC,
        )
        for each in survey.docker.containers
        if each.owner == given.owner and each.running and each.name not in names
    ]


def _end(container: Container, node: str) -> str:
    host, colon, path = container.owner.partition(":")
    if colon and path:
        return f"on {host}: cd {shlex.quote(path)} && ./start.sh stop"
    return f"if it is not needed, on the {node}: docker rm -f {shlex.quote(container.name)}"


def _busy_gpu(given: Given, survey: Survey) -> list[Finding]:
    """Others that compute there: they share the one memory, now or at any time later."""
    found = []
    known: dict[str, Container] = {}
    if not isinstance(survey.docker, Missing):
        known = {each.id: each for each in survey.docker.containers}
        for each in survey.docker.containers:
            if (
                each.running
                and each.gpu
                and not each.owner
                and each.labels.get(CHECKER) != given.owner  # a killed launcher's: it is ended
                and each.name != given.container(survey.name)
            ):
                found.append(
                    Finding(
                        f"the {survey.name} runs a GPU container of others: {each.name} "
                        f"({each.image})",
                        "the GPU and the memory of both nodes for the pair alone",
                        f"on the {survey.name}: docker stop {shlex.quote(each.name)}",
                        topic=TOPIC,
                    )
                )
    if isinstance(survey.apps, Missing):
        return found
    for app in survey.apps:
        if app.container in known:
            continue  # ours, or told above
        size = "" if app.memory is None else f" with {gib(app.memory)}"
        who = f" of {app.user}" if app.user else ""
        large = app.memory is not None and app.memory >= LARGE
        found.append(
            Finding(
                f"pid {app.pid}{who} computes on the GPU of the {survey.name}{size}: {app.name}",
                "the GPU and the memory of both nodes for the pair alone",
                f"end it if it is not needed, on the {survey.name}: kill {app.pid}",
                "wrong" if large else "warn",
                TOPIC,
            )
        )
    return found
