"""What lines of vLLM's log mean for the one who waits for a pair to serve. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

# The latest match is the stage.
STAGES = (
    ("Resolved architecture", "the configuration is read"),
    ("Chunked prefill is enabled", "the engine process starts"),
    ("Initializing a V1 LLM engine", "the worker processes start"),
    ("distributed_init_method", "the ranks have met"),
    ("Loading model from scratch", "the model is built"),
    ("Loading safetensors", "weights are loaded"),
    ("[load] rank", "weights are loaded"),
    ("Model loading took", "weights are in memory"),
    ("KV cache size", "the KV cache is laid out"),
    ("Capturing CUDA graphs", "CUDA graphs are captured"),
    ("init engine", "the engine is warm"),
    ("Starting vLLM API server", "the API starts"),
    ("Application startup complete", "the API is up"),
)
FIRST = "vLLM is imported"
#: Of the loader's progress (spark_overlay.loading.progress): the share and the time left.
_LOADED = re.compile(
    r"\[load\] rank .*\((?P<share>\d+ %)\), (?P<rate>[\d.]+ GiB/s), (?P<left>.+) left"
)


class Stages:
    """The stage that a rank's log tells of, fed with its new lines."""

    def __init__(self) -> None:
        self.now = FIRST

    def feed(self, lines: Iterable[str]) -> None:
        for line in lines:
            for mark, stage in STAGES:
                if mark in line:
                    self.now = stage
            if found := _LOADED.search(line):
                self.now += " ({share}, {rate}, {left} left)".format(**found.groupdict())
