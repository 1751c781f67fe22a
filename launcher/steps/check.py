"""The step that asks the API as a user would: a sum, and the smoke's short form."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import LauncherError
from launcher.smoke import run
from launcher.smoke.chat import QUESTION
from launcher.smoke.server import Server
from launcher.steps.base import Context, Step, fingerprint
from launcher.steps.ready import api_of, recorded

TIMEOUT = 120.0  # seconds for one answer


@dataclass(frozen=True)
class Check(Step):
    key: str = "check"
    title: str = "check (17*19, the same again, and streamed)"
    needs: tuple[str, ...] = ("launch",)

    def inputs(self, ctx: Context) -> str:
        return fingerprint({"launch_id": recorded(ctx).launch_id, "question": QUESTION})

    def done(self, ctx: Context) -> bool:
        return True  # of this very launch; health proves the moment

    def do(self, ctx: Context) -> None:
        server = Server(api_of(ctx), recorded(ctx).served_model_name, TIMEOUT)
        wanted = (run.ANSWER, *run.SHORT)
        for outcome in run.tried(wanted, server, lambda key: ctx.console.progress(f"{key} …")):
            if outcome.fault is not None:
                raise LauncherError(
                    f"the API failed in the check ({outcome.check.key}): {outcome.fault.found}",
                    outcome.fault.needed,
                    "./start.sh status and ./start.sh logs; where they show no cause,"
                    " ./start.sh restart; if it stays, keep both logs and report it",
                    ctx.runtime.log_path("head"),
                ) from outcome.fault
            ctx.record.event(self.key, "passed", check=outcome.check.key, told=outcome.told)
