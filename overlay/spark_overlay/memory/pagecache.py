"""Keeps the page cache of a checkpoint small while it is read.

On a GB10 the driver takes its memory from what is free, and page cache does not come back for it.
So the pages of a shard are dropped as soon as the reader has gone on to the next. A page that is
still mapped stays: the bound is the shard being read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger("vllm.spark_overlay.memory")


def drop(path: Path) -> bool:
    """Give the file's clean, unmapped pages back; False, and a warning, if that cannot be asked."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError as error:
        log.warning("[mem] the page cache of %s stays: %s", path, error.strerror or error)
        return False
    return True


def drop_all(folder: Path) -> int:
    """The same for each shard of a checkpoint; how many there were."""
    return sum(drop(path) for path in sorted(folder.glob("*.safetensors")))


def behind(
    weights: Iterable[tuple[str, T]],
    files: Mapping[str, Path],
    drop: Callable[[Path], object] = drop,
) -> Iterator[tuple[str, T]]:
    """``weights`` as they come; when they go on to another of ``files`` (by tensor name), the one
    before is dropped, and the last at the end."""
    current: Path | None = None
    for name, tensor in weights:
        file = files.get(name)
        if current is not None and file != current:
            drop(current)
        current = file
        yield name, tensor
        del tensor  # a view keeps the file mapped, and its pages
    if current is not None:
        drop(current)


def iterator(
    stock: Callable[..., Generator[tuple[str, T], None, None]],
    names: Callable[[Path], Iterable[str]],
    hf_weights_files: list[str],
    *args: object,
    **kwargs: object,
) -> Iterator[tuple[str, T]]:
    """``stock``'s weights with the page cache dropped behind them. ``names``: tensors of a file."""
    files = {name: Path(file) for file in hf_weights_files for name in names(Path(file))}
    return behind(stock(hf_weights_files, *args, **kwargs), files)
