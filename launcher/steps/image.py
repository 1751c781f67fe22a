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
        # The recipe, its base and the flags decide what is done, and whether anything is: `done`
        # asks. A name that means another image by now is seen by the self-check's step.
        return fingerprint({"IMAGE": ctx.settings.text("IMAGE")})

    def done(self, ctx: Context) -> bool:
        return self.bring(ctx).standing()

    def found(self, ctx: Context) -> str:
        return self.bring(ctx).kept()

    def look_ahead(self, ctx: Context) -> None:
        self.bring(ctx).look_ahead()

    def do(self, ctx: Context) -> None:
        self.bring(ctx).do()
