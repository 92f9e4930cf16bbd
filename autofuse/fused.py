"""`fuse`: calling a function or a module with wrapped arguments, and giving plain results back."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from . import hooks
from .api import wrappable
from .chain import state as _state
from .chain.meta import Meta, learned, met
from .chain.shell import Tensor, set_attribute
from .chain.state import this_thread
from .dispatch.nested import ATOMS, exchange, is_container, items_of, rebuilt
from .inside import whatever_interrupts
from .record.flush import flush_thread, value_of
from .record.policy import ASIDE, ASIDE_CALLS, BARREN, launches, rests
from .settings.config import config

_F = TypeVar("_F", bound=Callable[..., Any])
_M = TypeVar("_M", bound=torch.nn.Module)


class _Place:
    """Where tensors enter a function again and again."""

    __slots__ = ("likely",)

    def __init__(self) -> None:
        self.likely: tuple[Any, ...] = ()


_lent: dict[int, int] = {}  # id of a tensor that fused calls have wrapped -> how many of them
_lending = threading.RLock()  # a signal handler may call a fused function too


class _Entry:
    """One outermost fused call: makes what goes in wrapped tensors and all of it plain again.

    The tensors stay the objects they are, so that whatever the function does to them is done;
    other threads may hold them too, and the last call to end makes them plain.
    """

    __slots__ = ("containers", "found", "lent", "passes", "places")

    def __init__(self, places: list[_Place]) -> None:
        self.places = places  # of the arguments that are plain tensors, in order
        self.found: list[tuple[torch.Tensor, Meta | None]] = []  # those arguments
        self.lent: list[torch.Tensor] = []
        self.containers: dict[int, Any] = {}  # by id
        self.passes = False  # an argument was wrapped already: results stay wrapped

    def enter(self, value: Any) -> None:
        cls = value.__class__
        if cls is torch.Tensor:
            while len(self.places) <= len(self.found):  # some are lent, and need none
                self.places.append(_Place())
            place = self.places[len(self.found)]
            meta = met(value, place)
            if meta is not None:
                self.found.append((value, meta))
            elif wrappable(value):
                self.found.append((value, learned(value, place)))
        elif id(cls) in ATOMS:
            return
        elif cls is Tensor:
            if id(value) in _lent:
                self.found.append((value, None))
            else:
                self.passes = True
        elif isinstance(value, (torch.Tensor, torch.nn.Module)):
            return  # a Parameter stays one; as an operand it is recorded as it is
        elif isinstance(value, tuple):
            for item in value:
                self.enter(item)
        elif id(value) not in self.containers and is_container(value):
            self.containers[id(value)] = value
            for _, item in items_of(value):
                self.enter(item)

    def lend(self) -> None:
        """Make the tensors that were found wrapped ones."""
        with _lending:
            for tensor, meta in self.found:
                key = id(tensor)
                _lent[key] = _lent.get(key, 0) + 1
                self.lent.append(tensor)
                if tensor.__class__ is not Tensor:
                    tensor.__class__ = Tensor
                    if meta is not None:
                        tensor.__dict__["_af"] = meta

    def restore(self) -> None:
        """Make the arguments plain again, whatever interrupts that."""
        whatever_interrupts(self._restore_all)

    def _restore_all(self) -> None:
        while self.lent:
            with _lending:
                self._restore_last()

    def _restore_last(self) -> None:
        """A step of it, to be repeated until it is done: a fused call may come in its middle."""
        tensor = self.lent[-1]
        key = id(tensor)
        if _lent[key] == 1 and isinstance(tensor, Tensor):  # concrete: all is flushed
            tensor.__dict__.pop("_af", None)
            set_attribute(tensor, "__class__", torch.Tensor)
        # no Python runs from here...
        if _lent[key] == 1:
            if tensor.__class__ is not Tensor:
                del _lent[key]
                del self.lent[-1]
        else:
            _lent[key] -= 1
            del self.lent[-1]
        # ...to here

    def leave_arguments(self) -> None:
        """Make plain what the function left in its containers."""
        for container in list(self.containers.values()):
            exchange(container, self.leave)

    def leave(self, value: Any) -> Any:
        """`value`, plain."""
        cls = value.__class__
        if cls is Tensor:
            return value if id(value) in _lent else _become_plain(value)
        if id(cls) in ATOMS or isinstance(value, (torch.Tensor, torch.nn.Module)):
            return value
        if isinstance(value, tuple):
            return rebuilt(value, self.leave)
        if id(value) not in self.containers and is_container(value):
            self.containers[id(value)] = value
            exchange(value, self.leave)
        return value


def _become_plain(tensor: Tensor) -> torch.Tensor:
    value = value_of(tensor, "fuse")
    if value is tensor:
        tensor.__dict__.pop("_af", None)
        set_attribute(tensor, "__class__", torch.Tensor)  # 0.4 us less than by our own __setattr__
    return value


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    # by module (its class has one forward for all): how many calls in a row have launched
    # nothing; negative while stepping aside
    barren: dict[int, int] = {}
    # in and outside inference mode, which decides what a check of torch's guards accepts
    places: tuple[list[_Place], list[_Place]] = [], []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or this_thread.closed
            or this_thread.depth
            or not config.enabled
        ):
            return function(*args, **kwargs)
        owner = id(args[0]) if args and isinstance(args[0], torch.nn.Module) else 0
        count = barren.get(owner, 0)
        if count < 0:  # nothing here has fused lately: wrapping would only cost
            barren[owner] = count + 1
            if hooks.flushing is not None:
                _state.counts.eager[function.__qualname__, ASIDE] += 1
            return function(*args, **kwargs)
        before = launches()
        inference = torch.is_inference_mode_enabled()
        result = call_fused(function, args, kwargs, places[inference])
        if launches() != before or rests():
            barren.pop(owner, None)
        else:
            barren[owner] = count + 1 if count < BARREN else -ASIDE_CALLS
        return result

    return call


def call_fused(function: Callable[..., Any], args: Any, kwargs: Any, places: list[_Place]) -> Any:
    """Call `function` with its tensors wrapped; plain tensors come back."""
    entry, result = _Entry(places), None
    try:
        for value in (*args, *kwargs.values()):
            entry.enter(value)
        if not entry.passes:
            entry.lend()
            depth = bool(entry.lent)  # with nothing wrapped, fused calls inside are outermost
            this_thread.depth += depth
            try:
                result = function(*args, **kwargs)
            finally:
                this_thread.depth -= depth
                flush_thread("fuse")
    finally:
        try:
            entry.restore()
        except BaseException:
            entry.restore()  # the interrupt may have come before its first line
            raise
        if entry.containers and not entry.passes:
            entry.leave_arguments()
    return function(*args, **kwargs) if entry.passes else entry.leave(result)


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
    When the outermost fused call returns, its results are plain tensors; one without a tensor among
    its arguments does not count, so that fused calls inside it are outermost. A fused function that
    is called with wrapped tensors leaves its results wrapped.
    """
    if target is None:
        return fuse
    if isinstance(target, torch.nn.Module):
        cls = type(target)
        if not getattr(cls, "_autofuse_fused", False):
            target.__class__ = _fused_class(cls)
        return target
    if inspect.isgeneratorfunction(target) or inspect.iscoroutinefunction(target):
        raise TypeError(
            f"autofuse.fuse takes functions that return, not generators or coroutines: {target!r}; "
            "wrap its tensors with autofuse.wrap instead"
        )
    if isinstance(target, type):
        raise TypeError(
            f"autofuse.fuse takes functions and modules, not the class {target!r}; "
            "fuse its forward or an instance instead"
        )
    if not callable(target):
        raise TypeError(f"autofuse.fuse takes a callable or an nn.Module, not {target!r}")
    return _fused(target)


@functools.cache
def _fused_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of `cls` with a fused forward; instances pickle as `cls` made fused again."""

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _rebuild, (cls,), state

    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"forward": _fused(cls.forward), "__reduce_ex__": reduce, "_autofuse_fused": True}
    return type(cls.__name__, (cls,), named | own)


def _rebuild(cls: type[torch.nn.Module]) -> torch.nn.Module:
    fused = _fused_class(cls)
    return fused.__new__(fused)
