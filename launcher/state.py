"""What the launcher remembers between runs: ``logs/state.json``, replaced whole each time.

It holds the finished steps with the fingerprints of their inputs, and the deployment now recorded.
Values of secrets never enter it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import LauncherError

VERSION = 1


@dataclass(frozen=True)
class RankRecord:
    rank: int
    role: str
    node: str
    log: str  # path of its log
    ports: Mapping[str, int] = field(default_factory=dict)
    pid: int | None = None  # None until the runtime has started it


@dataclass(frozen=True)
class DeploymentRecord:
    """The deployment that status, logs, stop and restart act on."""

    name: str  # rehearsal | pair
    launch_id: str
    fingerprint: str
    served_model_name: str
    api_host: str
    api_port: int
    master_port: int
    boot_id: str  # of the launcher's machine, at the launch
    started: float  # seconds since the epoch
    run: str  # folder of the run's record
    ranks: tuple[RankRecord, ...] = ()
    ready: float | None = None  # when health was first proven
    stopping: bool = False
    # Where the containers are, as settings may change while they run. Empty: on this machine.
    reach: Mapping[str, Any] = field(default_factory=dict)
    # MemAvailable of each role's node just before the start, bytes.
    memory: Mapping[str, int] = field(default_factory=dict)

    def with_pid(self, role: str, pid: int) -> DeploymentRecord:
        ranks = tuple(replace(r, pid=pid) if r.role == role else r for r in self.ranks)
        return replace(self, ranks=ranks)


@dataclass(frozen=True)
class Finished:
    fingerprint: str
    at: float  # seconds since the epoch
    seconds: float  # how long it took


@dataclass(frozen=True)
class State:
    steps: Mapping[str, Finished] = field(default_factory=dict)  # "<deployment>/<step>"
    deployment: DeploymentRecord | None = None


class Store:
    """The one file of the state. Every change is on disk before the call returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> State:
        """Raises LauncherError when the file is not one that this launcher writes."""
        try:
            raw = files.read_json(self.path)
            return State() if raw is None else _parse(raw)
        except (ValueError, KeyError, TypeError) as error:
            raise LauncherError(
                f"{self.path} cannot be read: {error}",
                f"a state of version {VERSION}, as this launcher writes it",
                f"move it away (mv {shlex.quote(str(self.path))} {shlex.quote(f'{self.path}.old')})"
                "; ranks that still run are found and ended by the next start, rehearse or stop",
            ) from error

    def save(self, state: State) -> None:
        raw = {
            "version": VERSION,
            "steps": {key: asdict(done) for key, done in state.steps.items()},
            "deployment": None if state.deployment is None else asdict(state.deployment),
        }
        files.replace_json(self.path, raw)

    def finish(self, key: str, done: Finished) -> None:
        state = self.load()
        self.save(replace(state, steps={**state.steps, key: done}))

    def forget(self, keys: Iterable[str]) -> None:
        state = self.load()
        dropped = set(keys)
        kept = {key: done for key, done in state.steps.items() if key not in dropped}
        if len(kept) != len(state.steps):
            self.save(replace(state, steps=kept))

    def record(self, deployment: DeploymentRecord | None) -> None:
        self.save(replace(self.load(), deployment=deployment))


def _parse(raw: Mapping[str, Any]) -> State:
    if raw["version"] != VERSION:
        raise ValueError(f"version {raw['version']!r}")
    steps = {str(key): Finished(**done) for key, done in raw["steps"].items()}
    entry = raw["deployment"]
    if entry is None:
        return State(steps)
    ranks = tuple(RankRecord(**r) for r in entry["ranks"])
    return State(steps, DeploymentRecord(**{**entry, "ranks": ranks}))
