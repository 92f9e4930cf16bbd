"""Every other C method of a tensor, and what else is installed on the class."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from ..chain.shell import Tensor
from ..chain.state import this_thread
from ..ops.row import SPELLINGS
from ..ops.views import ATTRIBUTES
from ..record.flush import flush_thread
from ..record.writes import record_copy, record_item
from ..sole import tell_place
from ..torch_private import TensorBase, functions_off, looked_on
from .chosen import Choices, chosen_by
from .eager import OURS, Handler, Plain, run_eager
from .handlers import altering, deleting, eagerly, handle, passing, unhandled
from .in_place import eager_alone, in_place, write_chosen
from .protocol import HANDLERS, HOT, OPTIONS
from .shapes import viewing
from .unrecorded import IN_C, LIKE_C, PASSED, WRITERS, asks_for_overrides, known_of


def install_methods() -> None:
    """Every other C method of a tensor, and the functions that stand beside chains."""
    handle(Plain, "__hash__", Plain.__hash__)
    handle(Plain, "copy_", _copying(Plain.copy_))
    handle(Plain, "data_ptr", _addressing(Plain.data_ptr))
    for name in WRITERS:
        for place, func in unhandled(name):
            handle(place, name, in_place(eager_alone, func))
    for name in PASSED | {func.__name__ for func in LIKE_C}:
        for place, func in unhandled(name):
            handle(place, name, passing(func))
    like = {torch.rand_like, torch.randn_like, torch.randint_like, torch.normal}
    makers = torch.overrides.get_ignored_functions() - like  # no tensor comes to them
    for place in _BUILTINS:
        for name in set(dir(place)) - _ALIASES:
            func = getattr(place, name)
            public = not (name.startswith("_") or name.endswith("_")) or name in _ASKED
            if public and func.__class__ in IN_C and func not in makers and func not in HANDLERS:
                handle(place, name, passing(func))
    for name in dir(TensorBase):
        func = getattr(Plain, name)
        if name in _OPERATORS or not name.startswith("_"):
            if func.__class__ in IN_C and name not in Tensor.__dict__:
                handle(Plain, name, passing(func))
    for name in (*ATTRIBUTES, *_ATTRIBUTES):
        base = getattr(Plain, name)
        getter = base.__get__
        handler = viewing(name, getter) if name in ATTRIBUTES else passing(getter)
        HANDLERS[getter] = OPTIONS[getter] = handler
        if name == "grad":
            changes = _granting(base, base.__set__), _granting(base, base.__delete__)
        else:
            setter = altering if name == "data" else eagerly
            changes = setter(base.__set__), deleting(base)
        setattr(Tensor, name, property(handler, *changes))
    handle(Plain, "requires_grad_", altering(Plain.requires_grad_, returns=True))
    handle(Plain, "__setitem__", _setting(Plain.__setitem__))
    for name, func in vars(Plain).items():
        if name in _EXPORTS or not name.startswith("__"):
            # in the middle of a flush it would find them switched off, and take a pending value for
            # a tensor with memory
            if asks_for_overrides(func) and name not in Tensor.__dict__:
                handle(Plain, name, passing(func))
    if not made_no_sequence(Tensor):
        del Tensor.__getitem__  # torch asks `__torch_function__` instead: 0.8 us


_BUILTINS = (torch._C._VariableFunctions, torch._C._nn, torch._C._linalg, torch._C._fft,
             torch._C._special)  # type: ignore[attr-defined]  # fmt: skip
_ASKED = {"_is_all_true", "_is_any_true"}  # by torch.distributions, of every parameter
_ALIASES = {"dsmm", "spmm"}  # equal to torch.mm, and not the same
_ATTRIBUTES = ("real", "imag", "grad_fn", "grad", "data")  # for which a value is needed
_OPERATORS = {"__bool__", "__float__", "__getitem__", "__index__", "__int__", "__matmul__"}
# not of operators: Python would ask a reflected one first that differs from a plain tensor's
_EXPORTS = ("__reduce_ex__", "__deepcopy__", "__array__", "__dlpack__", "__dlpack_device__")


def _granting(base: Any, func: Handler) -> Handler:
    """A handler for what sets or deletes the gradient of a tensor, which is memory of another one.

    What reads that holds it, so that no chain ends. It goes where torch functions are on: whoever
    is called then may do anything.
    """
    get, is_leaf = base.__get__, Plain.is_leaf.__get__  # type: ignore[attr-defined]

    def call(self: Any, *value: Any) -> Any:
        before = None
        if not looked_on():
            with functions_off():
                leaf = is_leaf(self)
                before = get(self) if leaf else None  # of others torch warns
            if not leaf:
                flush_thread("grad")
        result = run_eager(func, (self, *value))
        del before
        return result

    HOT.append(("granting", call, (func, known_of(func), get, is_leaf)))
    return call


def _setting(func: Handler) -> Handler:
    """A handler for `x[i] = value`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and not kwargs and not (this_thread.closed or looked_on()):
            if record_item(*args) or write_chosen(chosen_by(_fill, args, {}), args[0]) is True:
                return None
        return run_eager(func, args, kwargs)

    HOT.append(("setting", call, (func, known_of(func), Choices(_fill))))
    return call


def _addressing(func: Handler) -> Handler:
    """A handler for `x.data_ptr()`: whoever has that may look there at any time."""

    def call(*args: Any, **kwargs: Any) -> Any:
        address = run_eager(func, args, kwargs)
        if args and args[0].__class__ is Tensor and args[0]._af.recorder is None:
            tell_place(args[0])
        return address

    return call


def _fill(x: Any, mask: Any, value: Any) -> Any:
    """A chooser for `x[mask] = value` with a mask of its shape and a number: `masked_fill_`."""
    if id(x.__class__) not in OURS or id(mask.__class__) not in OURS:
        return None
    if value.__class__ not in (float, int) or mask.dtype is not torch.bool:
        return None
    return SPELLINGS["masked_fill"](x, mask, value) if mask.shape == x.shape else None


def _copying(func: Handler) -> Handler:
    """A handler for `x.copy_(value)`."""
    written = in_place(eager_alone, func)

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and not (kwargs or this_thread.closed or looked_on()):
            x, value = args
            if id(x.__class__) in OURS and value.__class__ is Tensor and record_copy(x, value):
                return x
        return written(*args, **kwargs) if args else run_eager(func, args, kwargs)

    HOT.append(("copying", call, (written,)))
    return call


def made_no_sequence(cls: type) -> bool:
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
