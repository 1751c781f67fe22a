"""The one table of settings: a key's name, type, default, limits and meaning stand in `keys/` only.

`.env.example`, `config --explain` and the checks are all made from it.
"""

from __future__ import annotations

from launcher.settings.keys import (
    engram,
    image,
    launch,
    memory,
    network,
    nodes,
    rehearsal,
    serving,
    weights,
)
from launcher.settings.setting import Setting

GROUPS = {
    "nodes": "The two nodes and how they reach each other",
    "serving": "What is served, and how",
    "engram": "Engram tables",
    "weights": "Model files on both nodes",
    "image": "Container image",
    "network": "NCCL between the nodes",
    "memory": "Unified memory",
    "launch": "Start, waiting, compile targets, caches",
    "rehearsal": "The rehearsal on this machine",
}

TABLE: dict[str, Setting] = {
    setting.key: setting
    for setting in (
        *nodes.KEYS,
        *serving.KEYS,
        *engram.KEYS,
        *weights.KEYS,
        *image.KEYS,
        *network.KEYS,
        *memory.KEYS,
        *launch.KEYS,
        *rehearsal.KEYS,
    )
}
