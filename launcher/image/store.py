"""The images of one node's Docker daemon: looked at, pulled, named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from launcher.errors import LauncherError
from launcher.facts import docker as docker_facts
from launcher.facts.docker import Image
from launcher.image.registry import Login
from launcher.libraries.sdk import APIError, ImageNotFound, docker
from launcher.runtimes.reach import Factory, Reach, Unreachable

PULL = 6 * 3600.0  # seconds for a whole pull
SILENCE = 600  # seconds without a word of a pull, in which a daemon unpacks a large layer
CHANGE = 120.0  # seconds to name or remove an image


class PullFailed(Exception):
    """The daemon could not bring it; the text is what it said."""


class ImageStore:
    """``role`` names the node to people; ``factory`` makes clients of its daemon."""

    def __init__(self, role: str, factory: Factory) -> None:
        self.role = role
        self._reach = Reach(factory)

    def find(self, name: str) -> Image | None:
        """Raises LauncherError where the daemon cannot be asked."""

        def ask(client: docker.DockerClient) -> Image | None:
            try:
                return docker_facts.image(client.images.get(name).attrs)
            except ImageNotFound:
                return None

        found: Image | None = self._call(ask, f"looking for {name}")
        return found

    def root(self) -> str:
        """The directory of its images, as the node has it."""
        return str(self._call(lambda client: client.api.info(), "its state")["DockerRootDir"])

    def out_of_reach(self, name: str) -> str:
        """Why this daemon could not pull it, "" if it could. Its registry is asked, by the daemon
        with its own proxies and mirrors; nothing is pulled."""

        def ask(client: docker.DockerClient) -> None:
            client.api.inspect_distribution(name)  # type: ignore[no-untyped-call]

        try:
            self._call(ask, f"asking for {name}", CHANGE)
        except LauncherError as error:
            return error.found
        return ""

    def tag(self, source: str, target: str) -> None:
        name, tag = split(target)
        self._call(
            lambda client: client.api.tag(source, name, tag, force=True),
            f"naming {source} {target}",
            CHANGE,
        )

    def untag(self, name: str) -> None:
        """Take the name away; the image stays while it has another. None of that name is fine."""

        def ask(client: docker.DockerClient) -> None:
            with contextlib.suppress(ImageNotFound):
                client.api.remove_image(name, noprune=True)

        self._call(ask, f"removing the name {name}", CHANGE)

    def pull(
        self, name: str, platform: str, login: Login | None, say: Callable[[str], None]
    ) -> None:
        """The name moves when the whole image is there. Raises PullFailed, LauncherError."""
        host = name.partition("/")[0]
        auth = None
        if login is not None and login.host == host:
            # In a header of the daemon's API: in no argument and in no file.
            auth = {"username": login.user, "password": login.token.reveal()}
        base, tag = split(name)

        def ask(client: docker.DockerClient) -> str:
            """What went wrong, in the daemon's words; "" if nothing did."""
            client.api.timeout = SILENCE
            said = client.api.pull(
                base, tag=tag, stream=True, decode=True, auth_config=auth, platform=platform or None
            )
            progress = _Progress()
            for line in said:
                if "error" in line:
                    return " ".join(str(line["error"]).split()) or "an error without words"
                say(progress.told(line))
            return ""

        try:
            wrong = self._call(ask, f"pulling {name}", PULL)
        except LauncherError as error:
            if isinstance(error.__cause__, APIError):
                raise PullFailed(error.found) from error
            raise
        if wrong:
            raise PullFailed(wrong)

    def _call(
        self,
        what: Callable[[docker.DockerClient], Any],
        doing: str,
        timeout: float | None = None,
    ) -> Any:
        try:
            return self._reach.call(what, timeout)
        except Unreachable as fault:
            raise LauncherError(
                f"{doing} on the {self.role}: {fault}",
                "a Docker daemon that answers",
                fault.mend or f"./start.sh doctor tells what is wrong with the {self.role}'s node",
            ) from fault
        except APIError as fault:
            said = " ".join(str(fault.explanation or fault).split())
            raise LauncherError(
                f"Docker on the {self.role}, {doing}: {said}",
                "a daemon that does it",
                "mend what Docker says, then ./start.sh again",
            ) from fault


class _Progress:
    """Bytes of all layers together, of what the daemon says layer by layer."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[int, int]] = {}

    def told(self, line: Mapping[str, Any]) -> str:
        detail = line.get("progressDetail") or {}
        if "total" in detail and line.get("status") == "Downloading":
            self._layers[str(line.get("id"))] = int(detail["current"]), int(detail["total"])
        done = sum(each[0] for each in self._layers.values())
        total = sum(each[1] for each in self._layers.values())
        if not total:
            return str(line.get("status", ""))
        return f"{line.get('status', '')}, {done / 1e9:.2f} of {total / 1e9:.2f} GB known so far"


def split(name: str) -> tuple[str, str]:
    """Repository and tag of a name; a digest is a tag to Docker's API."""
    base, at, digest = name.partition("@")
    if at:
        return base, digest
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")
