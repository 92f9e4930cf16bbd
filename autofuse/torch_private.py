"""The numbers of autograd's nodes: of those that are ready, the engine runs the highest one first.

A node takes the next number when it is made, in eager PyTorch where its op runs. A recorded op uses
one up in the same place, and its node, which a flush makes later, is given it if others have been
made since. Every thread counts for itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

_Node = torch._C._functions.DelayedError  # type: ignore[attr-defined]
peek: Callable[[], int] = torch._C._autograd._get_sequence_nr  # the number that comes next


def c_function(*names: str) -> int:
    """Where C++ has the function without arguments of these nested names; 0 if it is not found."""
    symbol = "".join(f"{len(name)}{name}" for name in names)
    try:
        function = ctypes.PyDLL(torch._C.__file__)[f"_ZN{symbol}Ev"]
    except (OSError, AttributeError):  # a build that names or hides them another way
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def taker() -> Callable[[], int]:
    """A function that uses up a number and returns it: C++'s, or 0.3 us more for a node."""
    address = c_function("at", "sequence_number", "get_and_increment")
    if address:
        return ctypes.PYFUNCTYPE(ctypes.c_uint64)(address)
    return lambda: _Node("", 0)._sequence_nr()


take = taker()
