"""The step that has the weights on the head: whole and right, fetched where they are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher import lock
from launcher.steps.base import Context, Step, fingerprint

STEP = "download"
LOCK = "download.lock"  # in logs: of `./start.sh download`, too


@dataclass(frozen=True, kw_only=True)
class Download(Step):
    """Sizes are looked at each time, so it is needed by no other step: `Launch` has the manifest
    among what it rests on."""

    key: str = STEP
    title: str = "weights of the head (sizes and checksums; the hub for what is not right)"
    bring: Callable[[], None]

    def inputs(self, ctx: Context) -> str:
        return fingerprint({})

    def done(self, ctx: Context) -> bool:
        return False  # a look of the moment

    def do(self, ctx: Context) -> None:
        with lock.hold(ctx.logs / LOCK, "download"):
            self.bring()
