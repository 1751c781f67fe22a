"""The rules that both nodes must meet before anything is touched. Pure."""

from launcher.preflight.given import Given, Need
from launcher.preflight.memory import memory_needed
from launcher.preflight.pair import Standing, standing
from launcher.preflight.rules import check

__all__ = ["Given", "Need", "Standing", "check", "memory_needed", "standing"]
