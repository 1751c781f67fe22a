"""What a kernel's PTX computes, as expressions over what it loads: as much as inserts need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Expression = tuple[Any, ...]
_LINE = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(?:\{([^}]*)\}|([^,;]+)),(.*);")
_COMPUTES = {"mul", "fma", "neg", "add", "div", "rsqrt"}


class Program:
    """Every register is written once in what Triton emits, but where ways meet."""

    def __init__(self, ptx: str) -> None:
        self.defined: dict[str, tuple[str, list[str], int]] = {}
        for line in ptx.splitlines():
            if (found := _LINE.match(line)) is None:
                continue
            name, several, one, rest = found.groups()
            operands = [operand.strip(" {}[]\t") for operand in rest.split(",")]
            for at, result in enumerate((several or one).split(",")):
                self.defined[result.strip()] = (name, operands, at)

    def expression(self, register: str) -> Expression:
        """Down to what is loaded (``table``: float32 from global memory, ``value``: anything else)
        or comes from another lane. ``a * b`` is ``b * a``."""
        if register not in self.defined:
            return ("given", register)
        name, operands, at = self.defined[register]
        kind = name.split(".")[0]
        if name == "cvt.f32.bf16":
            return ("value", *self._half(operands[0]))
        if kind == "mov" and len(operands) == 1 and not at and operands[0] in self.defined:
            return self.expression(operands[0])
        if kind == "shfl":
            return ("lane", operands[1], self.expression(operands[0]))
        if kind in _COMPUTES and ".f32" in name:
            parts = [self.expression(operand) for operand in operands]
            if kind in ("mul", "fma", "add"):
                parts[:2] = sorted(parts[:2], key=repr)
            return (kind, *parts)
        return ("table" if name.startswith("ld.global") else "value", register, 0)

    def _half(self, register: str) -> tuple[str, int]:
        """A bf16's 32-bit register and its place there."""
        name, operands, at = self.defined.get(register, ("", [], 0))
        if name.startswith("mov"):
            return operands[0], at
        return register, 0

    def of(self, operation: str) -> Iterator[Expression]:
        """The results of every instruction that begins so."""
        for register, (name, _, _) in self.defined.items():
            if name.startswith(operation):
                yield self.expression(register)


def alike(one: Expression, names: dict[Expression, str] | None = None) -> Expression:
    """With what is loaded numbered in the order of its appearance."""
    names = {} if names is None else names
    if one[0] in ("value", "table", "given"):
        return (names.setdefault(one, f"{one[0]} {len(names)}"),)
    return tuple(alike(part, names) if isinstance(part, tuple) else part for part in one)


def unrounded(program: Program) -> set[str]:
    """How pairs are turned: of ``p q - r s`` and ``r q + p s`` (``q`` and ``s`` the table's), which
    product of each sum an ``fma`` adds unrounded: of the value that is turned into itself
    ("cosine"), or of the even one ("even")."""
    minus, plus = [], []
    for one in program.of("fma.rn.f32"):
        left, right, added = one[1:]
        if added[0] == "neg" and added[1][0] == "mul":
            minus.append((left, right, *added[1][1:]))
        elif added[0] == "mul" and left != right:
            plus.append((left, right, *added[1:]))
    found = set()
    for first in minus:
        for second in plus:
            if set(first) == set(second):
                shared = set(first[:2]) & set(second[:2])
                kinds = {one[0] for one in shared}
                found.add("cosine" if kinds == {"table"} else "even")
    return found
