"""The step that proves the image on both nodes before anything serves from it.

What may differ though the layers are equal: the GPU, its driver, the checkpoint that is mounted.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.deployment import Role
from launcher.errors import LauncherError
from launcher.image import results, selfcheck
from launcher.runtimes import throwaway
from launcher.runtimes.base import Runtime
from launcher.steps.base import Context, Step, fingerprint
from launcher.together import together

LOG = "overlay-verify.log"
SKIPPED = "skipped: SKIP_OVERLAY_VERIFY=1"
LAST = 12  # lines of what a node said, where it did not get to its checks
ROLES: tuple[Role, Role] = ("head", "worker")


@dataclass(frozen=True, kw_only=True)
class Parity(Step):
    """``runtime`` makes the containers that `selfcheck.checker` describes; ``image`` says which
    image both nodes have; ``index`` is the path of the checkpoint's, on the head."""

    key: str = "parity"
    title: str = "self-check of the image and the checkpoint on both nodes"
    needs: tuple[str, ...] = ("image",)
    runtime: Callable[[Context], Runtime]
    image: Callable[[], str]
    index: Callable[[], Path]

    def inputs(self, ctx: Context) -> str:
        try:
            index = hashlib.sha256(self.index().read_bytes()).hexdigest()
        except OSError:
            index = ""  # what is missing is told by the check itself
        return fingerprint({"image": self.image(), "index": index})

    def done(self, ctx: Context) -> bool:
        skipped = _skipped(ctx)
        if skipped is None:
            return False
        # What was skipped once is not proven for a start that asks for it.
        return not skipped or ctx.settings.flag("SKIP_OVERLAY_VERIFY")

    def found(self, ctx: Context) -> str:
        if not _skipped(ctx):
            return super().found(ctx)
        self._warn(ctx)
        return "left out, as before"

    def do(self, ctx: Context) -> None:
        log = ctx.logs / LOG
        if ctx.settings.flag("SKIP_OVERLAY_VERIFY"):
            log.write_text(f"{SKIPPED}\n", encoding="utf-8")
            self._warn(ctx)
            return
        runtime = self.runtime(ctx)
        lock = threading.Lock()
        with log.open("w", encoding="utf-8") as out:

            def one(role: Role) -> throwaway.Ran:
                def tell(line: str) -> None:
                    with lock:
                        out.write(f"{role}: {ctx.record.secrets.hide(line)}\n")
                        out.flush()

                return throwaway.run(
                    runtime, role, selfcheck.ARGV, "the self-check", selfcheck.LIMIT, tell
                )

            runs = together(one, ROLES)
        both: dict[str, results.Results] = {run.role: results.read(run.lines) for run in runs}
        wrong = results.faults(both, {run.role: run.ended for run in runs})
        if wrong:
            raise self._failed(wrong, runs, both, log)
        for role, found in both.items():
            where = ", ".join(found.devices) or "no GPU: on its CPU"
            ctx.record.event(self.key, "passed", role=role, checks=len(found.checks), on=where)
            ctx.console.say(f"  {role}: {len(found.checks)} checks passed ({where})")

    def _warn(self, ctx: Context) -> None:
        ctx.record.event(self.key, "skipped by SKIP_OVERLAY_VERIFY=1")
        ctx.console.warn(
            "SKIP_OVERLAY_VERIFY=1: NOT checked on either node: EXL3's kernels, Engram's rows,"
            " attention, and that both have the same checkpoint. Wrong answers would look like"
            " right ones"
        )

    def _failed(
        self,
        wrong: list[str],
        runs: list[throwaway.Ran],
        both: dict[str, results.Results],
        log: Path,
    ) -> LauncherError:
        said = [
            f"{run.role} | {line}"
            for run in runs
            if not both[run.role].whole
            for line in run.lines[-LAST:]
        ]
        told = "".join(f"\n    {line}" for line in [*wrong, *said])
        return LauncherError(
            f"the self-check of the image failed:{told}",
            "every check passed, on both nodes",
            "another checkpoint: FORCE_SYNC=1 ./start.sh; a failed kernel: BUILD=1 ./start.sh, and"
            " sudo dmesg | grep NVRM on that node; SKIP_OVERLAY_VERIFY=1 serves all the same",
            log,
        )


def _skipped(ctx: Context) -> bool | None:
    """Whether the latest self-check was left out; None: there was none."""
    try:
        with (ctx.logs / LOG).open(encoding="utf-8") as log:
            return log.readline().startswith(SKIPPED)
    except OSError:
        return None
