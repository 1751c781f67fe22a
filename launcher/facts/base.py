"""The shape of a fact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Missing:
    """A fact that could not be had; a rule that needs it makes this a finding."""

    reason: str


class Fact(Protocol[T_co]):
    @property
    def key(self) -> str: ...

    @property
    def argv(self) -> tuple[str, ...]:
        """Constant. Paths of a batch come after it as arguments where ``takes_paths``."""
        ...

    @property
    def takes_paths(self) -> bool: ...

    def parse(self, text: str) -> T_co:
        """Raises ValueError when the text is not what the command prints."""
        ...


def shell(text: str) -> tuple[str, ...]:
    """The argv of a constant piece of shell; its arguments follow as "$@"."""
    return ("sh", "-c", text, "sh")


def gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


# In a constant piece of shell: $q is $p with a leading ~ made the node's own home.
HOME = 'case $p in "~") q=$HOME;; "~/"*) q=$HOME/${p#"~/"};; *) q=$p;; esac'
