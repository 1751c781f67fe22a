"""Docker's SDK and paramiko without what they load and do not need: see launcher.verbs' rule."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(package: str) -> Iterator[None]:
    """In the block ``package`` is as one that is not installed, for those who can do without it;
    where it is loaded already nothing changes. For the top of a module, where nothing else runs."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment] # as the import system has it
    try:
        yield
    finally:
        del sys.modules[package]
