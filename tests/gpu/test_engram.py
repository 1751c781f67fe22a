"""Engram's parts on a GPU, one test each: ``pytest -m gpu tests/gpu/test_engram.py``.

The engines that compare whole layers are asked by test_checks.py.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu import engram, engram_lookup  # noqa: E402  (after torch is known to be there)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KERNEL = (engram.codes, engram.ragged, engram.compiled, engram.speed)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> engram_lookup.Tables:
    return engram_lookup.Tables(tmp_path_factory.mktemp("engram"))


@pytest.mark.parametrize("part", KERNEL, ids=lambda part: part.__name__)
def test_kernel(part: engram.Part) -> None:
    values = part(torch.device("cuda"))
    assert values["ok"], values


@pytest.mark.parametrize("part", engram_lookup.PARTS, ids=lambda part: part.__name__)
def test_lookup(part: Any, tables: engram_lookup.Tables) -> None:
    values = part(tables, torch.device("cuda"))
    assert values["ok"], values
