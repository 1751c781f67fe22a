"""Builds the image on the head by ``docker build``, from a context that holds the recipe alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from launcher.console import Console
from launcher.errors import LauncherError
from launcher.image import stamp
from launcher.nodes.base import Node
from launcher.record import Record

SECONDS = 4 * 3600.0
LAST = 40  # lines shown of a build that failed
NO_BASE = ("manifest unknown", "pull access denied", "manifest for ")
NO_NETWORK = (
    "no such host", "timeout", "temporary failure", "could not resolve", "connection refused",
)  # fmt: skip


def argv(name: str, base: str, wanted: str, platform: str, file: str) -> list[str]:
    """``docker build`` with the context on stdin; the name moves to a whole image alone.

    The steps fetch packages over the host's own network: a bridge may be firewalled, or absent.
    """
    chosen = ["--platform", platform] if platform else []
    return [
        *("docker", "build", "--network", "host", *chosen),
        *("--build-arg", f"BASE_IMAGE={base}"),
        *("--build-arg", f"SPARK_RECIPE_STAMP={wanted}"),
        *("--tag", name, "--file", file, "-"),
    ]


def build(
    root: Path,
    node: Node,
    name: str,
    base: str,
    wanted: str,
    platform: str,
    log: Path,
    record: Record,
    console: Console,
) -> None:
    """``wanted``: the stamp; ``platform`` only where one was asked for. ``log`` gets all lines.

    Raises LauncherError with the last of them.
    """
    console.say(f"  building {name} on {base}; lines in {log}")
    data = stamp.context(root)
    words = argv(name, base, wanted, platform, stamp.DOCKERFILE)
    last: deque[str] = deque(maxlen=LAST)
    since = console.now()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as out:

        def line(text: str) -> None:
            # Masked as everything that we write: a proxy's password may be among the arguments.
            shown = record.secrets.hide(text)
            out.write(shown + "\n")
            out.flush()
            if shown.strip():
                last.append(shown)

        def tick() -> None:
            console.progress(last[-1].strip() if last else "sending the recipe", since)

        done = node.run(words, timeout=SECONDS, stdin=data, line=line, tick=tick)
    if done.status:
        raise failed(name, base, last, log)


def failed(name: str, base: str, last: Sequence[str], log: Path) -> LauncherError:
    said = "\n".join(last).lower()
    if "no space left on device" in said:
        needed = "space for the base and the image where Docker keeps them (docker info: Root Dir)"
        mend = "docker system df tells what is there, docker system prune frees it; then again"
    elif any(words in said for words in NO_BASE):
        needed = f"a base that can be pulled: {base}"
        mend = "mend BASE_IMAGE in .env, or docker login where it needs an account; then again"
    elif any(words in said for words in NO_NETWORK):
        needed = "a network over which the base and the packages can be fetched"
        mend = f"docker pull {base} must work on this machine; then ./start.sh goes on"
    else:
        needed = "a build whose every step ends well"
        mend = "mend what the last lines say, then ./start.sh again: steps that ended are kept"
    told = "\n".join(f"    {line}" for line in last)
    return LauncherError(f"{name} could not be built; its last lines:\n{told}", needed, mend, log)
