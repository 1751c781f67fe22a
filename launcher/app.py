"""What every verb is given: where things are, and how to talk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.console import Console
from launcher.errors import UsageError
from launcher.record import Record, Secrets, open_run
from launcher.runtimes.base import Runtime
from launcher.runtimes.process import ProcessRuntime
from launcher.settings.load import load
from launcher.settings.rehearsal import PROFILE
from launcher.settings.secret import Secret
from launcher.settings.values import Settings
from launcher.state import Store
from launcher.steps.base import Context, Step

Builder = Callable[["App", Settings, Record], tuple[Context, Sequence[Step]]]


@dataclass(frozen=True)
class App:
    root: Path  # the checkout
    environ: Mapping[str, str]
    console: Console
    secrets: Secrets
    build: Builder  # the rehearsal's
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", Store(self.logs / "state.json"))

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def lock(self) -> Path:
        return self.logs / "lock"

    def settings(
        self, overrides: Sequence[str], say: Callable[[str], None] | None = None
    ) -> Settings:
        """The rehearsal's settings. Their secrets are masked from here on, wherever we write."""
        found = load(self.root, self.environ, overrides, PROFILE, say=say or self.console.warn)
        for _, resolved in found.items():
            if isinstance(resolved.value, Secret):
                self.secrets.add(resolved.value.reveal())
        return found

    def open_run(self) -> Record:
        return open_run(self.logs, secrets=self.secrets)

    def runtime(self, deployment: str) -> Runtime:
        """The runtime of a deployment's ranks.

        Raises UsageError for one that this version cannot reach.
        """
        if deployment == "rehearsal":
            return ProcessRuntime(self.root, self.logs, self.environ)
        raise UsageError(
            f"the deployment recorded in {self.store.path} is named {deployment}",
            "rehearsal: the only one that this version can start and stop",
            "use the version of the launcher that started it",
        )
