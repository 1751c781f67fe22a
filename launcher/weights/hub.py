"""The hub as the launcher sees it: what a repository holds, and its files brought into a directory.

The talking is done by `fetch`, a process beside this one, through huggingface_hub.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError
from launcher.nodes.base import Node
from launcher.weights.manifest import Entry, Part, Role
from launcher.weights.proof import FOREVER

MODULE = "launcher.weights.fetch"
ASKING = 600.0  # seconds: an answer and an index of some megabytes, with the library's own retries
DAYS = 28 * FOREVER
# A failure of these is over in a moment, or the next file has none.
PASSING = frozenset({"network", "hub", "busy"})
KEYS: Mapping[Role, str] = {"model": "HF_MODEL_REPO", "engram": "HF_ENGRAM_REPO"}
LOGIN = "put a token that may read it into HF_TOKEN of the environment, or: .venv/bin/hf auth login"


class HubError(LauncherError):
    """What the hub, or the way to it, refused. ``kind`` is one of `fetch.kind_of`."""

    def __init__(self, kind: str, found: str, needed: str, do_next: str) -> None:
        super().__init__(found, needed, do_next)
        self.kind = kind


def environment(environ: Mapping[str, str], fast: bool) -> dict[str, str]:
    """What the library reads, from the user's own environment (HF_TOKEN, HF_ENDPOINT, proxies).

    ``fast``: hf-xet may use all cores and many buffers, which a node that serves cannot spare.
    """
    found = {
        **environ,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "0",  # or the bars that tell the bytes are not asked
        "PYTHONUNBUFFERED": "1",
    }
    # The old library's switch is not known any more: it would only be warned of.
    found.pop("HF_HUB_ENABLE_HF_TRANSFER", None)
    found.pop("HF_XET_HIGH_PERFORMANCE", None)
    if fast:
        found["HF_XET_HIGH_PERFORMANCE"] = "1"
    return found


def secrets(environ: Mapping[str, str]) -> list[str]:
    """Tokens that the library may use, to be masked wherever we write."""
    found = [environ.get(key, "") for key in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")]
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    path = environ.get("HF_TOKEN_PATH") or str(home / "token")
    with contextlib.suppress(OSError, UnicodeDecodeError):  # none was stored
        found.append(Path(path).expanduser().read_text(encoding="utf-8").strip())
    return [each for each in found if each]


@dataclass(frozen=True)
class Hub:
    """``said`` gets what the library has to say, for the record."""

    node: Node
    root: Path  # the checkout: where the module is found
    environ: Mapping[str, str] = field(repr=False)
    workers: int = 8
    said: Callable[[str], None] = lambda line: None
    python: str = sys.executable
    large: int = 1_000_000_000  # bytes; from here on a file is taken up where it was broken off

    def resolve(self, role: Role, repo: str, revision: str | None = None) -> Part:
        """The files of ``repo`` that ``role`` needs, at the commit that ``revision`` (None: its
        main branch) is now. Raises HubError."""
        job = {"do": "resolve", "repo": repo, "role": role, "revision": revision}
        answer = self._run(job, repo, role, ASKING)
        entries = tuple(
            Entry(name, size, sha256, git) for name, size, sha256, git in answer["files"]
        )
        return Part(role, repo, answer["commit"], entries)

    def fetch(
        self,
        part: Part,
        directory: Path,
        names: Sequence[str],
        progress: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Bring ``names`` anew into ``directory``. Raises HubError, before a file is touched where
        the hub would not send them; files that came whole stay."""
        job = {
            "do": "fetch",
            "repo": part.repo,
            "commit": part.revision,
            "directory": str(directory),
            "files": {entry.name: [entry.size, entry.sha256] for entry in map(part.entry, names)},
            "workers": self.workers,
            "large": self.large,
        }
        self._run(job, part.repo, part.role, DAYS, progress)

    def _run(
        self,
        job: Mapping[str, Any],
        repo: str,
        role: Role,
        timeout: float,
        progress: Callable[[int], None] = lambda count: None,
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {}

        def line(text: str) -> None:
            if not text.startswith("{"):
                self.said(text)
                return
            value = json.loads(text)
            if set(value) == {"bytes"}:
                progress(int(value["bytes"]))
            else:
                answer.update(value)

        done = self.node.run(
            (self.python, "-m", MODULE),
            timeout=timeout,
            env=self.environ,
            cwd=str(self.root),
            stdin=json.dumps(job).encode(),
            line=line,
        )
        if answer.get("failed"):
            self.said(f"{answer['failed']}: {answer['text']}")
            raise _error(answer, repo, role, str(job.get("directory", "")))
        if done.status or not answer:
            raise HubError(
                "other",
                f"the download's process ended with status {done.status}: {done.last(3)}",
                "an end in order",
                "run this again: whole files are not fetched twice",
            )
        return answer


def _error(answer: Mapping[str, Any], repo: str, role: Role, directory: str) -> HubError:
    kind, text = str(answer["failed"]), str(answer["text"]).strip()
    brief = " ".join(text.split())[:300]
    key = KEYS[role]
    again = "run this again: whole files are kept"
    match kind:
        case "told":
            return HubError(kind, answer["found"], answer["needed"], answer["mend"])
        case "gated":
            words = (
                f"{repo} is given only to accounts that have agreed to its terms: {brief}",
                "an account that has, and its token",
                f"agree on the repository's page, then {LOGIN}",
            )
        case "token":
            words = (
                f"the hub refuses {repo} to this token, or without one: {brief}",
                f"a public repository in {key}, or a token that may read it",
                f"see that {key} is spelled right, and take a wrong HF_TOKEN out of the"
                f" environment; for a private one {LOGIN}",
            )
        case "repository" | "revision":
            words = (
                f"the hub has no {repo}, or not the commit that was settled on: {brief}",
                f"a repository of the hub in {key}",
                f"see that {key} is spelled right; ./start.sh download --update takes the newest"
                " commit",
            )
        case "offline":
            words = (
                "HF_HUB_OFFLINE is set in the environment: the hub may not be asked",
                "the hub, for what is missing",
                "unset it, or put the files there by hand; AUTO_DOWNLOAD=0 only verifies",
            )
        case "network" | "hub" | "busy":
            words = (
                f"the hub could not be reached, or did not serve {repo}: {brief}",
                "a way to the hub (HF_ENDPOINT and the proxies of the environment are obeyed)",
                again,
            )
        case "disk":
            words = (
                f"the disk of {directory} is full: {brief}",
                "room for the files",
                f"free some space (df -h {directory}), then {again}",
            )
        case "permission":
            words = (
                f"{directory} may not be written: {brief}",
                "a directory of this user",
                f"see ls -ld {directory}, then {again}",
            )
        case _:
            words = (f"the download of {repo} failed: {brief}", "no fault in it", again)
    return HubError(kind, *words)
