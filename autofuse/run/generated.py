"""What Python that is generated per program is made of: statements, and functions that it calls."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from types import CodeType
from typing import Any

from ..program.program import CONST, Ref


@lru_cache(maxsize=1024)
def compiled(source: str) -> CodeType:
    """Compiled once for all sizes: numbers and addresses reach it as names."""
    return compile(source, "<autofuse runner>", "exec")


def defined(source: str, name: str, space: dict[str, Any]) -> Any:
    """The function `name` that `source` defines in `space`, which does not hold it: no cycle."""
    exec(compiled(source), space)
    return space.pop(name)


def tuple_of(items: Iterable[str]) -> str:
    """The tuple of these expressions."""
    return f"({''.join(item + ', ' for item in items)})"


def operand_of(ref: Ref) -> str:
    """How a function of `inputs` and `consts` calls an operand, where `v0` is step 0."""
    if ref >= CONST:
        return f"consts[{ref - CONST}]"
    return f"v{ref}" if ref >= 0 else f"inputs[{~ref}]"


def result_of(given: list[Ref | None], made: str) -> str:
    """An Answer's result; given: a result, an incoming one as ~k, or None."""
    return tuple_of(
        "None" if ref is None else f"inputs[{~ref}]" if ref < 0 else made.format(ref)
        for ref in (None, *given)
    )


def numbered(index: int) -> str:
    """The statement that gives the node of `v<index>` the number that its op has used up."""
    return f"v{index}.grad_fn._set_sequence_nr(late + {index})"


def log_of(number: float) -> float:
    """The logarithm as C gives it."""
    return math.log(number) if number > 0 else float("-inf") if number == 0 else float("nan")


def reciprocal_of(number: float) -> float:
    """The reciprocal as C gives it."""
    return 1.0 / number if number else math.copysign(math.inf, number)


def declared(function: Any, *arguments: Any) -> tuple[Any, ...]:
    """The arguments as objects of the types that `function` of ctypes declares.

    Calling it with them makes no container, in the midst of which Python up to 3.11 may collect.
    """
    # one frame less for each argument than by an iterator
    return tuple([kind(value) for kind, value in zip(function.argtypes, arguments, strict=True)])
