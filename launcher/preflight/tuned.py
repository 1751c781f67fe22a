"""The launch table of ``./start.sh tune``: the same on both nodes, or on none."""

from __future__ import annotations

import shlex

from launcher.facts.base import Missing
from launcher.findings import Finding
from launcher.survey import Survey

TOPIC = "tuned"
NEEDED = "the same table on both nodes, or none: ranks that launch differently sum differently"


def tuned(head: Survey, worker: Survey) -> list[Finding]:
    unseen = [
        Finding(
            f"the launch table {survey.paths.tuned} of the {survey.name} could not be read:"
            f" {survey.tuned.reason}",
            NEEDED,
            f"on the {survey.name}: ls -l {shlex.quote(survey.paths.tuned)}",
            topic=TOPIC,
        )
        for survey in (head, worker)
        if isinstance(survey.tuned, Missing)
    ]
    if isinstance(head.tuned, Missing) or isinstance(worker.tuned, Missing):
        return unseen
    if head.tuned == worker.tuned:
        return []
    told = ", ".join(
        f"{survey.paths.tuned} of the {survey.name} is {digest[:12] or 'not there'}"
        for survey, digest in ((head, head.tuned.digest), (worker, worker.tuned.digest))
    )
    return [
        Finding(
            f"the launch tables differ: {told}",
            NEEDED,
            "./start.sh tune writes both anew; without that file on both the shipped tables serve",
            topic=TOPIC,
        )
    ]
