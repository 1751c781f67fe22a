"""A pair of ranks as Docker of both nodes tells of it; the launcher is not asked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from clone import Ran
from head_clone import HeadClone
from machine import Node

HEAD_NAME, WORKER_NAME = "dsv41-exl3-head", "dsv41-exl3-worker"  # as shipped
MODEL = "DeepSeek-v4.1-Flash-EXL3"


@dataclass(frozen=True)
class Pair:
    """Both containers of one launch, running."""

    clone: HeadClone = field(compare=False, repr=False)
    launch_id: str
    head: str  # ids of the containers
    worker: str

    @classmethod
    def of(cls, clone: HeadClone) -> Pair:
        """AssertionError where not both run under one launch, or where there are others."""
        found = {}
        for role, node in (("head", clone.rig.head), ("worker", clone.rig.worker)):
            running = node.docker.containers.list(ignore_removed=True)
            names = [each.name for each in running]
            assert len(running) == 1, f"{node.name} runs {names}"
            found[role] = running[0]
        launches = {each.labels["dsv41.launch"] for each in found.values()}
        assert len(launches) == 1, launches
        return cls(clone, launches.pop(), found["head"].id, found["worker"].id)

    def node(self, role: str) -> Node:
        return self.clone.rig.head if role == "head" else self.clone.rig.worker

    def container(self, role: str) -> Any:
        return self.node(role).docker.containers.get(self.head if role == "head" else self.worker)

    def inspect(self, role: str) -> dict[str, Any]:
        attrs: dict[str, Any] = self.container(role).attrs
        return attrs

    def argv(self, role: str) -> list[str]:
        attrs = self.inspect(role)
        return [attrs["Path"], *attrs["Args"]]

    def log(self, role: str) -> str:
        text: str = self.container(role).logs().decode(errors="replace")
        return text

    def completes(self, model: str = MODEL) -> bool:
        used: int = self.clone.completes(model)["usage"]["completion_tokens"]
        return used == 4

    def kill(self, role: str) -> None:
        """SIGKILL to the rank, as the kernel's OOM killer would."""
        self.container(role).kill()


def launcher_events(ran: Ran) -> list[dict[str, Any]]:
    assert ran.run is not None, ran.said
    return [json.loads(line) for line in (ran.run / "events.jsonl").read_text().splitlines()]
