"""Whether the machine that the launcher runs on is the head."""

from __future__ import annotations

from launcher.facts import batch
from launcher.facts.base import Missing
from launcher.facts.interfaces import Interface, InterfacesFact
from launcher.findings import Finding
from launcher.nodes.base import Node
from launcher.rails import Side, carrier


def local_interfaces(node: Node) -> tuple[Interface, ...] | Missing:
    """Of this machine: all that is needed to see whether HEAD_IP is here."""
    found: tuple[Interface, ...] | Missing = batch.one(node, InterfacesFact())
    return found


def head_ip(address: str, interfaces: tuple[Interface, ...] | Missing) -> list[Finding]:
    """Whether HEAD_IP is this host's. Asked before any contact with the worker: on another
    machine the launcher would start the wrong pair."""
    side = Side(address, prefix="HEAD")
    found = carrier(side, "this machine", interfaces)
    return [found] if isinstance(found, Finding) else []
