"""PyTorch's protocols for classes of tensors: `__torch_function__` and `__torch_dispatch__`.

The first serves `torch.*`; the second is the net below for what reaches a pending shell in C++.
"""

from __future__ import annotations

import sys
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import is_grad_enabled

from ..chain.meta import plain_meta
from ..chain.refusal import refusal_of
from ..chain.shell import Held, Tensor, make_shell
from ..errors import LostGradientError
from ..lines import shown, user_position
from ..record.flush import flush_tensor, flush_thread
from ..torch_private import (
    NoModes,
    NoTorchFunction,
    above_autograd,
    in_functorch,
    looked_on,
    requires_grad_of,
    torch_functions_are_on,
)
from .eager import OURS, Handler, released, run_any, run_eager
from .nested import SIMPLE, flattened, mapped, wrapped_in
from .unrecorded import known_of

HANDLERS: dict[Any, Handler] = {}  # torch function -> what to call instead, arguments by position
OPTIONS: dict[Any, Handler] = {}  # the same for calls with keywords
# (function of `hot`, the handler that it stands for, what it is given of that)
HOT: list[tuple[str, Handler, tuple[Any, ...]]] = []


def torch_function(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    declined = looked_on()  # torch asks modes first
    for cls in types:
        if cls is not Tensor and id(cls) not in OURS:  # another class has a say
            return NotImplemented if declined else run_any(func, known_of(func), args, kwargs)
    if declined:
        return _declined(func, args, kwargs or {})
    if kwargs and not (len(kwargs) == 1 and kwargs.get("inplace") is False):  # as torch passes on
        handler = OPTIONS.get(func)
        if handler is None:
            return run_eager(func, args, kwargs)
        if not args and "input" in kwargs and func.__name__.endswith("_"):
            kwargs = dict(kwargs)
            args = (kwargs.pop("input"),)
        return handler(*args, **kwargs)
    handler = HANDLERS.get(func)
    return run_eager(func, args) if handler is None else handler(*args)


def _declined(func: Any, args: Any, kwargs: Any) -> Any:
    """Run what a mode has declined as torch's own subclasses do: it is told once more."""
    for x in wrapped_in((*args, *kwargs.values())):
        flush_tensor(x, "a mode that declines")
    with NoTorchFunction():
        return func(*args, **kwargs)


def ask_overrides(public_api: Handler, relevant_args: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.overrides.handle_torch_function`, which torch's functions in Python call.

    3 us less where no other class and no mode has a say. Another class is asked as if wrapped
    tensors were plain ones. A default device asks about plain ones as well, and where autofuse has
    switched torch functions off: torch itself knows how to call the function without it.

    torch's function names itself by a global, which may be somebody's patch by now, that calls it.
    One of them, `l1_loss`, names its weight among `relevant_args` alone.
    """
    ours = torch_functions_are_on() and any([x.__class__ is Tensor for x in relevant_args])
    if ours and not looked_on():
        for x in relevant_args:
            if x.__class__ is not Tensor and id(x.__class__) not in SIMPLE:
                return run_any(public_api, known_of(public_api), args, kwargs)
        if public_api is L1_LOSS and len(relevant_args) > 2 and relevant_args[2] is not None:
            kwargs["weight"] = relevant_args[2]
        if public_api.__class__ is not FunctionType or not known_of(public_api).own:
            public_api = _behind(public_api, sys._getframe(1))
        return torch_function(public_api, _ONLY, args, kwargs)
    return _ask_overrides(public_api, relevant_args, *args, **kwargs)


L1_LOSS = torch.nn.functional.l1_loss
_ask_overrides = torch.overrides.handle_torch_function
_ONLY = (Tensor,)
# where torch's functions find themselves, and what was there before anybody could patch it
_places = [
    (vars(owner), dict(vars(owner)))
    for owner in (torch.nn.functional, torch.functional, torch.autograd, torch.Tensor)
]


def _behind(patch: Handler, asking: FrameType) -> Handler:
    """The function of torch's that `asking` means by the name which leads to `patch` now."""
    for now, before in _places:
        for name in asking.f_code.co_names:
            if now.get(name) is patch:
                return before.get(name, patch)
    return patch


# no gradient leads through these
_CONSTANT = {"detach", "_local_scalar_dense", "eq", "ne", "lt", "le", "gt", "ge", "equal",
             "is_same_size", "ones_like", "zeros_like", "empty_like"}  # fmt: skip


def torch_dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A pending shell reached C++ below `__torch_function__`: compute it and go on."""
    args, kwargs = list(args), dict(kwargs or {})
    name = func.overloadpacket.__name__
    found = [*wrapped_in((*args, *kwargs.values()))]
    unseen = is_grad_enabled() and name not in _CONSTANT and any(map(_is_unseen, found))
    if unseen and not _makes_new(func):
        raise _lost_gradient(name)
    hangs = unseen and _hangs_a_node((*args, *kwargs.values()))
    for tensor in found:
        if tensor._af.recorder is not None:
            flush_tensor(tensor, "C++")
    if func._schema.is_mutable:
        flush_thread("C++")
    refusal_of(name, "called from C++").count()
    with NoModes():
        args, kwargs = released(args, {}), released(kwargs, {})
        if not unseen:
            return func(*args, **kwargs)
        result = _above_autograd(func, args, kwargs)
        return mapped(result, lambda made: _shell_of(made, name)) if hangs else result


@above_autograd
def _above_autograd(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _hangs_a_node(operands: Any) -> bool:
    """Whether autograd, which is at work on this call, hangs a node on what comes of it: C++ knows
    of an operand that requires grad."""
    return any(requires_grad_of(x) for x in flattened(operands) if isinstance(x, torch.Tensor))


def _shell_of(result: torch.Tensor, name: str) -> torch.Tensor:
    """What C++ is given where it hangs a node on it, which does not know all that `result`, with a
    graph of its own, comes of."""
    if not result.requires_grad:
        return result
    meta = plain_meta(result)
    if meta is None:
        raise _lost_gradient(name)
    return make_shell(meta, Held(result))


def _lost_gradient(name: str) -> LostGradientError:
    return LostGradientError(
        f"C++ code calls {name} on a pending tensor that requires grad, at "
        f"{shown(user_position())}.\n"
        "Cause: the graph of a pending value is made when it is computed, which is too late where "
        "autograd is at work already.\n"
        "Call autofuse.materialize(tensor) before handing it over."
    )


def _makes_new(func: Any) -> bool:
    """Whether `func` is one of torch's whose results are neither views nor written to."""
    schema = func._schema
    aliases = any(result.alias_info is not None for result in schema.returns)
    return func.namespace == "aten" and not (schema.is_mutable or aliases or in_functorch())


def _is_unseen(tensor: Tensor) -> bool:
    """Whether it requires grad, which autograd has not seen of the shell that C++ has."""
    state = tensor._af
    if state.recorder is not None:
        return bool(state.meta.requires_grad)
    return state.__class__ is Held and state.real.requires_grad


# torch asks whose method it is; an AttributeError that it has to clear costs 0.6 us per op
torch_function.__self__ = None  # type: ignore[attr-defined]
