"""The launcher with the stub rank in vLLM's place: ``python stub_launcher.py CHECKOUT VERB …``.

Everything but the program of the ranks and the installing steps is the real thing. CHECKOUT is a
folder with a ``.env``; the launcher's code comes from this repository. The environment variable
STUB_STEPS names a folder for fake installing steps (see FakeStep), STUB goes to the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher import cli, rehearsal  # noqa: E402
from launcher.app import App  # noqa: E402
from launcher.deployment import Deployment  # noqa: E402
from launcher.record import Record  # noqa: E402
from launcher.runtimes.process import ProcessRuntime  # noqa: E402
from launcher.settings.values import Settings  # noqa: E402
from launcher.steps.base import Context, Step  # noqa: E402
from launcher.steps.check import Check  # noqa: E402
from launcher.steps.launch import Launch  # noqa: E402
from launcher.steps.preflight import Preflight  # noqa: E402
from launcher.steps.ready import Ready  # noqa: E402
from launcher.steps.watcher import Watcher  # noqa: E402

STUB = (sys.executable, str(Path(__file__).with_name("stub_rank.py")))


@dataclass(frozen=True)
class FakeStep(Step):
    """Writes two files, slowly; done when both are there with what the input file says."""

    folder: Path = Path()

    def _input(self) -> str:
        source = self.folder / f"{self.key}.in"
        return source.read_text() if source.exists() else ""

    def inputs(self, ctx: Context) -> str:
        return f"in:{self._input()}"

    def done(self, ctx: Context) -> bool:
        made = [self.folder / f"{self.key}.{part}" for part in "ab"]
        return all(path.exists() and path.read_text() == self._input() for path in made)

    def do(self, ctx: Context) -> None:
        with (self.folder / "did").open("a") as out:
            out.write(f"{self.key}\n")
        for part in "ab":
            # A real child does the writing, so that a killed launcher is seen to take it along.
            path = self.folder / f"{self.key}.{part}"
            write = f"open({str(path)!r}, 'w').write({self._input()!r})"
            code = f"import time; time.sleep(0.05); {write}"
            ctx.node.run([sys.executable, "-S", "-c", code])


def build(app: App, settings: Settings, record: Record) -> tuple[Context, Sequence[Step]]:
    folder = settings.path("REHEARSAL_DIR")
    ctx = rehearsal.context(app, settings, record, folder, STUB)
    stub = app.environ.get("STUB")

    def plan(launch_id: str, master_port: int) -> Deployment:
        made = ctx.plan(launch_id, master_port)
        if not stub:
            return made
        one, two = (replace(rank, env={**rank.env, "STUB": stub}) for rank in made.ranks)
        return replace(made, ranks=(one, two))

    runtime = ProcessRuntime(ROOT, app.logs, app.environ)
    steps: list[Step] = [Preflight(disk=folder, memory=0)]
    if fakes := app.environ.get("STUB_STEPS"):
        engine = FakeStep("engine", "engine", (), Path(fakes))
        steps += [engine, FakeStep("checkpoint", "checkpoint", ("engine",), Path(fakes))]
    steps += [Launch(), Watcher(), Ready(), Check()]
    return replace(ctx, root=ROOT, runtime=runtime, plan=plan), steps


if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[2:], root=Path(sys.argv[1]), build=build))
