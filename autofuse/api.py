"""The public functions: wrapping, fusing, materializing, switching off."""

from __future__ import annotations

from typing import Any

import torch

from .chain.meta import UNKNOWN, Meta
from .chain.shell import Tensor, alias
from .chain.state import counts
from .dispatch import install as _install  # noqa: F401 - puts what dispatch defines on the class
from .dispatch.nested import wrapped_in
from .record.flush import flush, flush_tensor, value_of
from .record.modes import closed
from .torch_private import NoModes


def wrap(t: torch.Tensor) -> Tensor:
    """A tensor over the memory of `t` whose pointwise ops are recorded and fused.

    t: a dense tensor of any shape and dtype on the CPU or a CUDA device; complex ones are accepted
        and run eagerly. A wrapped tensor is returned as it is. One that requires grad is made a
        wrapped one itself, for `grad`, hooks and leaf-ness belong to the object; a Parameter stays
        what it is, and the result leads on to it.
    Results of ops that run eagerly are wrapped too, until they stay plain where that costs less
    (`config.measure`).
    Raises TypeError for what is not a dense tensor: sparse, quantized, nested, other subclasses.
    """
    if isinstance(t, Tensor):
        return t
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"autofuse.wrap takes a torch.Tensor, not {type(t).__name__}")
    with NoModes():
        if not wrappable(t):
            refusal = _refusal(t)
            raise TypeError(f"autofuse.wrap takes dense tensors of the CPU or CUDA, and {refusal}")
        counts.in_use = True
        if t.requires_grad and type(t) is torch.Tensor:
            t.__class__ = Tensor
            return t  # type: ignore[return-value]
        return alias(t)


_strided = torch.strided
_CLASSES = set(map(id, (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)))


def wrappable(t: torch.Tensor) -> bool:
    return id(type(t)) in _CLASSES and is_dense(t)


def is_dense(t: torch.Tensor) -> bool:
    """Whether a tensor of torch's own classes can be wrapped."""
    if t.layout is not _strided or t.is_nested or t.is_quantized:
        return False
    return t.is_cpu or t.is_cuda


def _refusal(t: torch.Tensor) -> str:
    """What keeps a tensor from being `wrappable`, and what would help."""
    if t.is_nested:
        return "this one is nested; wrap what torch.nested.to_padded_tensor makes of it"
    if id(type(t)) not in _CLASSES:
        reason = f"what the ops of a {type(t).__name__} do, its class says"
        if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return reason
        return f"{reason}; without that, wrap its as_subclass(torch.Tensor)"
    if t.is_quantized:
        return "this one is quantized; wrap its dequantize()"
    if t.layout is not torch.strided:
        return f"this one has the layout {t.layout}; wrap its to_dense()"
    if t.is_meta:
        return "this one is on the device meta; there are no values to compute"
    return f"this one is on {t.device}, where its ops run without autofuse"


def unwrap(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor that `x` stands for, over the same memory; a plain one is returned as is.

    A leaf that requires grad becomes plain itself, for all who hold it, as it becomes a wrapped one
    by `wrap`.
    """
    if not isinstance(x, Tensor):
        return x
    value = value_of(x, "unwrap")
    if value is not x:
        return value
    with NoModes():
        leaf = x.requires_grad and x.is_leaf
    plain = x if leaf else alias(x)
    plain.__dict__.pop("_af", None)
    plain.__class__ = torch.Tensor
    return plain


def is_pending(x: object) -> bool:
    """Whether `x` is a wrapped tensor whose value has not been computed yet."""
    return isinstance(x, Tensor) and x._af.recorder is not None


def materialize(*xs: Any) -> Any:
    """Compute what is pending among `xs`, in one flush per device, and return them.

    xs: tensors, or lists, tuples and dicts of them. Returns the one argument, or all as a tuple.
    """
    if len(xs) == 1:
        x = xs[0]
        if x.__class__ is Tensor:  # the everyday case: 0.5 us less than the walk below
            state = x._af
            if state.recorder is not None:
                flush(state.recorder, "materialize")
                return x
            if state.__class__ is Meta or state is UNKNOWN:
                return x
        elif x.__class__ is torch.Tensor:  # a result that stays plain: 1.5 us less
            return x
    for tensor in wrapped_in(xs):
        flush_tensor(tensor, "materialize")
    return xs[0] if len(xs) == 1 else xs


class disabled(closed):  # noqa: N801 - used like a function
    """Plain eager PyTorch inside; a context manager and a decorator."""

    def __init__(self) -> None:
        super().__init__("disabled")
