"""The download of the pair: from settings to a job on this head, and what the ranks mount of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.app import App
from launcher.commands.container import NodePlace, place_of
from launcher.nodes.local import LocalNode
from launcher.record import Record
from launcher.settings import pair_rules
from launcher.settings.values import Settings
from launcher.weights import hub, proof
from launcher.weights.download import Job
from launcher.weights.manifest import Manifest, Role
from launcher.weights.solid import solid

KEYS: Mapping[Role, str] = {"model": "CACHE_ROOT", "engram": "ENGRAM_SRC"}


def head_place(settings: Settings) -> NodePlace:
    return place_of(settings, "head", str(Path.home()))


def job(app: App, settings: Settings, record: Record, *, fresh: bool = False) -> Job:
    """The job of this head. Contacts nobody."""
    pair_rules.require(settings, (pair_rules.distinct,))  # all that this verb needs of them
    place = head_place(settings)
    # A hub's token may come from the environment or a file: it is masked like our own.
    for token in hub.secrets(app.environ):
        app.secrets.add(token)
    serves = app.store.load().deployment is not None
    node = LocalNode("head")
    fast = settings.flag("HF_HUB_ENABLE_HF_TRANSFER")
    if fast and not serves:
        record.event("download", "hf-xet may use all cores (HF_HUB_ENABLE_HF_TRANSFER=1)")
    return Job(
        node=node,
        hub=hub.Hub(
            node,
            app.root,
            # Beside a model that serves, neither cores nor buffers of tens of GB are free.
            hub.environment(app.environ, fast and not serves),
            settings.int("HF_MAX_WORKERS"),
            lambda line: record.text("download", line),
        ),
        directories={"model": Path(place.model_dir), "engram": Path(place.engram_dir)},
        repos={role: settings.text(key) for role, key in hub.KEYS.items()},
        cache_root=Path(place.cache_root),
        console=app.console,
        record=record,
        fetch=settings.flag("AUTO_DOWNLOAD"),
        fresh=fresh,
        threads=1 if serves else proof.THREADS,
    )


@dataclass
class Weights:
    """What the download of this run brought: filled by its step, read by those after it."""

    manifest: Manifest | None = None
    directories: Mapping[Role, str] | None = None  # of the head, as they can be mounted

    def placed(self, place: NodePlace) -> NodePlace:
        """The head's place with these directories."""
        if self.directories is None:
            return place
        return replace(
            place, model_dir=self.directories["model"], engram_dir=self.directories["engram"]
        )

    def per_rank(self) -> int | None:
        """Bytes of weights that a rank will hold: half of the shards; None: not known yet."""
        if self.manifest is None:
            return None
        part = self.manifest.part("model")
        shards = (each.size for each in part.entries if each.name.endswith(".safetensors"))
        return sum(shards) // 2 or None


def mountable(given: Job, settings: Settings, manifest: Manifest) -> Mapping[Role, str]:
    """The head's directories as they can be mounted and exported. Raises LauncherError."""
    asked = settings.text("ENGRAM_SRC")
    places: Mapping[Role, Path] = {
        "model": given.cache_root / "model-src",
        "engram": _path(settings, asked) if asked else given.cache_root / "engram-src",
    }
    found: dict[Role, str] = {}
    for part in manifest.parts:
        role = part.role
        wanted = bool(asked) and role == "engram"
        made = solid(given.directories[role], part, places[role], always=wanted, key=KEYS[role])
        if made.note:
            given.console.say(f"  {proof.NAMES[role]} for the ranks: {made.note}")
        given.record.event("download", "mounted from", role=role, path=str(made.path))
        found[role] = str(made.path)
    return found


def _path(settings: Settings, text: str) -> Path:
    return settings.root / Path(text).expanduser()
