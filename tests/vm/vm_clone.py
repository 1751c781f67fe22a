"""The checkout on the head's guest: how it gets there, and how its owner uses it."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import head_clone
from clone import CHECKOUT, Ran, copy_working_tree
from guest import USER

from launcher.settings import dotenv

if TYPE_CHECKING:
    from guests import Guests


CLONE = "a clean clone"
SETTINGS: Mapping[str, str] = {
    # CONTAINER_ULIMITS is as shipped: here memlock can be raised.
    **{key: text for key, text in head_clone.SETTINGS.items() if key != "CONTAINER_ULIMITS"},
    "READY_TIMEOUT": "240",
    "DSV41_HANG_SECONDS": "120",
}
PATIENCE: Mapping[str, Mapping[str, str]] = {
    "launcher/facts/batch.py": {"SECTION_SECONDS = 5 ": "SECTION_SECONDS = 40 ",
                                "LIMIT = 25.0": "LIMIT = 200.0"},
    "launcher/nodes/daemon.py": {"SECONDS = 10.0": "SECONDS = 80.0"},
}  # fmt: skip


class VmClone:
    """The clone on the head, used by its owner in a login there."""

    def __init__(self, guests: Guests) -> None:
        self.guests = guests
        self.history: list[Ran] = []

    def start(self, *words: str, timeout: float = 120.0) -> Ran:
        """``./start.sh WORDS`` to its end."""
        began = time.monotonic()
        asked = ("./start.sh", *words)
        done = self.guests.head.run(*asked, user=USER, cwd=CLONE, timeout=timeout, check=False)
        told = " ".join(asked)
        ran = Ran(told, done.status, done.out, done.err, time.monotonic() - began)
        self.history.append(ran)
        return ran

    def until(self, code: int, words: str = "", timeout: float = 120.0) -> Ran:
        """Ask ``status`` until it ends with ``code`` and says ``words``.

        Once is not always enough: on emulated cores the worker's Docker, or the API, may need
        longer than the 4 s and 0.9 s that status gives them, and it says so.
        """
        end = time.monotonic() + timeout
        while True:
            ran = self.start("status")
            if ran.status == code and words in ran.said:
                return ran
            assert time.monotonic() < end, f"no status {code} {words!r}: {ran.status}\n{ran.said}"

    def containers(self) -> dict[str, str]:
        guests = (self.guests.head, self.guests.worker)
        return {f"{g.name} {k}": v for g in guests for k, v in g.containers().items()}

    def account(self) -> Iterator[tuple[str, str]]:
        """What the last commands said, and the ends of the ranks' logs."""
        for ran in self.history[-4:]:
            yield f"{ran.words}: status {ran.status} after {ran.seconds:.1f} s", ran.said
        for guest in (self.guests.head, self.guests.worker):
            for name, state in guest.containers().items():
                log = guest.run("docker", "logs", "--tail", "30", name, check=False)
                yield f"{guest.name}: {name} {state}", log.said


def make(target: Path) -> None:
    """A clone of the working tree, with .venv as the guests' Python can use it."""
    copy_working_tree(CHECKOUT, target)
    venv = target / ".venv"
    shutil.copytree(CHECKOUT / ".venv", venv, symlinks=True)
    for link in (venv / "bin").glob("python*"):
        link.unlink()
        link.symlink_to("/usr/bin/python3")
    told = (venv / "pyvenv.cfg").read_text()
    (venv / "pyvenv.cfg").write_text(re.sub(r"(?m)^home = .*$", "home = /usr/bin", told))
    lines = [f"{key}={dotenv.quote(text)}\n" for key, text in SETTINGS.items()]
    (target / ".env").write_text("".join(lines))
    (target / ".env").chmod(0o600)
    _patient(target)


def _patient(target: Path) -> None:
    """What takes a Spark a second takes an emulated core ten: the launcher's limits for an answer
    are stretched as much. Nothing else of it is changed."""
    for file, limits in PATIENCE.items():
        path = target / file
        text = path.read_text()
        for was, becomes in limits.items():
            assert text.count(was) == 1, f"{file} has {was!r} {text.count(was)} times, needed once"
            text = text.replace(was, becomes)
        path.write_text(text)
