"""The step that brings the serving image to both nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.image.bring import Bring
from launcher.steps.base import Context, Step, fingerprint


@dataclass(frozen=True, kw_only=True)
class ImageStep(Step):
    key: str = "image"
    title: str = "image (the same layers on both nodes)"
    bring: Callable[[Context], Bring]

    def inputs(self, ctx: Context) -> str:
        keys = ("IMAGE", "BASE_IMAGE", "IMAGE_PLATFORM")
        asked = {key: ctx.settings.text(key) for key in keys}
        return fingerprint({**asked, "stamp": self.bring(ctx).wanted()})

    def done(self, ctx: Context) -> bool:
        if ctx.settings.flag("BUILD") or ctx.settings.flag("PULL"):
            return False  # asked for anew, whatever is there
        return self.bring(ctx).standing()

    def do(self, ctx: Context) -> None:
        self.bring(ctx).do()
