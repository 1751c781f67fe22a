"""A look at both Sparks: their facts, the link between them, and what stands in a start's way."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import doctor as reporting
from launcher import survey
from launcher.app import PAIR, App
from launcher.commands.container import NodePlace, place_of
from launcher.deployment import Role
from launcher.errors import LauncherError
from launcher.facts.base import Missing
from launcher.facts.packs import Packs
from launcher.facts.probes import ReadSpeed
from launcher.findings import Finding
from launcher.here import head_ip, local_interfaces
from launcher.link import Link, Wanted, find
from launcher.nodes.base import Node
from launcher.nodes.daemon import daemon
from launcher.nodes.local import LocalNode
from launcher.nodes.prove import finding, prove
from launcher.nodes.ssh import SshNode
from launcher.pair import reach
from launcher.preflight import Given, Need, check
from launcher.preflight.link import dont_fragment
from launcher.rails import Rail, Side, carrier
from launcher.settings import pair_rules
from launcher.settings.values import Settings
from launcher.survey import Paths, Survey
from launcher.tuning import table

CACHE_BYTES = 8 << 30  # compiled kernels of a first start
LOG_BYTES = 1 << 30
READ_BYTES = 256 << 20  # a shorter file tells nothing of a disk's speed


@dataclass(frozen=True)
class Pair:
    """Both nodes and how to reach them, before anything is asked."""

    settings: Settings
    at: reach.Reach
    head: Node
    worker: SshNode
    logs: Path
    kept: tuple[str, ...] = ()  # names of the containers that are recorded as ours

    @classmethod
    def of(cls, app: App, settings: Settings) -> Pair:
        at = reach.Reach.of_settings(settings, app.root)
        recorded = app.store.load().deployment
        kept: tuple[str, ...] = ()
        if recorded is not None and recorded.name == PAIR:
            was = app.reach()
            kept = (was.head, was.worker)
        return cls(settings, at, LocalNode("head"), reach.worker(at, app.logs), app.logs, kept)


@dataclass(frozen=True)
class Seen:
    """What was found. ``ways``: what is wrong with the ways to the worker."""

    given: Given
    head: Survey
    worker: Survey
    link: Link | None
    link_findings: Sequence[Finding]
    ways: Sequence[Finding]

    def packs(self, role: Role) -> tuple[str, ...]:
        """The packed files of the rank that ``role`` is, on its node; unchecked."""
        survey, rank = (self.head, 0) if role == "head" else (self.worker, 1)
        return survey.packs.of(rank) if isinstance(survey.packs, Packs) else ()

    def prepared(self, role: Role) -> bool:
        """Whether the node of ``role`` has its rank's prepared weights; unchecked."""
        survey, rank = (self.head, 0) if role == "head" else (self.worker, 1)
        return isinstance(survey.packs, Packs) and survey.packs.weights(rank)

    def findings(self, probes: Sequence[survey.Probe] = ()) -> list[Finding]:
        found = check(self.given, self.head, self.worker, self.link, self.link_findings, probes)
        if not self.ways:
            return found
        # The same faults, in the words of the second who met them.
        again = [self.worker.lost]
        if isinstance(self.worker.docker, Missing):
            again += [each for each in found if each.topic == "docker" and "worker" in each.found]
        return [*self.ways, *(each for each in found if each not in again)]


def elsewhere(pair: Pair) -> list[Finding]:
    """Whether this machine is not the head. Asked before any contact with the worker."""
    settings = pair.settings
    here = local_interfaces(pair.head)
    wrong = head_ip(settings.text("HEAD_IP"), here)
    if wrong:
        return wrong
    for key in ("WORKER_IP", "WORKER_SSH"):
        address = settings.text(key).rpartition("@")[2]
        if address and not head_ip(address, here):
            return [
                Finding(
                    f"{key} is {settings.text(key)}, an address of this machine",
                    "the address of the other node",
                    f"set {key} in .env to the worker's address on the CX7 link",
                    topic="link",
                )
            ]
    return []


def see(pair: Pair) -> Seen:
    """Ask both nodes at once; nothing of them is changed."""
    settings = pair.settings
    head_place = place_of(settings, "head", str(Path.home()))
    with ThreadPoolExecutor(2) as pool:
        head = pool.submit(_survey, pair, "head", head_place)
        lost: LauncherError | None = None
        try:
            ways = prove(pair.worker)
        except LauncherError as error:
            ways, lost = [finding(error)], error
        if ways and (cut := _cut_packets(pair)):
            # What else is asked of the worker would hang, too.
            lost = lost or LauncherError(cut[0].found, cut[0].needed, cut[0].mend)
            ways = [*cut, *ways]
        place = None if lost else place_of(settings, "worker", _home(pair))
        worker = _survey(pair, "worker", place, lost)
        both = head.result(), worker
    needs = tuple(_needs(each) if each else () for each in (head_place, place))
    given = Given.of(
        settings,
        pair.at.owner,
        (*needs[0], Need(str(pair.logs), LOG_BYTES, "logs")),
        needs[1],
        kept=pair.kept,
    )
    link, found = find(Wanted.of(settings), *both)
    return Seen(given, *both, link, found, ways)


def _cut_packets(pair: Pair) -> list[Finding]:
    """Whether the link loses packets of its own MTU, on which ssh starts and then hangs. Asked
    without the worker's help."""
    settings = pair.settings
    address = settings.text("WORKER_IP")
    carries = carrier(
        Side(settings.text("HEAD_IP"), prefix="HEAD"), "head", local_interfaces(pair.head)
    )
    if isinstance(carries, Finding):
        return []
    interface, mine = carries
    head = Rail(interface.name, mine.ip, mine.prefix, interface.mtu, "", 0, 0)
    tried = survey.probe(pair.head, head, replace(head, address=address))
    small = tried.small
    if small is None or isinstance(small, Missing) or not small.ok:
        return []
    return dont_fragment([tried])


def _home(pair: Pair) -> str:
    asked = pair.settings.text("WORKER_HOME")
    try:
        return asked or pair.worker.facts().home
    except LauncherError:
        return "/"  # the survey says what is wrong with the node


def _needs(place: NodePlace) -> tuple[Need, ...]:
    own = (place.vllm_cache, place.triton_cache, place.tilelang_cache)
    elsewhere = [Need(path, 0, "a cache of compiled kernels") for path in own if path]
    return (Need(place.cache_root, CACHE_BYTES, "caches of compiled kernels"), *elsewhere)


def _survey(
    pair: Pair, role: str, place: NodePlace | None, lost: LauncherError | None = None
) -> Survey:
    node: Node = pair.head if role == "head" else pair.worker
    paths = Paths()
    if place is not None:
        disks = tuple(need.path for need in _needs(place))
        if role == "head":
            disks = (*disks, str(pair.logs))
        tuned = str(table.path(place.cache_root))
        paths = Paths(place.model_dir, place.engram_dir, disks, place.packed_dir, tuned)
    client, why = None, "no connection to the Docker daemon"
    if place is not None:
        try:
            far = pair.at.endpoint if role == "worker" else None
            client = daemon(far, reach.ssh(pair.logs))
        except LauncherError as error:
            why = error.found
    names = (pair.at.head if role == "head" else pair.at.worker,)
    image = pair.settings.text("IMAGE")
    try:
        return survey.survey(
            role, node, client, paths, image, names=names, no_docker=why, gone=lost
        )
    finally:
        if client is not None:
            client.close()


def doctor(app: App, settings: Settings) -> int:
    """Print the report; 1 when something would stop a start."""
    pair_rules.require(settings)
    pair = Pair.of(app, settings)
    wrong = elsewhere(pair)
    if wrong:
        for line in reporting.Report(tuple(map(reporting.of, wrong))).rows():
            app.console.plain(line)
        return 1
    since = app.console.now()
    app.console.progress("asking both nodes", since)
    seen = see(pair)
    nodes: dict[str, Node] = {"head": pair.head, "worker": pair.worker}
    trees = {"head": seen.head, "worker": seen.worker}

    def largest(role: str) -> str | None:
        """A file that is there anyway, to be read past the page cache."""
        tree = trees[role].model
        sizes = getattr(tree, "sizes", {})
        name = max(sizes, key=lambda each: sizes[each], default=None)
        if name is None or sizes[name] < READ_BYTES:
            return None
        return f"{trees[role].paths.model}/{name}"

    def reads(role: str) -> ReadSpeed | Missing | None:
        path = largest(role)
        return None if path is None else survey.read_speed(nodes[role], path)

    checks = reporting.Checks(
        probes=lambda link: survey.probes(pair.head, link),
        log=lambda role: survey.kernel_log(nodes[role]),
        reads=reads,
        care=lambda role: survey.care(nodes[role]),
        guard=settings.flag("DSV41_MEM_GUARD"),
    )
    found = reporting.report(seen.given, seen.head, seen.worker, seen.link, seen.findings, checks)
    for row in found.rows():
        app.console.plain(row)
    app.console.say(found.verdict, "good" if found.code == 0 else "warning")
    return found.code
