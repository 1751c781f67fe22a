"""The step that sets a memory guard beside each rank, on the rank's own node (see watch/guard).

The guard goes there as one file that Python runs as it is: it must look and act where the memory
is, for a node that is short of it answers no one in time. It ends by itself when its rank is gone.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher.errors import LauncherError
from launcher.nodes.base import Node
from launcher.settings.values import Settings
from launcher.steps.base import ROLES, Context, Step, fingerprint

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("launcher/__init__.py", "launcher/watch/__init__.py", "launcher/watch/guard/*.py")
DOOR = (
    "import os, sys\n"
    "from launcher.watch.guard.__main__ import main\n"
    "sys.exit(main(sys.argv[1:], os.environ))\n"
)
START = 30.0  # seconds
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same file from the same sources


@dataclass(frozen=True)
class Post:
    """Where a guard stands: its node, the folder for its file and notes there, and what it guards
    (words of the guard's command)."""

    node: Node
    folder: PurePosixPath
    guards: tuple[str, ...]
    python: str = "python3"

    def log(self, role: str) -> PurePosixPath:
        return self.folder / f"{role}.log"


@dataclass(frozen=True, kw_only=True)
class MemoryGuard(Step):
    key: str = "guard"
    title: str = "memory guard (stops a server that takes the node's last memory)"
    needs: tuple[str, ...] = ("launch",)
    posts: Callable[[Context], Mapping[str, Post]]

    def inputs(self, ctx: Context) -> str:
        return fingerprint({})

    def done(self, ctx: Context) -> bool:
        return False  # a second guard of a rank sees the first, and leaves it alone

    def do(self, ctx: Context) -> None:
        posts = self.posts(ctx)
        for role in ROLES:
            post = posts.get(role)
            if post is None:
                continue  # it has ended already, which the next step tells
            start(role, post, ctx.settings)
            told = f"  {role}: guarded, {post.log(role)} on its node"
            ctx.record.event(self.key, "guard started", role=role, log=str(post.log(role)))
            ctx.console.say(told)


def start(role: str, post: Post, settings: Settings) -> None:
    """Raises LauncherError when the node cannot run it, or it cannot see what it guards."""
    content = bundle()
    file = post.folder / f"memguard-{hashlib.sha256(content).hexdigest()[:12]}.pyz"
    if not post.node.exists(Path(file)):
        post.node.write(Path(file), content)
    done = post.node.run(
        [post.python, "-S", str(file), *words(role, post, settings)], timeout=START
    )
    if done.status:
        raise LauncherError(
            f"the memory guard of the {role} did not start: {done.last(3)}",
            "Python 3.11 or newer there, and a user in the group docker (DSV41_MEM_GUARD=1)",
            "mend that, then run this again (the ranks run on), or set DSV41_MEM_GUARD=0",
        )


def words(role: str, post: Post, settings: Settings) -> list[str]:
    """The guard's arguments."""
    anyone = ["--any"] if settings.flag("DSV41_MEM_GUARD_ANY") else []
    return [
        *post.guards,
        *("--gib", settings.text("DSV41_MEM_GUARD_GIB")),
        *("--samples", str(settings.int("DSV41_MEM_GUARD_SAMPLES"))),
        *anyone,
        "--armed",
        *("--log", str(post.log(role))),
        *("--pidfile", str(post.folder / f"{role}.pid")),
        "--detach",
    ]  # fmt: skip


def bundle(root: Path = ROOT) -> bytes:
    """The guard as one zip file that Python runs; equal for equal sources."""
    import zipfile  # not on the way of a quick `status`

    def entry(name: str) -> zipfile.ZipInfo:
        info = zipfile.ZipInfo(name, LONG_AGO)
        info.compress_type = zipfile.ZIP_DEFLATED
        return info

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for path in _parts(root, PARTS):
            made.writestr(entry(str(path.relative_to(root))), path.read_bytes())
        made.writestr(entry("__main__.py"), DOOR)
    return out.getvalue()


def _parts(root: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in root.glob(pattern))
