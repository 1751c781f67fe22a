"""vLLM's worker with care for unified memory (``--worker-cls``, launcher/commands/vllm.py).

A worker class of one's own is vLLM's own way in, so nothing is rebound here; what is overridden is
listed, and checked, in hooks.py all the same.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from spark_overlay import hooks
from spark_overlay.memory import pagecache, readings
from spark_overlay.memory.gauge import Gauge
from spark_overlay.memory.prefill import Progress, Release, Scheduled, every, rule
from spark_overlay.settings import overlay_settings

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as Base
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Base
else:
    from vllm.v1.worker.gpu_worker import Worker as Base

for each in hooks.WORKER:
    each.check()

log = logging.getLogger("vllm.spark_overlay.memory")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def cuda() -> tuple[int, int] | None:
    """Bytes that torch's allocator has reserved and given out, None before a GPU is in use."""
    if current_platform.is_cpu() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.memory_reserved(), torch.cuda.memory_allocated()


def give_back() -> None:
    """Have the allocator return what it holds unused: the GPU's, or this process's heap."""
    if current_platform.is_cpu():
        ctypes.CDLL(None).malloc_trim(0)
    else:
        torch.accelerator.empty_cache()


class SparkWorker(Base):  # type: ignore[misc, valid-type, unused-ignore]
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        told = overlay_settings(vllm_config)
        self.gauge = Gauge(lambda: readings.read(cuda), log.info)
        self._drop = told.memory_drop_page_cache
        self._release = Release(
            rule(
                told.memory_release_tokens,
                told.memory_release_below_gib,
                told.memory_release_at_end,
            ),
            readings.available,
            give_back,
            log.info,
        )
        chunk = vllm_config.scheduler_config.max_num_batched_tokens
        self._progress = Progress(
            every(vllm_config.model_config.max_model_len, chunk), self.gauge.mark
        )
        self._prompts: dict[str, int] = {}  # tokens of the prompts of living requests
        self._serves = False

    def init_device(self) -> None:
        self.gauge.mark("worker starts")
        if not current_platform.is_cpu() and not any(
            EXPANDABLE in os.environ.get(name, "") for name in ALLOCATOR
        ):
            log.warning(
                "[mem] torch's allocator is not asked for %s: long prompts leave it fragmented. "
                "Set PYTORCH_CUDA_ALLOC_CONF=%s",
                EXPANDABLE,
                EXPANDABLE,
            )
        super().init_device()
        self.gauge.mark("device ready")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        with self.gauge.during("weights loading"):
            super().load_model(load_dummy_weights=load_dummy_weights)
        reading = self.gauge.mark("weights loaded")
        folder = Path(self.vllm_config.model_config.model)
        if self._drop and folder.is_dir():
            pagecache.drop_all(folder)
            after = self.gauge.seen()
            log.info(
                "[mem] page cache of the checkpoint dropped: %s -> %s GiB, %s -> %s GiB free",
                *map(readings.gib, (reading.cached, after.cached, reading.free, after.free)),
            )

    def determine_available_memory(self) -> int:
        with self.gauge.during("profiling"):
            return int(super().determine_available_memory())

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self.gauge.mark("KV pool made")

    def compile_or_warm_up_model(self) -> Any:
        with self.gauge.during("warm-up"):
            done = super().compile_or_warm_up_model()
        self.gauge.mark("warmed up")
        return done

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        step = self._scheduled(scheduler_output)
        try:
            if not self._serves:
                self._serves = True
                self.gauge.mark("serving")
            self._progress.after(step, scheduler_output.finished_req_ids)
            self._release.after(step)
        except (OSError, ValueError) as error:  # /proc does not answer: no reason to end serving
            log.warning("[mem] memory could not be read: %s", error)
        return output

    def _scheduled(self, output: Any) -> list[Scheduled]:
        for request in output.finished_req_ids:
            self._prompts.pop(request, None)
        counts, found = output.num_scheduled_tokens, []
        for new in output.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids or ())
            found.append((new.req_id, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        found += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return [
            Scheduled(request, before, counts[request], self._prompts.get(request, 0))
            for request, before in found
            if request in counts
        ]
