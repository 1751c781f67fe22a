"""The frozen result: every key's value and where it came from. Pure."""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UsageError
from launcher.settings import contract, rules
from launcher.settings.gone import GONE
from launcher.settings.secret import Secret
from launcher.settings.setting import Setting, Value
from launcher.settings.table import TABLE


@dataclass(frozen=True)
class Given:
    """A value as somebody typed it; `where` finds it again, as in ".env line 7"."""

    text: str
    where: str


@dataclass(frozen=True)
class Layer:
    """Values of one origin: ".env", "environment", "--set" or a profile's name."""

    origin: str
    given: Mapping[str, Given]


@dataclass(frozen=True)
class Resolved:
    """A value in force. `where` is its origin, for `.env` with the line."""

    value: Value | Secret
    origin: str
    where: str


class Settings:
    """All keys of the table. Frozen; made by `load.load` or `resolve`."""

    def __init__(
        self,
        root: Path,
        base: tuple[Layer, ...],
        top: tuple[Layer, ...],
        profile: tuple[Layer, ...] = (),
    ) -> None:
        """Layers later in `base`, `profile`, `top` win. Raises UsageError with all violations."""
        self.root = root
        self._base = base
        self._top = top
        self._values = _resolve((*base, *profile, *top))

    def with_profile(self, name: str, mapping: Mapping[str, str]) -> Settings:
        """The same settings with `mapping` above `.env` and below `--set`, origin `name`."""
        layer = Layer(name, {key: Given(text, name) for key, text in mapping.items()})
        return Settings(self.root, self._base, self._top, (layer,))

    def int(self, key: str) -> builtins.int:
        value = self._values[key].value
        if type(value) is not int or TABLE[key].kind == "flag":
            raise TypeError(f"{key} is not a whole number")
        return value

    def maybe_int(self, key: str) -> builtins.int | None:
        value = self._values[key].value
        return None if value is None else self.int(key)

    def flag(self, key: str) -> bool:
        if TABLE[key].kind != "flag":
            raise TypeError(f"{key} is not a flag")
        return self._values[key].value == 1

    def text(self, key: str) -> str:
        value = self._values[key].value
        if not isinstance(value, str) or TABLE[key].secret:
            raise TypeError(f"{key} is not a plain text")
        return value

    def number(self, key: str) -> float:
        """A `decimal` or `utilisation` key as a number; `text` gives it as typed."""
        return float(self.text(key))

    def secret(self, key: str) -> Secret | None:
        """None when the secret is not set."""
        if not TABLE[key].secret:
            raise TypeError(f"{key} is not a secret")
        value = self._values[key].value
        return value if isinstance(value, Secret) else None

    def path(self, key: str) -> Path:
        """A path of this machine: `~` is the user's home, a relative path starts at the root."""
        if TABLE[key].kind != "path":
            raise TypeError(f"{key} is not a path")
        return self.root / Path(self.text(key)).expanduser()

    def origin(self, key: str) -> str:
        return self._values[key].origin

    def items(self) -> Iterator[tuple[Setting, Resolved]]:
        """Every key in the table's order."""
        return ((setting, self._values[key]) for key, setting in TABLE.items())


def unknown(key: str) -> str:
    """Why `key` is not a setting, with the nearest one that is."""
    if key in GONE:
        return f"{key} is no setting here ({GONE[key]}); delete the line"
    for old, new in (("DSV41_", "GLM53_"), ("GLM53_", "DSV41_")):
        if key.startswith(old) and (other := new + key.removeprefix(old)) in TABLE:
            return f"{key} is not a setting; did you mean {other}?"
    close = difflib.get_close_matches(key.upper(), TABLE, n=1, cutoff=0.6)
    return f"{key} is not a setting" + (f"; did you mean {close[0]}?" if close else "")


def refuse(problems: list[str]) -> UsageError:
    """One error that lists everything found."""
    listed = "".join(f"\n  {problem}" for problem in problems)
    return UsageError(
        found=f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the settings:{listed}",
        needed="settings within the limits that `./start.sh config --example` lists",
        do_next="mend the lines named above in .env (or the --set); nothing was started or stopped",
    )


def _resolve(layers: tuple[Layer, ...]) -> dict[str, Resolved]:
    resolved = {
        key: Resolved(_wrap(setting, setting.read(setting.default)), "default", "default")
        for key, setting in TABLE.items()
    }
    problems: list[str] = []
    for layer in layers:
        for key, given in layer.given.items():
            if key not in TABLE:
                problems.append(f"{given.where}: {unknown(key)}")
                continue
            setting = TABLE[key]
            try:
                value = _wrap(setting, setting.read(given.text))
            except contract.Violation as violation:
                shown = "is not usable" if setting.secret else str(violation)
                problems.append(f"{given.where}: {key} {shown}")
                continue
            # An empty value asks for the default, whatever a lower layer says.
            asks_default = given.text == "" and setting.default != ""
            asks_default = asks_default and setting.kind != "optional integer"
            resolved[key] = (
                Resolved(value, "default", f"default, asked for by {given.where}")
                if asks_default
                else Resolved(value, layer.origin, given.where)
            )
    broken = rules.violations({key: r.value for key, r in resolved.items()})
    problems += [f"{resolved[key].where}: {key} {message}" for key, message in broken]
    if problems:
        raise refuse(problems)
    return resolved


def _wrap(setting: Setting, value: Value) -> Value | Secret:
    return Secret(value) if setting.secret and isinstance(value, str) and value else value
