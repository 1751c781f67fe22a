"""The same question to several at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def together(ask: Callable[[A], B], whom: Sequence[A]) -> list[B]:
    """Answers in the order of ``whom``; raises the first error among them.

    Daemon threads, not a pool: a pool makes Ctrl-C, and the end of Python, wait for its calls.
    """
    answers: dict[int, B] = {}
    errors: dict[int, BaseException] = {}

    def one(place: int, each: A) -> None:
        try:
            answers[place] = ask(each)
        except BaseException as error:
            errors[place] = error

    threads = [
        threading.Thread(target=one, args=(place, each), daemon=True)
        for place, each in enumerate(whom)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)  # a join without a limit would not be interrupted
    if errors:
        raise errors[min(errors)]
    return [answers[place] for place in range(len(threads))]
