"""The rules that both nodes must meet before anything is touched. Pure."""

from launcher.preflight.given import Given, Need
from launcher.preflight.pair import Standing, standing
from launcher.preflight.rules import check

__all__ = ["Given", "Need", "Standing", "check", "standing"]
