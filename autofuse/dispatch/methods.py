"""Every other C method of a tensor, and what else is installed on the class."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from ..chain.shell import Tensor
from ..torch_private import TensorBase
from .eager import Plain, fed
from .handlers import HOT, PLACES, eagerly
from .protocol import HANDLERS
from .unrecorded import FEEDS, IN_C, known_of


def install_methods() -> None:
    """Every other C method of a tensor."""
    for place in (*PLACES, Plain):
        for name in FEEDS:
            func = getattr(place, name, None)
            if func is not None and func not in HANDLERS:
                HANDLERS[func] = call = eagerly(func)
                HOT.append(("feeding", call, (func, known_of(func), fed)))
                if place is Plain:
                    setattr(Tensor, name, call)
    for name in dir(TensorBase):
        func = getattr(Plain, name)
        if name in ("__getitem__", "__matmul__", "__rmatmul__") or not name.startswith("_"):
            if func.__class__ in IN_C and name not in Tensor.__dict__:
                setattr(Tensor, name, eagerly(func))
    if not _made_no_sequence(Tensor):
        del Tensor.__getitem__  # torch asks `__torch_function__` instead: 0.8 us


def _made_no_sequence(cls: type) -> bool:
    """Empty the slot that makes C see sequences in the objects of `cls`; whether that is done.

    A class in Python that has `__getitem__` is one, and torch's tensors are none: torch.tensor and
    others would ask a list's 0-d tensors for their items.
    """
    if sys.implementation.name != "cpython":
        return False
    slot_of = ctypes.pythonapi.PyType_GetSlot
    slot_of.restype, slot_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    item = slot_of(cls, _SQ_ITEM)
    size: Any = type(cls).__basicsize__
    words = (ctypes.c_void_p * (size // 8)).from_address(id(cls))
    places = [k for k, word in enumerate(words) if item is not None and word == item]
    if len(places) != 1:
        return False
    words[places[0]] = None
    return slot_of(cls, _SQ_ITEM) is None


_SQ_ITEM = 44  # of typeslots.h, which the stable ABI fixes
