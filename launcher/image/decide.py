"""Whether the image is kept, pulled, built, shipped or refused. Pure: what is there, the flags.

The head's image has a stamp (of the recipe that it was built by; "" without), and so has what the
registry holds, which is asked for before anything large is moved: a pull that cannot bring the
wanted stamp is made only where nothing else would bring an image, or where PULL=1 asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.settings.values import Settings

Says = Literal["not asked", "out of reach", "absent", "there", "not pulled"]
Act = Literal["keep", "pull", "build", "refuse"]
Way = Literal["keep", "pull", "ship", "refuse"]


@dataclass(frozen=True)
class Flags:
    build: bool = False
    skip_build: bool = False
    pull: bool = False
    skip_pull: bool = False
    skip_ship: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Flags:
        keys = ("BUILD", "SKIP_BUILD", "PULL", "SKIP_PULL", "SKIP_SHIP")
        return cls(*(settings.flag(key) for key in keys))

    @property
    def may_pull(self) -> bool:
        """PULL=1 is stronger than SKIP_PULL=1, and BUILD=1 than both."""
        return not self.build and (self.pull or not self.skip_pull)

    @property
    def head_needs_one(self) -> bool:
        """Nothing may bring the head an image: it must have one."""
        return self.skip_build and not self.build and not self.may_pull


@dataclass(frozen=True)
class Found:
    """``head``: the stamp of the head's image, None where there is none that runs there.

    registry, remote  what the registry says, and the stamp that its image has.
    failed  why its image could not be pulled.
    """

    wanted: str
    head: str | None
    registry: Says = "not asked"
    remote: str = ""
    failed: str = ""

    @property
    def right(self) -> bool:
        return self.head is not None and self.head == self.wanted


@dataclass(frozen=True)
class Plan:
    act: Act
    why: str
    warning: bool = False  # ``why`` must not be overlooked


def asks(flags: Flags, found: Found, in_a_registry: bool) -> bool:
    """Whether the registry is to be asked. ``in_a_registry``: the name has a slash."""
    return in_a_registry and flags.may_pull and (flags.pull or not found.right)


def head(flags: Flags, found: Found) -> Plan:
    """What brings the head its image. After a failed pull it is asked again, with the registry's
    "not pulled"."""
    if flags.build:
        return Plan("build", "BUILD=1")
    if found.registry == "there":
        if found.remote == found.wanted:
            why = "PULL=1" if found.right else "the registry has it of this recipe"
            return Plan("pull", why)
        if flags.skip_build and (flags.pull or found.head is None):
            why = f"the registry's is {_told(found.remote)}, not of this recipe, and SKIP_BUILD=1"
            return Plan("pull", why, warning=True)
    if found.right:
        return Plan("keep", "it is of this recipe")
    if flags.skip_build:
        if found.head is None:
            return Plan("refuse", _registry(found))
        why = f"it is {_told(found.head)}, not of this recipe; SKIP_BUILD=1 keeps it"
        return Plan("keep", why, warning=True)
    have = "there is none" if found.head is None else f"it is {_told(found.head)}"
    why = f"{have}; {_registry(found)}"
    return Plan("build", why, warning=found.registry in ("out of reach", "not pulled"))


def worker(flags: Flags, same: bool, remote_same: bool) -> Way:
    """What brings the worker the head's image. ``remote_same``: the registry's has its layers."""
    if same:
        return "keep"
    if flags.skip_ship:
        return "refuse"
    return "pull" if remote_same and flags.may_pull else "ship"


def _told(stamp: str) -> str:
    return f"of recipe {stamp[:12]}" if stamp else "without a recipe's stamp"


def _registry(found: Found) -> str:
    match found.registry:
        case "there":
            return f"the registry's is {_told(found.remote)}, another"
        case "absent":
            return "the registry has none of that name for this account"
        case "out of reach":
            return "the registry is out of reach"
        case "not pulled":
            return f"the registry's could not be pulled: {found.failed}"
        case "not asked":
            return "no registry was asked"
