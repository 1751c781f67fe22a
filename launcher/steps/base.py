"""What a step is, and what steps are given to work with."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.console import Console
from launcher.record import Record
from launcher.settings.values import Settings
from launcher.state import DeploymentRecord, Store

if TYPE_CHECKING:  # the rule of launcher.verbs
    from launcher.deployment import Deployment
    from launcher.nodes.base import Node
    from launcher.runtimes.base import Runtime

PREFLIGHT = "preflight"  # the key of the step that looks before anything is touched
ROLES = ("worker", "head")  # in the order of starting: the head waits for its workers


@dataclass(frozen=True)
class Context:
    """One deployment being brought up: the same for every step."""

    name: str  # rehearsal | pair
    root: Path  # the checkout
    logs: Path
    settings: Settings
    node: Node  # where the API, the engine and the state are
    runtime: Runtime
    store: Store
    record: Record
    console: Console
    plan: Callable[[str, int], Deployment]  # (launch id, master port) -> what is deployed
    # Where the ranks are, to be recorded; what their nodes have free, by role, in bytes; and how to
    # wait until they have it again. Nothing of it for ranks on this machine.
    reach: Mapping[str, Any] = field(default_factory=dict)
    memory: Callable[[], Mapping[str, int]] = dict
    # The runtime of a deployment that was started elsewhere than this one would be.
    former: Callable[[DeploymentRecord], Runtime] | None = None
    settle: Callable[[DeploymentRecord], None] = lambda recorded: None
    grace: float = 15.0  # seconds a rank may take to end: a headless vLLM takes about five

    @property
    def verb(self) -> str:
        """The command that brings this deployment up."""
        return "./start.sh rehearse" if self.name == "rehearsal" else "./start.sh"


@dataclass(frozen=True)
class Step(ABC):
    """One piece of a boot. Subclasses are frozen too: what a step knows, it is made with.

    ``needs`` are keys of steps whose redoing makes this one stale. A step that never counts as done
    (a check of the moment) returns False from ``done`` and is needed by none.
    """

    key: str
    title: str
    needs: tuple[str, ...] = ()

    @abstractmethod
    def inputs(self, ctx: Context) -> str:
        """A fingerprint of everything that decides the step's result."""

    @abstractmethod
    def done(self, ctx: Context) -> bool:
        """Whether the result is really there. Asked when the fingerprint is the recorded one."""

    def found(self, ctx: Context) -> str:
        """What is said where nothing is done. What rests on a warning warns here, each time."""
        return "already done"

    def look_ahead(self, ctx: Context) -> None:  # noqa: B027 - most can foresee nothing
        """Raise LauncherError for what can be known now to keep `do` from ending well. Nothing is
        changed. Asked before anything is undone, when the preflight and the download are done."""

    @abstractmethod
    def do(self, ctx: Context) -> None:
        """Bring the result about, from whatever an interrupted earlier run left."""

    def undo(self, ctx: Context) -> None:  # noqa: B027 - most leave nothing to undo
        """Take the result away because something it rests on is about to change. Idempotent."""


def fingerprint(parts: Mapping[str, Any]) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
