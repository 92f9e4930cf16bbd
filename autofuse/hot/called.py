"""What C calls in place of Python 3.11, which runs functions itself, past their machine code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..chain.shell import Tensor

_Function = Callable[..., Any]


class Called(functools.partial):  # type: ignore[type-arg]
    """A function that C calls: Python 3.11 runs the bodies of others by itself."""

    @property
    def __code__(self) -> Any:
        return self.func.__code__


def methods(functions: Iterable[_Function]) -> dict[str, tuple[_Function, Any]]:
    """Methods of wrapped tensors, by name, and what stands for them in Python 3.11: 0.5 us less.

    A cache of nothing is C that calls its function, and that the interpreter takes for a method.
    """
    if sys.version_info >= (3, 12):
        return {}
    hot = set(functions)
    return {
        name: (function, functools.lru_cache(maxsize=0)(function))
        for name, function in vars(Tensor).items()
        if not name.startswith("__") and function in hot  # C calls the others itself
    }


def names(functions: Sequence[_Function]) -> list[tuple[Any, str, tuple[_Function, Any]]]:
    """Where this package names them for itself, and what C calls there in Python 3.11: 10 us less
    where Python flushes."""
    if sys.version_info >= (3, 12):
        return []
    ways = {id(function): (function, Called(function)) for function in functions}
    package = __name__.partition(".")[0] + "."
    return [
        (module, name, ways[id(function)])
        for path, module in [*sys.modules.items()]
        if path.startswith(package)
        for name, function in [*vars(module).items()]
        if id(function) in ways
    ]
