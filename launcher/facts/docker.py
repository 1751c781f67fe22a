"""What a Docker daemon says of itself, of our image and of its containers. Pure: dicts in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.facts.base import Missing

LAUNCH = "dsv41.launch"
ROLE = "dsv41.role"
OWNER = "dsv41.owner"
STAMP = "dsv41.recipe.stamp"


@dataclass(frozen=True)
class Image:
    """``layers`` are the diff ids in order: an Id differs between Docker's stores. ``stamp`` is of
    the recipe it was built by, ``size`` in bytes as the daemon counts."""

    id: str
    layers: tuple[str, ...]
    architecture: str
    os: str
    stamp: str = ""
    size: int = 0


@dataclass(frozen=True)
class Container:
    """``argv``, ``gpu`` and ``exit_code`` are known of inspected ones only."""

    id: str
    name: str
    image: str
    state: str  # running, exited, created, paused, restarting, dead
    labels: Mapping[str, str]
    gpu: bool = False
    argv: tuple[str, ...] = ()
    exit_code: int | None = None

    @property
    def running(self) -> bool:
        return self.state in ("running", "paused", "restarting")

    @property
    def launch(self) -> str:
        return self.labels.get(LAUNCH, "")

    @property
    def role(self) -> str:
        return self.labels.get(ROLE, "")

    @property
    def owner(self) -> str:
        return self.labels.get(OWNER, "")

    def option(self, name: str) -> str:
        """The word after ``name`` on its command line, or ""."""
        for at, word in enumerate(self.argv):
            if word == name and at + 1 < len(self.argv):
                return self.argv[at + 1]
            if word.startswith(name + "="):
                return word.removeprefix(name + "=")
        return ""


@dataclass(frozen=True)
class Docker:
    version: str
    api: str
    store: str  # overlay2, overlayfs (the containerd store), …
    runtimes: tuple[str, ...]
    root: str
    image: Image | Missing | None  # None: not asked, or there is none of that name
    containers: tuple[Container, ...]

    def named(self, name: str) -> Container | None:
        return next((each for each in self.containers if each.name == name), None)


def docker(
    version: Mapping[str, Any],
    info: Mapping[str, Any],
    image: Image | Missing | None,
    containers: Sequence[Container],
) -> Docker:
    return Docker(
        version=str(version.get("Version") or info.get("ServerVersion") or ""),
        api=str(version.get("ApiVersion") or ""),
        store=str(info.get("Driver") or ""),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        root=str(info.get("DockerRootDir") or ""),
        image=image,
        containers=tuple(containers),
    )


def image(attrs: Mapping[str, Any]) -> Image:
    return Image(
        id=str(attrs.get("Id", "")),
        layers=tuple((attrs.get("RootFS") or {}).get("Layers") or ()),
        architecture=str(attrs.get("Architecture") or ""),
        os=str(attrs.get("Os") or ""),
        stamp=str(((attrs.get("Config") or {}).get("Labels") or {}).get(STAMP) or ""),
        size=int(attrs.get("Size") or 0),
    )


def container(attrs: Mapping[str, Any]) -> Container:
    """From an entry of the list or from an inspection: their shapes differ."""
    config = attrs.get("Config") or {}
    host = attrs.get("HostConfig") or {}
    state = attrs.get("State")
    names = attrs.get("Names") or [attrs.get("Name") or ""]
    status = state.get("Status") if isinstance(state, Mapping) else state
    code = state.get("ExitCode") if isinstance(state, Mapping) else None
    path = [attrs["Path"]] if attrs.get("Path") else []
    return Container(
        id=str(attrs.get("Id") or ""),
        name=str(names[0]).lstrip("/"),
        image=str(config.get("Image") or attrs.get("Image") or ""),
        state=str(status or "").lower(),
        labels=dict(config.get("Labels") or attrs.get("Labels") or {}),
        gpu=_gpu(config, host),
        argv=tuple(str(word) for word in [*path, *(attrs.get("Args") or ())]),
        exit_code=code if isinstance(code, int) else None,
    )


def _gpu(config: Mapping[str, Any], host: Mapping[str, Any]) -> bool:
    """Whether it was given a GPU, by whichever of the ways there are."""
    if host.get("Runtime") == "nvidia":
        return True
    for request in host.get("DeviceRequests") or ():
        wanted = {word for group in request.get("Capabilities") or () for word in group}
        ids = request.get("DeviceIDs") or ()
        if "gpu" in wanted or request.get("Driver") in ("nvidia", "cdi"):
            return True
        if any("nvidia.com/gpu" in str(each) for each in ids):
            return True
    for device in host.get("Devices") or ():
        if str(device.get("PathOnHost", "")).startswith("/dev/nvidia"):
            return True
    # With nvidia as the daemon's default runtime this alone is enough.
    visible = [str(e) for e in config.get("Env") or () if str(e).startswith("NVIDIA_VISIBLE_DEV")]
    return bool(host.get("Privileged")) and any(
        each.partition("=")[2] not in ("", "void", "none") for each in visible
    )
