"""Which attention class serves: ours on portable kernels, or vLLM's own. Pure.

Asked by ``OVERLAY_ATTENTION`` or ``additional_config.spark_overlay.attention``; else what
``./start.sh tune`` recorded for this pair; else what is known of the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

Kind = Literal["portable", "stock"]
VARIABLE: Final = "OVERLAY_ATTENTION"
#: As ``spark_overlay.exl3.cuda.plan`` has it: the file of ``./start.sh tune``, the same on both
#: nodes. Its key below is the attention's.
TUNED: Final = "SPARK_EXL3_TABLE"
KEY: Final = "attention"
Capability = tuple[int, int]


class ChoiceError(ValueError):
    """An attention class that cannot serve here was asked for."""


@dataclass(frozen=True, slots=True)
class Choice:
    kind: Kind
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """``capability`` of the GPU, None on a CPU. ``missing``: what vLLM's class for this GPU lacks
    here, in words; empty where it has all it needs."""

    capability: Capability | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Wishes:
    """``asked`` by the user, ``tuned`` by the tuner's file; None: nothing said."""

    asked: Kind | None = None
    tuned: Kind | None = None


def wishes(environment: Mapping[str, str], setting: str | None) -> Wishes:
    """Reads the environment and the tuner's file. Raises ChoiceError for a value that is none, and
    where environment and ``setting`` contradict each other."""
    by_variable = _kind(environment.get(VARIABLE) or None, VARIABLE)
    by_setting = _kind(setting, f"additional_config.spark_overlay.{KEY}")
    if by_variable and by_setting and by_variable != by_setting:
        raise ChoiceError(
            f"{VARIABLE}={by_variable}, but additional_config.spark_overlay.{KEY} is "
            f"{by_setting}; set one of them, or both to the same"
        )
    return Wishes(by_variable or by_setting, _recorded(environment.get(TUNED, "")))


def choose(found: Found, wish: Wishes) -> Choice:
    """Raises ChoiceError where the class that is asked for cannot serve."""
    name = "a CPU" if found.capability is None else f"SM{found.capability[0]}{found.capability[1]}"
    impossible = {"portable": _no_portable(found), "stock": _no_stock(found)}
    if wish.asked is not None:
        if why := impossible[wish.asked]:
            raise ChoiceError(
                f"{wish.asked} attention was asked for on {name}: {why}; needed is "
                f"{VARIABLE}={_other(wish.asked)}, or none of it"
            )
        return Choice(wish.asked, "asked for")
    if wish.tuned is not None and not impossible[wish.tuned]:
        return Choice(wish.tuned, "recorded by ./start.sh tune")
    usual = _usual(found.capability)
    if not impossible[usual]:
        return Choice(usual, f"the default on {name}")
    other = _other(usual)
    if impossible[other]:
        raise ChoiceError(
            f"no attention can serve on {name}: {usual}: {impossible[usual]}; "
            f"{other}: {impossible[other]}"
        )
    return Choice(other, impossible[usual])


def _usual(capability: Capability | None) -> Kind:
    """The GB10's kernels in FlashInfer are tried in the field; SM100 writes another record. On an
    H200 both serve, and portable is what was measured there."""
    return "stock" if capability is not None and capability[0] in (10, 12) else "portable"


def _no_portable(found: Found) -> str:
    if found.capability is None:
        return ""
    if found.capability[0] < 8:
        return "its kernels need mma.sync on bf16, which begins with SM80"
    if found.capability[0] == 10:
        return "vLLM writes 528-byte records there, and the kernels read those of 584 bytes"
    return ""


def _no_stock(found: Found) -> str:
    if found.capability is None:
        return "vLLM's classes are for GPUs only"
    if found.capability[0] not in (9, 10, 12):
        return "vLLM has sparse MLA kernels for SM90, SM100 and SM12x only"
    return found.missing


def _other(kind: Kind) -> Kind:
    return "stock" if kind == "portable" else "portable"


def _kind(value: object, where: str) -> Kind | None:
    if value is None:
        return None
    for kind in get_args(Kind):
        if value == kind:
            return kind  # type: ignore[no-any-return]
    raise ChoiceError(f"{where}: found {value!r}; needed one of {', '.join(get_args(Kind))}")


def _recorded(path: str) -> Kind | None:
    """What the tuner's file says of attention. Raises ChoiceError for a file that cannot be read:
    a rank that did not follow it would compute otherwise than the other one."""
    if not path:
        return None
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ChoiceError(
            f"{TUNED}={path} cannot be read ({error}); ./start.sh tune writes it anew"
        ) from error
    return _kind(value.get(KEY), f"{path}, {KEY}") if isinstance(value, dict) else None
