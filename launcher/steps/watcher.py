"""The step that sets a watcher beside the ranks (see watch/pair.py)."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from launcher import files
from launcher.errors import LauncherError
from launcher.steps.base import Context, Step, fingerprint


@dataclass(frozen=True)
class Watcher(Step):
    key: str = "watch"
    title: str = "watch (reports a dead rank)"
    needs: tuple[str, ...] = ("launch",)

    def inputs(self, ctx: Context) -> str:
        return fingerprint({"launch_id": launch_id(ctx)})

    def done(self, ctx: Context) -> bool:
        fd = _lock(ctx)
        if fd is None:
            return True
        os.close(fd)
        return False

    def do(self, ctx: Context) -> None:
        # The watcher of the launch before sees at its next look that it was replaced. This launch
        # may have one already, if the launcher was killed just after setting it.
        deadline = time.monotonic() + 10
        while (fd := _lock(ctx)) is None:
            if _watched(ctx) == launch_id(ctx):
                return
            if time.monotonic() > deadline:
                raise LauncherError(
                    "the watcher of an earlier launch does not end",
                    "one watcher",
                    f"look at {ctx.logs / 'watch.log'}, then ./start.sh stop and rehearse again",
                )
            time.sleep(0.05)
        try:
            _start(ctx, launch_id(ctx), fd)
        finally:
            os.close(fd)


def _start(ctx: Context, launch: str, lock: int) -> None:
    recorded = ctx.store.load().deployment
    far = recorded is not None and bool(recorded.reach)
    # Without site-packages Python starts faster; the way to another node needs them, and the agent.
    bare = [] if far else ["-S"]
    kept = ("PATH", "HOME", "USER", "SSH_AUTH_SOCK") if far else ("PATH",)
    argv = [sys.executable, *bare, "-m", "launcher.watch.pair", str(ctx.logs), launch]
    run = ctx.record.folder if recorded is None else recorded.run
    notes = os.open(ctx.logs / "watch.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        child = subprocess.Popen(
            [*argv, str(run), str(lock)],
            stdin=subprocess.DEVNULL,
            stdout=notes,
            stderr=notes,
            pass_fds=(lock,),
            cwd=ctx.root,
            env={"PATH": os.defpath, **{k: os.environ[k] for k in kept if k in os.environ}},
            start_new_session=True,
        )
        child.wait()  # it goes on in a child of its own
    finally:
        os.close(notes)


def launch_id(ctx: Context) -> str:
    recorded = ctx.store.load().deployment
    return "" if recorded is None else recorded.launch_id


def _watched(ctx: Context) -> str:
    """The launch that the latest watcher watches."""
    said = files.read_json(ctx.logs / "ranks" / "watch.json")
    return "" if said is None else str(said["launch_id"])


def _lock(ctx: Context) -> int | None:
    """The watcher's lock, None while a watcher holds it."""
    path = ctx.logs / "ranks" / "watch.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
