"""What training left (train.py): tensors that stand in the place of the seed's, as data in git."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spark_overlay.headers import read_header

from .shards import Raw

FILE = Path(__file__).with_name("learned.safetensors")
SEED = 0  # the trellises it was learned on


def taught(modules: Sequence[Mapping[str, Raw]], seed: int) -> list[dict[str, Raw]]:
    """The checkpoint's tensors with the learned ones put over them.

    Raises ValueError for another seed, and for a learned tensor that the checkpoint does not have.
    """
    if seed != SEED:
        raise ValueError(f"seed {seed}: the lessons were learned on seed {SEED} and fit no other")
    headers = read_header(FILE)
    data = FILE.read_bytes()
    known = {name: raw for module in modules for name, raw in module.items()}
    for name, header in headers.items():
        if name not in known or (known[name].dtype, known[name].shape) != (
            header.dtype,
            header.shape,
        ):
            raise ValueError(
                f"{FILE.name}: {name} ({header.dtype} {list(header.shape)}) is no tensor of this "
                "checkpoint; its shape changed since the training: run rehearsal/train.py again"
            )
    learned = {
        name: Raw(header.dtype, header.shape, data[header.begin : header.end])
        for name, header in headers.items()
    }
    return [{name: learned.get(name, raw) for name, raw in module.items()} for module in modules]
