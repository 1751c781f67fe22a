"""The memory hooks and the worker class in vLLM: gauge lines, page cache, workspace, release."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from engine import Answers, Engines
from page_cache import resident

from spark_overlay import hooks
from spark_overlay.stand_ins import HookError

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]


def test_a_worker_that_moved_is_refused(vllm: ModuleType) -> None:
    moved = dataclasses.replace(hooks.WORKER[-1], parameters=("self", "step"))
    with pytest.raises(HookError, match=r"Worker\.execute_model takes \(self, scheduler_output"):
        moved.check()


def config(length: int, factor: int | None) -> Any:
    told = {} if factor is None else {"indexer_prefill_factor": factor}
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length),
        attention_config=SimpleNamespace(sparse_mla_prefill_workspace_factor=5),
        additional_config={"spark_overlay": told},
    )


def test_the_indexer_s_workspace(vllm: ModuleType) -> None:
    from spark_overlay.memory.glue import get_max_prefill_buffer_size as rows

    assert rows(config(600_000, None)) == 40 * 600_000
    assert rows(config(600_000, 2)) == 2 * 600_000
    assert rows(config(600_000, 99)) == 40 * 600_000  # never above vLLM's own


def test_the_builder_takes_a_prompt_of_full_length_in_the_smallest_workspace(
    vllm: ModuleType,
) -> None:
    """One request never needs more rows than the workspace of factor 1 has."""
    import torch
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder as Builder

    lengths, queries = torch.tensor([4096, 4096, 100]), torch.tensor([128, 128, 100])
    parts = Builder._split_indexer_prefill_chunks(lengths, queries, 4096, 256 << 20)
    assert [(part.start, part.stop) for part, _ in parts] == [(0, 1), (1, 2), (2, 3)]
    parts = Builder._split_indexer_prefill_chunks(lengths, queries, 2 * 4096, 256 << 20)
    assert [(part.start, part.stop) for part, _ in parts] == [(0, 2), (2, 3)]


@pytest.mark.parametrize("drop", [True, False])
def test_a_shard_s_pages_are_gone_when_the_reader_is_at_the_next(
    vllm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop: bool
) -> None:
    """vLLM's own reader over mapped files; without the hook the pages stay."""
    import torch
    from safetensors.torch import save_file

    from spark_overlay.memory import glue

    told = {"spark_overlay": {"memory_drop_page_cache": drop}}
    monkeypatch.setattr(
        glue, "get_current_vllm_config", lambda: SimpleNamespace(additional_config=told)
    )
    files = [tmp_path / f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for n, file in enumerate(files):
        save_file({f"{n}.{k}": torch.full((1 << 20,), n + k) for k in range(2)}, file)
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)  # a dirty page cannot be dropped
        os.close(fd)
        file.read_bytes()
        assert resident(file) > 0, "this file system keeps no page cache: set TMPDIR to a disk"
    seen = []
    for name, tensor in glue.safetensors_weights_iterator([str(f) for f in files], False):
        assert int(tensor.sum()) == (int(name[0]) + int(name[2])) << 20
        seen.append((name, resident(files[0]) > 0))
        del tensor
    assert [name for name, _ in seen] == ["0.0", "0.1", "1.0", "1.1"]
    assert [held for _, held in seen] == [True, True, not drop, not drop]
    assert (resident(files[1]) > 0) is not drop


MEM = re.compile(r"\[mem\] (.*?): ([\d.]+) GiB available \(lowest ([\d.]+)\)")
ORDER = [
    "worker starts", "device ready", "weights loading", "weights loaded", "profiling",
    "KV pool made", "warm-up", "warmed up", "serving",
]  # fmt: skip


@pytest.fixture(scope="module")
def cared(engines: Engines) -> tuple[Answers, str]:
    return engines.answers("cared"), engines.log("cared")


def test_every_phase_has_a_line_in_order(cared: tuple[Answers, str]) -> None:
    lines = MEM.findall(cared[1])
    phases = [phase for phase, _, _ in lines if not phase.startswith(("still", "prefill"))]
    assert phases == ORDER
    lowest = [float(low) for _, _, low in lines]
    assert lowest == sorted(lowest, reverse=True)
    for _, available, low in lines:
        assert float(low) <= float(available)
    assert "RSS" in cared[1] and "CUDA" not in "".join(
        line for line in cared[1].splitlines() if "[mem]" in line
    )


def test_a_long_prompt_is_told_chunk_by_chunk(cared: tuple[Answers, str]) -> None:
    told = re.findall(r"\[mem\] prefill (\d+) of (\d+) tokens, ([\d.]+) tok/s", cared[1])
    assert [(int(done), int(total)) for done, total, _ in told] == [
        *((128, 180), (180, 180)),
        *((128, 320), (256, 320), (320, 320)),
    ]
    assert all(float(rate) > 0 for _, _, rate in told)


def test_memory_is_given_back_when_it_is_asked_for_always(cared: tuple[Answers, str]) -> None:
    found = re.findall(r"\[mem\] released after (\d+) tokens of a prompt", cared[1])
    assert found == ["256"], "from 256 tokens on, told the first time"


def test_the_page_cache_of_the_checkpoint_is_dropped(
    cared: tuple[Answers, str], checkpoint: Callable[[str], Path]
) -> None:
    assert "[mem] page cache of the checkpoint dropped" in cared[1]


def test_answers_are_what_they_were(cared: tuple[Answers, str], plain: Answers) -> None:
    assert cared[0]["alone"][0]["tokens"] == plain["alone"][-1]["tokens"][:2]
