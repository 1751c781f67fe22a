"""Which path a GPU takes, by its compute capability or by the one it is held to. Pure.

``OVERLAY_FORCE_ARCH=80`` holds any newer GPU to what an SM80 has: a path that begins later is
refused by an error, never left out in silence. It is how one GPU shows that an older one serves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

VARIABLE: Final = "OVERLAY_FORCE_ARCH"
Capability = tuple[int, int]
#: The least that our kernels compute on: bf16 on tensor cores, asynchronous copies.
LEAST: Final[Capability] = (8, 0)
#: From here on Triton compiles e4m3 as a type.
FP8_TYPE: Final[Capability] = (8, 9)


class ArchError(RuntimeError):
    """A path that this GPU, or the one it is held to, does not have."""


@dataclass(frozen=True, slots=True)
class Path:
    """A path of vLLM that begins with ``since``; ``instead``: what the overlay has in its place."""

    name: str
    since: Capability
    instead: str


DEEP_GEMM: Final = Path("DeepGEMM", (9, 0), "the overlay's indexer, mHC and linears ask none of it")
FLASH_MLA: Final = Path("FlashMLA", (9, 0), "OVERLAY_ATTENTION=portable")
FLASHINFER_MLA: Final = Path("FlashInfer's sparse MLA", (10, 0), "OVERLAY_ATTENTION=portable")


def forced(environment: Mapping[str, str]) -> Capability | None:
    """The capability asked for, None for none. Raises ArchError for a value that is none."""
    value = environment.get(VARIABLE, "")
    if not value:
        return None
    found = re.fullmatch(r"(\d{1,2})(\d)", value)
    capability = (int(found[1]), int(found[2])) if found else (0, 0)
    if capability < LEAST:
        raise ArchError(
            f"{VARIABLE}: found {value!r}; needed a compute capability without its dot, 80 or more"
        )
    return capability


def held(own: Capability, environment: Mapping[str, str]) -> Capability:
    """What a GPU of capability ``own`` may use. Raises ArchError where it is not even that."""
    asked = forced(environment)
    if asked is not None and asked > own:
        raise ArchError(
            f"{VARIABLE}={said(asked)[2:]} on an {said(own)}: a GPU can be held to an older one, "
            "not to a newer"
        )
    capability = asked or own
    if capability < LEAST:
        raise ArchError(f"{said(own)}: the overlay's kernels need {said(LEAST)} or newer")
    return capability


def has(path: Path, capability: Capability) -> bool:
    return capability >= path.since


def refusal(path: Path, environment: Mapping[str, str]) -> str:
    """What is said to whoever calls a path that the GPU is held off from."""
    asked = forced(environment)
    name = "this GPU" if asked is None else f"{VARIABLE}={said(asked)[2:]}"
    return (
        f"{path.name} was called under {name}, and begins with {said(path.since)}; "
        f"in its place: {path.instead}"
    )


def portable(capability: Capability) -> bool:
    """Whether the overlay's own mHC, inserts and indexer serve. Not on SM100, where vLLM has other
    records and one kernel for all of mHC."""
    return capability[0] != 10


def said(capability: Capability) -> str:
    return f"SM{capability[0]}{capability[1]}"
