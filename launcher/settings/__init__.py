"""Settings: one table, one file read as data, one frozen result; every value has an origin."""

from __future__ import annotations

from launcher.settings.load import load
from launcher.settings.secret import Secret
from launcher.settings.values import Settings

__all__ = ["Secret", "Settings", "load"]
