"""Programs: what a chain recorded, as data. Pure: knows no tensors and no kernels."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Ints
from ..ops.row import Op

CONST = 1 << 20  # references: node index >= 0, Input k as ~k, Const k as CONST + k
Ref = int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor operand: its type code, and its shape and stride in elements."""

    code: str
    shape: Ints
    stride: Ints


@dataclass(frozen=True, slots=True)
class Step:
    """One node of a program."""

    op: Op
    args: tuple[Ref, ...]
    common: str  # type code the operands are converted to
    out: View


@dataclass(frozen=True, slots=True)
class Program:
    """What a chain recorded."""

    steps: tuple[Step, ...]
    inputs: tuple[View, ...]
    consts: tuple[type, ...]  # classes of the Consts: float, int or bool
    relaxed: bool = False
