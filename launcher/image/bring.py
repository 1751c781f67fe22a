"""Brings the image to both nodes: pulled, built or kept on the head, the same on the worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.console import Console
from launcher.errors import LauncherError
from launcher.facts.base import gib
from launcher.facts.docker import Image
from launcher.findings import Finding, refuse
from launcher.image import build, decide, identity, registry
from launcher.image.decide import Flags, Found, Plan, Says
from launcher.image.reference import reference
from launcher.image.registry import Login, Remote
from launcher.image.ship import Ship
from launcher.image.stamp import stamp
from launcher.image.store import ImageStore, PullFailed
from launcher.nodes.base import Node
from launcher.record import Record
from launcher.settings.table import TABLE
from launcher.settings.values import Settings

STEP = "image"
LOG = "build-image.log"


@dataclass(frozen=True)
class Bring:
    """``machine``: the head's, by uname. ``ship`` is made for a platform when it is needed."""

    root: Path
    settings: Settings
    head: Node
    here: ImageStore
    there: ImageStore
    logs: Path
    record: Record
    console: Console
    machine: str
    ship: Callable[[str], Ship]
    # What the registry said of the image, by its name: it is asked once.
    said: dict[str, tuple[Says, Remote | None]] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return self.settings.text("IMAGE")

    def wanted(self) -> str:
        """The stamp of this checkout's recipe."""
        base = self.settings.text("BASE_IMAGE")
        return stamp(self.root, "" if base == TABLE["BASE_IMAGE"].default else base)

    def standing(self) -> bool:
        """Whether both nodes have one image, and it is the one that would be kept."""
        image = self._usable()
        if image is None or not identity.same(image, self.there.find(self.name)):
            return False
        plan, found, remote = self._decided(Flags.of(self.settings))
        if plan.act == "pull" and remote is not None:  # of what is here
            return found.right and remote.layers == image.layers
        return plan.act == "keep"

    def kept(self) -> str:
        """Says why what is `standing` is kept, where that must not be overlooked."""
        plan, _, _ = self._decided(Flags.of(self.settings))
        if not plan.warning:
            return "already done"
        self._tell(plan)
        return "kept"

    def look_ahead(self) -> None:
        """Raises LauncherError for what can be seen now to keep `do` from ending well."""
        flags = Flags.of(self.settings)
        plan, _, remote = self._decided(flags)
        image = self._usable()
        if plan.act == "refuse":
            raise self._none(plan)
        if plan.act == "build":
            refuse(self._no_base(self.settings.text("BASE_IMAGE"), image))
        if plan.act == "pull" and remote is not None:
            refuse(self._no_room(self.name, remote, image))
        if plan.act != "keep" or image is None or flags.skip_ship:
            return  # what it will be is not known yet, or it does not travel
        if not identity.same(image, self.there.find(self.name)):
            self.ship(self._platform(image)).look_ahead(self.settings.text("IMAGE_SHIP"), image)

    def do(self) -> None:
        """Raises LauncherError where it cannot, or by the flags must not, be brought."""
        flags = Flags.of(self.settings)
        image, remote, built = self._on_head(flags)
        told = f"{self.name}: {identity.key(image.layers)}, recipe {image.stamp[:12] or 'unknown'}"
        self.record.event(STEP, "on the head", image=told, layers=len(image.layers))
        # What was built here is in no registry.
        may_pull = self._in_a_registry and flags.may_pull and not built
        self._on_worker(flags, image, remote, may_pull)
        self.console.say(f"  {told}, on both nodes")

    # -- the head

    def _on_head(self, flags: Flags) -> tuple[Image, Remote | None, bool]:
        """The image, what the registry said if it was asked, and whether it was built now."""
        plan, found, remote = self._decided(flags)
        self._tell(plan)
        if plan.act == "pull":
            plan = self._pull(flags, found, remote)
        if plan.act == "refuse":
            raise self._none(plan)
        if plan.act == "build":
            build.build(
                self.root, self.head, self.name, self.settings.text("BASE_IMAGE"), found.wanted,
                self.settings.text("IMAGE_PLATFORM"), self.logs / LOG, self.record, self.console,
            )  # fmt: skip
        image = self._usable()
        if image is None:
            raise LauncherError(
                f"the head has no {self.name} that runs on {self.machine}, after it was brought",
                f"an image for {identity.platform(self.settings.text('IMAGE_PLATFORM'), None)}",
                "mend IMAGE, BASE_IMAGE or IMAGE_PLATFORM in .env",
            )
        if plan.act == "build" and image.stamp != found.wanted:
            raise LauncherError(
                f"the image was built and carries the stamp {image.stamp[:12] or '(none)'}",
                f"{found.wanted[:12]}, of this checkout",
                f"git diff docker/Dockerfile; the build's lines are in {self.logs / LOG}",
            )
        return image, remote, plan.act == "build"

    def _decided(self, flags: Flags) -> tuple[Plan, Found, Remote | None]:
        """What is to be done, of what was found, and what the registry said if it was asked."""
        usable = self._usable()
        found = Found(self.wanted(), None if usable is None else usable.stamp)
        remote: Remote | None = None
        if decide.asks(flags, found, self._in_a_registry):
            if self.name not in self.said:
                self.said[self.name] = self._ask(found)
            says, remote = self.said[self.name]
            found = replace(found, registry=says, remote=remote.stamp if remote else "")
        return decide.head(flags, found), found, remote

    def _pull(self, flags: Flags, found: Found, remote: Remote | None) -> Plan:
        """What is left to do after a pull, or instead of one that failed."""
        size = f", {remote.size / 1e9:.2f} GB" if remote and remote.size else ""
        self.console.say(f"  pulling {self.name}{size}")
        try:
            self._pulled(self.here)
        except PullFailed as error:
            self.console.warn(f"{self.name} could not be pulled: {error}")
            self.record.event(STEP, "pull failed", found=str(error))
            plan = decide.head(flags, replace(found, registry="not pulled", failed=str(error)))
            self._tell(plan)
            return plan
        usable = self._usable()
        now = replace(found, head=None if usable is None else usable.stamp, registry="not asked")
        plan = decide.head(replace(flags, pull=False), now)
        if plan.act != "keep":
            self._tell(plan)
        return plan

    def _ask(self, found: Found) -> tuple[Says, Remote | None]:
        """What the registry says, which is told."""
        wanted = reference(self.name)
        if wanted is None:
            self.console.warn(f"IMAGE={self.name} is no name that a registry would know")
            return "absent", None
        try:
            remote = registry.ask(wanted, self._platform(None), self._login())
        except registry.OutOfReach as error:
            self.console.warn(f"the registry is out of reach: {error}")
            self.record.event(STEP, "registry out of reach", found=str(error))
            return "out of reach", None
        except registry.Absent as error:
            self.record.event(STEP, "not in the registry", found=str(error))
            return "absent", None
        self.record.event(STEP, "registry asked", stamp=remote.stamp, size=remote.size)
        if remote.stamp != found.wanted:
            self.console.say(
                f"  {self.name} in the registry is of another recipe"
                f" ({remote.stamp[:12] or 'without a stamp'}): another project's, or another"
                f" version's; this checkout's is {found.wanted[:12]}"
            )
        return "there", remote

    def _no_base(self, base: str, image: Image | None) -> list[Finding]:
        """What keeps a build from having its base; Docker on the head is asked, as it would be."""
        if self.here.find(base) is not None:
            return []
        self.console.progress(f"asking for the base {base}", self.console.now())
        if wrong := self.here.out_of_reach(base):
            return [
                Finding(
                    f"the base {base} is not on the head, and its Docker cannot pull it: {wrong}",
                    "a base that is there, or can be pulled, for the build that is to come",
                    f"on the head: docker pull {base} (docker login where it needs an account); or"
                    " mend BASE_IMAGE in .env, or SKIP_BUILD=1 with an IMAGE that is there",
                    topic="image",
                )
            ]
        named = reference(base)
        with contextlib.suppress(registry.OutOfReach, registry.Absent):
            if named is not None:
                remote = registry.ask(named, self._platform(None), self._login())
                return self._no_room(base, remote, image)
        return []

    def _no_room(self, name: str, remote: Remote, image: Image | None) -> list[Finding]:
        """Layers travel compressed and are kept whole; those that are there are not fetched."""
        if image is not None and image.layers[:1] == remote.layers[:1]:
            return []
        root = self.here.root()
        free, need = self.head.free_bytes(Path(root)), 2 * remote.size
        if free >= need:
            return []
        return [
            Finding(
                f"the head has {gib(free)} free in {root}",
                f"{gib(need)} there at least, for {name}",
                "docker system df tells what is there, docker system prune frees it",
                topic="disk",
            )
        ]

    # -- the worker

    def _on_worker(self, flags: Flags, image: Image, remote: Remote | None, may_pull: bool) -> None:
        have = self.there.find(self.name)
        same = identity.same(image, have)
        wanted = reference(self.name)
        if may_pull and not same and not flags.skip_ship and remote is None and wanted:
            with contextlib.suppress(registry.OutOfReach, registry.Absent):
                remote = registry.ask(wanted, self._platform(image), self._login())
        has_it = may_pull and remote is not None and remote.layers == image.layers
        way = decide.worker(flags, same, has_it)
        if way == "refuse":
            layers = () if have is None else have.layers
            what = "has no" if have is None else "has another"
            raise LauncherError(
                f"the worker {what} {self.name}: "
                f"{identity.first_difference(image.layers, layers)}; SKIP_SHIP=1",
                "the head's layers on the worker, in the same order",
                "start without SKIP_SHIP=1, or bring it there: docker save on the head, docker "
                "load on the worker",
            )
        ship = self.ship(self._platform(image))
        if way == "pull" and self._worker_pulls(image):
            way = "keep"
        if way != "keep":
            ship.ship(self.settings.text("IMAGE_SHIP"), image)
        elif not flags.skip_ship:
            ship.clean()

    def _worker_pulls(self, image: Image) -> bool:
        """Whether the worker has the head's image now. If not, why is told."""
        self.console.say(f"  the worker pulls {self.name} itself")
        try:
            self._pulled(self.there)
        except PullFailed as error:
            self.console.warn(f"the worker could not pull it: {error}; the head's is copied")
            return False
        if identity.same(image, self.there.find(self.name)):
            return True
        self.console.warn("what the worker pulled is another image; the head's is copied")
        return False

    # -- both

    @property
    def _in_a_registry(self) -> bool:
        return "/" in self.name

    def _platform(self, image: Image | None) -> str:
        return identity.platform(self.settings.text("IMAGE_PLATFORM"), image, self.machine)

    def _usable(self) -> Image | None:
        """The head's image, if it runs there."""
        image = self.here.find(self.name)
        asked = self.settings.text("IMAGE_PLATFORM")
        return image if image and identity.fits(image, asked, self.machine) else None

    def _login(self) -> Login | None:
        token = self.settings.secret("GHCR_TOKEN")
        return None if token is None else Login(self.settings.text("GHCR_USER"), token)

    def _pulled(self, store: ImageStore) -> None:
        since = self.console.now()
        store.pull(
            self.name,
            self.settings.text("IMAGE_PLATFORM"),
            self._login(),
            lambda text: self.console.progress(f"{store.role}: {text}", since),
        )

    def _tell(self, plan: Plan) -> None:
        words = {"keep": "kept", "pull": "pulled", "build": "built here", "refuse": "not there"}
        told = f"{self.name} is {words[plan.act]}: {plan.why}"
        self.record.event(STEP, "decided", act=plan.act, why=plan.why)
        if plan.act == "refuse":
            return
        if plan.warning:
            self.console.warn(told)
        else:
            self.console.say(f"  {told}")

    def _none(self, plan: Plan) -> LauncherError:
        return LauncherError(
            f"the head has no {self.name} that runs there, and SKIP_BUILD=1 forbids to build it:"
            f" {plan.why}",
            "an image on the head",
            "start without SKIP_BUILD=1 to build it here, or name one in IMAGE that is there"
            " (docker images) or that a registry holds (without SKIP_PULL=1)",
        )
