"""paramiko. It asks invoke, half of what it would load, for ``Match exec`` of a configuration that
it reads itself; ours is read by ssh."""

from __future__ import annotations

from launcher.libraries import without

with without("invoke"):
    import paramiko

__all__ = ["paramiko"]
