"""The tensor subclass as an object: what a shell is, and the moves it can make.

A wrapped tensor is an instance of `Tensor` in one of two states. Concrete: an ordinary tensor with
memory, only its Python class differs. Pending: a shell without memory, whose `_af` is the trie
node that will compute it. A pending shell *becomes* concrete by exchanging its TensorImpl with
that of the computed result; identity, weak references and attributes stay. The object that held
the result is left with the empty impl and serves as a shell again, so that steady state creates
none (0.2 us for the exchange against 0.84 us for a new shell; one H200 machine, torch 2.11).
"""

from __future__ import annotations

from sys import getrefcount
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import hooks
from ..torch_private import (
    InferenceMode,
    NoModes,
    detach,
    get_item,
    grad_setter,
    is_shell,
    permute,
    set_grad_enabled,
    swap,
    use_count,
)
from .meta import UNKNOWN, Meta, Unknown


class Held(Unknown):
    """State of a computed shell that C++ held: it keeps its value beside itself.

    For good, also once C++ has let go: by then others have the value, as chains that read it.
    """

    def __init__(self, real: torch.Tensor) -> None:
        self.real = real


class Lost(Unknown):
    """State of a shell whose value can no longer be computed."""

    def __init__(self, error: Exception) -> None:
        self.kind, self.reason = type(error), str(error)  # a traceback would keep frames

    @property
    def error(self) -> Exception:
        """What says so; a new one each time."""
        return self.kind(self.reason)


class _Absent:
    """An attribute that the base class has and this one has not."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> None:
        raise AttributeError(f"{owner.__name__!r} has no attribute {self.name!r}")


class Tensor(torch.Tensor):
    """A tensor whose pointwise ops are recorded and run later as one fused kernel.

    Made by `autofuse.wrap` and `autofuse.fuse`; behaves as the `torch.Tensor` it stands for. The
    dispatch of its ops is installed by `autofuse.dispatch`.
    """

    _af: Any = UNKNOWN  # a trie Node while pending; a Meta or UNKNOWN when concrete
    # C functions that read memory; __dlpack__ asks for it
    __dlpack_c_exchange_api__: Any = _Absent()

    def __setattr__(self, name: str, value: object) -> None:
        # an attribute of the user's must not stay on a shell that is used again; C++ sets one on
        # what is written in place under grad
        if self._af is not UNKNOWN and self._af.__class__ is not Meta:
            hooks.value_of(self)
        torch.Tensor.__setattr__(self, name, value)


Tensor.__module__ = "torch"  # torch's own messages name the class
torch.Tensor._af = UNKNOWN  # type: ignore[attr-defined] - another thread may take the class away
set_attribute = torch.Tensor.__setattr__
# (tensor, class), without our own __setattr__: 0.05 us; by torch's 0.2 (CPU, Python 3.12)
set_class: Any = vars(object)["__class__"].__set__


def make_shell(meta: Meta, state: object, offset: int = 0) -> Tensor:
    """A new pending shell that reports `meta`; offset: where it lies in its base, in elements."""
    shell = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        Tensor, meta.shape, strides=meta.stride, storage_offset=offset, dtype=meta.dtype,
        device=meta.device,
    )  # fmt: skip
    set_attribute(shell, "_af", state)
    return shell


def become(shell: Tensor, real: torch.Tensor, meta: Any, node: object) -> Tensor | None:
    """Give `shell` the value `real`; returns the object that can serve as a shell of `node`.

    Returns None where C++ holds the shell: the value is then kept beside it. Call it without
    torch functions on.
    """
    if use_count(shell) == 1:
        try:
            swap(shell, real)
        except RuntimeError:  # C++ has a weak reference
            if not is_shell(shell):
                raise  # from a signal handler, after the exchange
        else:
            return gave(shell, real, meta, node)
    set_attribute(shell, "_af", Held(real))
    return None


def gave(shell: Tensor, real: torch.Tensor, meta: Any, node: object) -> Tensor:
    """The rest of `become`, once they are exchanged."""
    shell.__dict__["_af"] = meta  # 0.04 us, __setattr__ 0.09 us
    real.__class__ = Tensor
    real.__dict__["_af"] = node
    return real  # type: ignore[return-value]


def plain_alias(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor of torch's own class over the same memory, version counter and autograd history.

    None where there is no memory behind `tensor`: another thread may exchange it at any moment.
    """
    was, set_grad, grad = torch.is_grad_enabled(), grad_setter(), tensor.requires_grad
    dims = (*range(tensor.ndim),)
    try:
        set_grad(True)  # or the alias would say so and lead nowhere
        if grad:
            # no Python runs from the test to the end of the call
            return permute(tensor, dims) if not tensor._python_dispatch else None
        return detach(tensor) if not tensor._python_dispatch else None
    finally:
        set_grad(was)


def _leads_a_base_on(tensor: torch.Tensor) -> bool:
    """Whether what is written to `tensor` under grad gives a graph to a base that others have."""
    if not tensor._is_view() or tensor.is_inference() or torch.is_inference_mode_enabled():
        return False
    base = [tensor._base]
    return use_count(base[0]) > 2 or getrefcount(base[0]) > 2  # other views have it, or Python


def alias(tensor: torch.Tensor) -> Tensor:
    """A wrapped tensor over the same memory, version counter and autograd history."""
    tangent = forward_ad._current_level >= 0  # which detach would drop
    with NoModes():
        if tensor.requires_grad and not torch.is_inference_mode_enabled():
            with torch.enable_grad():  # or the alias would say so and lead nowhere
                other = torch.ops.aten.alias.default(tensor)
        elif _leads_a_base_on(tensor):
            was = torch.is_grad_enabled()
            try:
                set_grad_enabled(True)  # as the view itself, whatever it was made under
                other = get_item(tensor, ...)  # names of dimensions go on by it
            finally:
                set_grad_enabled(was)
        elif tensor.is_inference():  # or the alias could be written to where that cannot
            with InferenceMode(True):
                other = tensor.detach()
        else:
            other = torch.ops.aten.alias.default(tensor) if tangent else tensor.detach()
    other.__class__ = Tensor
    return other  # type: ignore[return-value]
