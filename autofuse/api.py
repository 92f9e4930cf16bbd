"""The public functions: wrapping, fusing, materializing, switching off."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from . import tensor as _tensor
from .chain import (
    _local,
    close_thread,
    flush,
    flush_tensor,
    flush_thread,
    reopen_thread,
)
from .shell import Tensor, alias

_F = TypeVar("_F", bound=Callable[..., Any])
_M = TypeVar("_M", bound=torch.nn.Module)


def wrap(t: torch.Tensor) -> Tensor:
    """A tensor over the memory of `t` whose pointwise ops are recorded and fused.

    t: a dense tensor of any shape and dtype on the CPU or a CUDA device; complex ones are accepted
        and run eagerly. A wrapped tensor is returned as it is.
    Raises TypeError for what is not a dense tensor: sparse, quantized, nested, other subclasses.
    """
    if isinstance(t, Tensor):
        return t
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"autofuse.wrap takes a torch.Tensor, not {type(t).__name__}")
    if not _wrappable(t):
        kind = type(t).__name__ if type(t) not in (torch.Tensor, torch.nn.Parameter) else t.layout
        raise TypeError(
            f"autofuse.wrap takes dense (strided, not quantized or nested) CPU and CUDA tensors, "
            f"not {kind} on {t.device.type}; convert it first, for example with to_dense()"
        )
    return alias(t)


def _wrappable(t: torch.Tensor) -> bool:
    return (
        type(t) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and t.layout is torch.strided
        and not t.is_nested
        and not t.is_quantized
        and t.device.type in ("cpu", "cuda")
    )


def unwrap(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor that `x` stands for, over the same memory; a plain one is returned as is."""
    if not isinstance(x, Tensor):
        return x
    flush_tensor(x, "unwrap")
    if hasattr(x._af, "real"):
        return x._af.real
    plain = alias(x)
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
            recorder = x._af.recorder
            if recorder is not None:
                flush(recorder, "materialize")
                return x
    for tensor in _tensor._tensors(xs):
        flush_tensor(tensor, "materialize")
    return xs[0] if len(xs) == 1 else xs


class disabled(contextlib.ContextDecorator):  # noqa: N801 - used like a function
    """Plain eager PyTorch inside; a context manager and a decorator."""

    def __enter__(self) -> None:
        close_thread("disabled")

    def __exit__(self, *exc: object) -> None:
        reopen_thread()


# --- fuse ---------------------------------------------------------------------------------------


_ATOMS = {int, float, bool, str, type(None), complex, bytes}


def _mapped(value: Any, leaf: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with `leaf` applied to its tensors; the same object where nothing changed."""
    cls = type(value)
    if cls in _ATOMS:
        return value
    if cls is torch.Tensor or cls is Tensor or isinstance(value, torch.Tensor):
        return leaf(value)
    if cls in (list, tuple):
        items = [_mapped(item, leaf) for item in value]
        changed = any(a is not b for a, b in zip(items, value, strict=True))
        return cls(items) if changed else value
    if isinstance(value, tuple):  # named tuples and torch.return_types
        items = [_mapped(item, leaf) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return cls(*items) if hasattr(value, "_fields") else cls(items)
    if isinstance(value, dict):
        items = {key: _mapped(item, leaf) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        copy = value.copy()
        copy.update(items)
        return copy
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        items = {name: _mapped(item, leaf) for name, item in fields.items()}
        changed = {name: item for name, item in items.items() if item is not fields[name]}
        if not changed:
            return value
        copied = object.__new__(cls)
        for name in fields:
            object.__setattr__(copied, name, items[name])
        return copied
    return value


class _Entry:
    """One outermost fused call: wraps what goes in and gives plain tensors back."""

    def __init__(self) -> None:
        self.originals: dict[int, tuple[Tensor, torch.Tensor]] = {}
        self.passes = False  # an argument was wrapped already: results stay wrapped
        self.grad = False  # an argument requires grad

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.__class__ is Tensor:
            self.passes = True
            return tensor
        if not _wrappable(tensor):
            return tensor
        self.grad = self.grad or tensor.requires_grad
        wrapped = alias(tensor)
        self.originals[id(wrapped)] = (wrapped, tensor)
        return wrapped

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self.originals.get(id(tensor))
        if known is not None:
            return known[1]
        if tensor.__class__ is Tensor:
            flush_tensor(tensor, "fuse")
            if hasattr(tensor._af, "real"):
                return tensor._af.real
            tensor.__dict__.pop("_af", None)
            tensor.__class__ = torch.Tensor
        return tensor


def _trains(args: tuple[Any, ...]) -> bool:
    """Whether a method belongs to a module with parameters that require grad."""
    return (
        bool(args)
        and isinstance(args[0], torch.nn.Module)
        and any(parameter.requires_grad for parameter in args[0].parameters())
    )


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _local.closed or _local.depth:
            return function(*args, **kwargs)
        if torch.is_grad_enabled() and _trains(args):
            return function(*args, **kwargs)  # autograd sees every op: nothing here would fuse
        entry = _Entry()
        inner, named = _mapped(args, entry.enter), _mapped(kwargs, entry.enter)
        if entry.passes or (entry.grad and torch.is_grad_enabled()):
            return function(*args, **kwargs)
        args, kwargs = inner, named
        _local.depth += 1
        try:
            result = function(*args, **kwargs)
        finally:
            _local.depth -= 1
            flush_thread("fuse")
        return _mapped(result, entry.leave)

    return call


@overload
def fuse(target: _M) -> _M: ...
@overload
def fuse(target: _F) -> _F: ...
@overload
def fuse() -> Callable[[_F], _F]: ...
def fuse(target: Any = None) -> Any:
    """Fuse the pointwise ops of a function, a method or a module.

    target: a function or method, for use as `@fuse` or `@fuse()`, or an nn.Module, whose `forward`
        is fused and which is returned.

    Tensor arguments, also inside tuples, lists, dicts, dataclasses and named tuples, enter wrapped.
    When the outermost fused call returns, its results are plain tensors. A fused function that is
    called with wrapped tensors leaves its results wrapped.
    """
    if target is None:
        return fuse
    if isinstance(target, torch.nn.Module):
        cls = type(target)
        if not getattr(cls, "_autofuse_fused", False):
            target.__class__ = _fused_class(cls)
        return target
    if not callable(target):
        raise TypeError(f"autofuse.fuse takes a callable or an nn.Module, not {target!r}")
    return _fused(target)


@functools.cache
def _fused_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of `cls` with a fused forward; instances pickle as `cls` made fused again."""

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        return (
            _rebuild,
            (cls,),
            self.__getstate__() if hasattr(self, "__getstate__") else vars(self),
        )

    return type(
        cls.__name__,
        (cls,),
        {
            "forward": _fused(cls.forward),
            "__reduce_ex__": reduce,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "_autofuse_fused": True,
        },
    )


def _rebuild(cls: type[torch.nn.Module]) -> torch.nn.Module:
    fused = _fused_class(cls)
    return fused.__new__(fused)
