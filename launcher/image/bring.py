"""Brings the image to both nodes: pulled, built or kept on the head, the same on the worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.console import Console
from launcher.errors import LauncherError
from launcher.facts.docker import Image
from launcher.image import build, decide, identity, registry
from launcher.image.decide import Flags, Found, Plan
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

    @property
    def name(self) -> str:
        return self.settings.text("IMAGE")

    def wanted(self) -> str:
        """The stamp of this checkout's recipe."""
        base = self.settings.text("BASE_IMAGE")
        return stamp(self.root, "" if base == TABLE["BASE_IMAGE"].default else base)

    def standing(self) -> bool:
        """Whether both nodes have one image of the recipe, or one that SKIP_BUILD=1 keeps."""
        flags = Flags.of(self.settings)
        image = self._usable()
        if image is None or not identity.same(image, self.there.find(self.name)):
            return False
        return image.stamp == self.wanted() or flags.skip_build

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
        usable = self._usable()
        found = Found(self.wanted(), None if usable is None else usable.stamp)
        remote: Remote | None = None
        if decide.asks(flags, found, self._in_a_registry):
            found, remote = self._ask(found)
        plan = decide.head(flags, found)
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

    def _ask(self, found: Found) -> tuple[Found, Remote | None]:
        """``found`` with what the registry says, which is told."""
        wanted = reference(self.name)
        if wanted is None:
            self.console.warn(f"IMAGE={self.name} is no name that a registry would know")
            return replace(found, registry="absent"), None
        try:
            remote = registry.ask(wanted, self._platform(None), self._login())
        except registry.OutOfReach as error:
            self.console.warn(f"the registry is out of reach: {error}")
            self.record.event(STEP, "registry out of reach", found=str(error))
            return replace(found, registry="out of reach"), None
        except registry.Absent as error:
            self.record.event(STEP, "not in the registry", found=str(error))
            return replace(found, registry="absent"), None
        self.record.event(STEP, "registry asked", stamp=remote.stamp, size=remote.size)
        if remote.stamp != found.wanted:
            self.console.say(
                f"  {self.name} in the registry is of another recipe"
                f" ({remote.stamp[:12] or 'without a stamp'}): another project's, or another"
                f" version's; this checkout's is {found.wanted[:12]}"
            )
        return replace(found, registry="there", remote=remote.stamp), remote

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
        if way == "pull":
            self.console.say(f"  the worker pulls {self.name} itself")
            try:
                self._pulled(self.there)
                if identity.same(image, self.there.find(self.name)):
                    return
                self.console.warn("what the worker pulled is another image; the head's is copied")
            except PullFailed as error:
                self.console.warn(f"the worker could not pull it: {error}; the head's is copied")
        if way != "keep":
            self.ship(self._platform(image)).ship(self.settings.text("IMAGE_SHIP"), image)

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
