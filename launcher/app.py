"""What every verb is given: where things are, and how to talk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.console import Console
from launcher.errors import UsageError
from launcher.record import Record, Secrets, Unkept, in_addresses, open_run
from launcher.settings.load import load
from launcher.settings.rehearsal import PROFILE
from launcher.settings.secret import Secret
from launcher.settings.values import Settings
from launcher.state import Store

if TYPE_CHECKING:  # the rule of launcher.verbs
    from launcher.pair.reach import Reach
    from launcher.runtimes.base import Runtime
    from launcher.steps.base import Context, Step

REHEARSAL, PAIR = "rehearsal", "pair"
Builder = Callable[["App", Settings, Record], "tuple[Context, Sequence[Step]]"]


def rehearsal(app: App, settings: Settings, record: Record) -> tuple[Context, Sequence[Step]]:
    """The rehearsal's own builder."""
    from launcher.rehearsal import build

    return build(app, settings, record)


@dataclass
class Last:
    """What the verb came to, for the words of an error that knows of neither."""

    settings: Settings | None = None
    log: Path | None = None


@dataclass(frozen=True)
class App:
    root: Path  # the checkout
    environ: Mapping[str, str]
    console: Console
    secrets: Secrets
    build: Builder  # the rehearsal's
    store: Store = field(init=False)
    last: Last = field(init=False, default_factory=Last)

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", Store(self.logs / "state.json"))
        for each in in_addresses(self.environ):
            self.secrets.add(each)

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def lock(self) -> Path:
        return self.logs / "lock"

    def settings(
        self,
        overrides: Sequence[str] = (),
        say: Callable[[str], None] | None = None,
        deployment: str = REHEARSAL,
    ) -> Settings:
        """A deployment's settings. Their secrets are masked from here on, wherever we write."""
        profile = PROFILE if deployment == REHEARSAL else None
        found = load(self.root, self.environ, overrides, profile, say=say or self.console.warn)
        for _, resolved in found.items():
            if isinstance(resolved.value, Secret):
                self.secrets.add(resolved.value.reveal())
        if overrides or self.last.settings is None:
            self.last.settings = found
        return found

    def recorded_name(self) -> str:
        """The deployment that a verb without one acts on."""
        recorded = self.store.load().deployment
        return REHEARSAL if recorded is None else recorded.name

    def open_run(self, must: bool = True) -> Record:
        """A new record. Where it ``must`` not be, a disk that is full gives one that keeps nothing:
        what runs can be ended without it."""
        try:
            made = open_run(self.logs, secrets=self.secrets)
        except OSError as error:
            if must:
                raise
            self.console.warn(f"nothing is recorded: {error}")
            return Unkept(self.logs)
        self.last.log = made.folder / "log.txt"
        return made

    def runtime(self, deployment: str, patience: float = 10.0) -> Runtime:
        """The runtime of a deployment's ranks, where they were started or, if none is recorded,
        where the settings would start them. ``patience``: seconds for one answer of another node.

        Raises UsageError for one that this version cannot reach.
        """
        if deployment == REHEARSAL:
            from launcher.runtimes.process import ProcessRuntime

            return ProcessRuntime(self.root, self.logs, self.environ)
        if deployment == PAIR:
            from launcher.pair import reach

            return reach.runtime(self.reach(), self.logs, patience=patience)
        raise UsageError(
            f"the deployment recorded in {self.store.path} is named {deployment}",
            f"{REHEARSAL} or {PAIR}: those that this version can start and stop",
            "use the version of the launcher that started it",
        )

    def reach(self) -> Reach:
        """How the pair's containers are reached."""
        from launcher.pair.reach import Reach

        recorded = self.store.load().deployment
        if recorded is not None and recorded.name == PAIR:
            try:
                return Reach.of_record(recorded.reach)
            except (KeyError, TypeError) as error:
                raise UsageError(
                    f"the pair recorded in {self.store.path} does not say where its ranks are"
                    f" ({error!r})",
                    "a record that this version made",
                    f"docker ps on both nodes shows what runs; move {self.store.path} away, then"
                    " ./start.sh stop finds what this checkout started",
                ) from error
        settings = self.settings(deployment=PAIR, say=lambda line: None)
        return Reach.of_settings(settings, self.root)
