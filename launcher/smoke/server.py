"""The server that is tried, what can be found wrong with it, and how its answers are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from launcher.http import Answer, Api, Event, NoAnswer

T = TypeVar("T")

TIMEOUT = 300.0  # seconds for one answer: a real pair may be prefilling for others
SHOWN = 300  # characters of an answer in a fault
NO_THINKING: Mapping[str, Any] = {"thinking": {"type": "disabled"}}


class Fault(Exception):
    """What a check finds, and what it needed instead."""

    def __init__(self, found: str, needed: str) -> None:
        super().__init__(found)
        self.found = found
        self.needed = needed


@dataclass(frozen=True)
class Server:
    """``timeout`` is in seconds and for each request as a whole. All methods raise Fault."""

    api: Api
    model: str
    timeout: float = TIMEOUT

    def get(self, path: str) -> dict[str, Any]:
        try:
            return _object(path, self.api.get(path, self.timeout))
        except NoAnswer as fault:
            raise self._none(fault) from fault

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return _object(path, self.send(path, body))

    def send(self, path: str, body: Mapping[str, Any]) -> Answer:
        """The answer of whatever status; ``body`` may name another model."""
        try:
            return self.api.post(path, {"model": self.model, **body}, self.timeout)
        except NoAnswer as fault:
            raise self._none(fault) from fault

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Event]:
        asked = {"model": self.model, **body, "stream": True}
        try:
            yield from self.api.events(path, asked, self.timeout)
        except NoAnswer as fault:
            raise self._none(fault) from fault

    def _none(self, fault: NoAnswer) -> Fault:
        return Fault(str(fault), f"a whole answer within {self.timeout:g} s")


def _object(path: str, answer: Answer) -> dict[str, Any]:
    if answer.status != 200:
        key = ", and the server's key in VLLM_API_KEY" if answer.status == 401 else ""
        raise Fault(f"HTTP {answer.status} on {path}: {answer.excerpt()}", f"HTTP 200{key}")
    found = answer.json()
    if not isinstance(found, dict):
        raise Fault(f"{path} answers something else: {answer.excerpt()}", "a JSON object")
    return found


def parsed(path: str, event: Event) -> dict[str, Any]:
    """The object that an event of a stream carries."""
    try:
        found = json.loads(event.data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Fault(f"{path} streamed {event.data[:SHOWN]!r}", "a JSON object in each event")
    return found


def typed(path: str, event: Event) -> tuple[str, dict[str, Any]]:
    """An event of Responses or Messages, which says its type in its name and in its object."""
    found = parsed(path, event)
    kind = part(str, found, "type")
    if event.name != kind:
        raise Fault(
            f"{path} streamed an event named {event.name!r} of type {kind!r}", "the same twice"
        )
    return kind, found


def part(kind: type[T], of: object, *way: str | int) -> T:
    """What lies in an answer at the end of ``way``, if it is of that kind."""
    found: Any = of
    try:
        for name in way:
            found = found[name]
    except (KeyError, IndexError, TypeError):
        found = None
    if not isinstance(found, kind) or isinstance(found, bool):
        raise Fault(shown(of), f"in it {'.'.join(map(str, way))}, of type {kind.__name__}")
    return found


def shown(value: object) -> str:
    text = json.dumps(value)  # in ASCII: nothing in it can steer a terminal
    return text if len(text) <= SHOWN else text[:SHOWN] + " …"
