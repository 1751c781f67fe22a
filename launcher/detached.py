"""Starts a process that belongs to nobody: it outlives the launcher and leaves it no child."""

from __future__ import annotations

import os
import sys


def leave() -> None:
    """In the detached process itself: go on in a child, so that the starter waits for nothing.

    The starter gave it a session of its own (``start_new_session``); the child keeps the open
    descriptors, locks included.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() > 0:
        os._exit(0)
