"""How the recorded deployment stands, put together for ``status``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher import health, lock, processes
from launcher.app import PAIR, App
from launcher.errors import LauncherError
from launcher.health import Standing, Verdict
from launcher.http import Api
from launcher.pair import aftermath
from launcher.runtimes.base import RankStatus
from launcher.state import DeploymentRecord
from launcher.steps.base import ROLES
from launcher.together import together

WITHIN = 0.9  # seconds for the API: status is to answer within 1.5 s
PATIENCE = 4.0  # seconds for another node that does not answer


@dataclass(frozen=True)
class Report:
    headline: str
    verdict: Verdict
    deployment: DeploymentRecord | None
    launcher: lock.Holder | None
    hints: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        return self.verdict.standing.value

    @property
    def ranks(self) -> Sequence[RankStatus]:
        return self.verdict.ranks

    def as_json(self) -> dict[str, Any]:
        return {
            "state": self.verdict.standing.name.lower().replace("_", "-"),
            "code": self.code,
            "reason": self.verdict.reason,
            "deployment": None if self.deployment is None else asdict(self.deployment),
            "ranks": [{**asdict(rank), "log": str(rank.log)} for rank in self.ranks],
            "launcher": None if self.launcher is None else asdict(self.launcher),
        }


def standing(app: App, probe: float | None = None) -> Report:
    """Look at the recorded deployment; ``probe`` seconds for one generated token, None for none."""
    deployment = app.store.load().deployment
    launcher = lock.holder(app.lock)
    # Without a record the pair may run all the same, when its state was lost.
    lost = deployment is None and launcher is None and aftermath.left_behind(app).there
    runtime = app.runtime(PAIR if lost else app.recorded_name(), PATIENCE)
    ranks = tuple(together(runtime.inspect, ROLES))
    if deployment is None:
        verdict = _unrecorded(ranks)
    else:
        verdict = health.judge(
            deployment,
            ranks,
            api(app, deployment),
            boot_id=processes.boot_id(),
            within=WITHIN,
            probe=probe,
        )
    at_work = launcher is not None and launcher.verb in ("rehearse", "start", "restart")
    ended = [rank for rank in ranks if rank.state == "exited"]
    fresh = deployment is None or deployment.ready is None
    if at_work and fresh and not ended and any(rank.state == "absent" for rank in ranks):
        up = [rank.role for rank in ranks if rank.running]
        told = f"only the {up[0]} runs yet" if up else "no rank runs yet"
        verdict = Verdict(Standing.STARTING, told, ranks)
    return Report(
        _headline(deployment, verdict), verdict, deployment, launcher, _hints(verdict, launcher)
    )


def api(app: App, deployment: DeploymentRecord) -> Api:
    """The deployment's API, with the key that the settings have for it."""
    return Api(deployment.api_host, deployment.api_port, _key(app))


def _unrecorded(ranks: tuple[RankStatus, ...]) -> Verdict:
    left = [rank.role for rank in ranks if rank.running]
    if left:
        reason = f"no deployment is recorded, but the {' and the '.join(left)} runs"
        return Verdict(Standing.HALF_UP, reason, ranks)
    return Verdict(Standing.DOWN, "no deployment is recorded")


def _headline(deployment: DeploymentRecord | None, verdict: Verdict) -> str:
    if deployment is None:
        return f"the deployment {_WORDS[verdict.standing]}: {verdict.reason}"
    url = Api(deployment.api_host, deployment.api_port).url
    at = f"{url} as {deployment.served_model_name}, launch {deployment.launch_id}"
    return f"the {deployment.name} {_WORDS[verdict.standing]}: {verdict.reason} ({at})"


_WORDS = {
    Standing.SERVING: "serves",
    Standing.STARTING: "is starting",
    Standing.HALF_UP: "is half up",
    Standing.DOWN: "is down",
}


def _hints(verdict: Verdict, launcher: lock.Holder | None) -> tuple[str, ...]:
    hints = []
    if launcher is not None:
        hints.append(f"a launcher is at work: pid {launcher.pid}, verb {launcher.verb}")
    if verdict.standing is Standing.HALF_UP:
        hints.append("next: ./start.sh logs, then ./start.sh restart or ./start.sh stop")
    elif verdict.standing is Standing.DOWN and launcher is None:
        hints.append("next: ./start.sh for two Sparks, ./start.sh rehearse on this machine alone")
    return tuple(hints)


def _key(app: App) -> str:
    """The API's key, if the settings can be read; /health needs none."""
    try:
        key = app.settings((), say=lambda line: None).secret("VLLM_API_KEY")
    except LauncherError as error:
        app.console.warn(f"the settings cannot be read, so no API key is sent: {error.found}")
        return ""
    return key.reveal() if key else ""
