"""What is called in another way: torch's functions, and our own by C in Python 3.11.

Machine code stands before the first. Python 3.11 runs the others itself, past their machine code.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..chain.shell import Tensor
from ..dispatch import protocol, unrecorded
from .c import WITH_KEYWORDS
from .places import entry_of, vectorcall_of

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


def taken() -> tuple[list[Any], list[Any]]:
    """The builtins of torch, and its methods that take tensors, that machine code stands before."""
    builtins = [f for f in protocol.HANDLERS if type(f) is type(len) and not vectorcall_of(f)]
    methods = [
        f
        for f in protocol.HANDLERS
        if type(f) is types.MethodDescriptorType
        and not f.__name__.startswith("_")  # of operators Python asks a wrapped tensor first
        and entry_of(f, types.MethodDescriptorType, 3)[2] == WITH_KEYWORDS
    ]
    if not (builtins and methods):
        raise NotImplementedError("torch's functions are called another way")
    return builtins, methods


EVERY = 1 << 30  # arguments of a function that takes any number


def asking() -> dict[_Function, tuple[int, bool, frozenset[str]]]:
    """Functions of torch's in Python that ask for overrides, which machine code stands before.

    How many arguments each takes before the first that may say that something is written, whether
    that is `inplace`, and the names of all. Python 3.11 runs the functions that it calls itself,
    past their vectorcall.
    """
    found = {}
    for owner in (torch.nn.functional, torch.functional, torch.autograd):
        for function in vars(owner).values():
            if sys.version_info >= (3, 12) and unrecorded.asks_for_overrides(function):
                known = unrecorded.known_of(function)
                if known.own and (function in protocol.HANDLERS or known.lends):
                    code = function.__code__
                    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                    every = EVERY if code.co_flags & inspect.CO_VARARGS else code.co_argcount
                    writes = [k for k, name in enumerate(names) if name in known.targets]
                    most = min([*writes, every])
                    found[function] = most, names[most:] == ("inplace",), frozenset(names)
    return found
