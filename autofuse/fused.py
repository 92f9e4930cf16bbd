"""`fuse`: calling a function or a module with wrapped arguments, and giving plain results back."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload
from weakref import ref

import torch

from . import hooks
from .api import wrappable
from .chain import state as _state
from .chain.meta import Meta, learned, met
from .chain.shell import Tensor, set_attribute
from .chain.state import this_thread
from .dispatch.nested import ATOMS, exchange, flattened, is_container, items_of, rebuilt
from .inside import whatever_interrupts
from .record.contest import FUSED, PLAIN, Contest, is_paused
from .record.flush import flush_thread, value_of
from .record.policy import aside, contest_for, is_settled, kernel_news, measures
from .settings.config import config
from .supply.kernels import capturing, outstanding

is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled, is_inference_mode_enabled = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
)
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


class Site:
    """Where calls come by that cost about the same."""

    __slots__ = ("contest", "device", "owner", "places")

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.owner: ref[torch.nn.Module] | None = None
        self.device: torch.device | None = None  # of the tensors that entered, a GPU if one is
        self.contest: Contest | None = None


_MOST_SITES = 4096  # of a function


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    # by module (a class has one forward for all), device and about the size of the first tensor,
    # grad mode and inference mode, which decides what a check of torch's guards accepts
    sites: dict[tuple[int, int, int, bool, bool], Site] = {}
    name = getattr(function, "__qualname__", None) or type(function).__qualname__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or this_thread.closed:
            return function(*args, **kwargs)
        # --- hot path: 0.7 us for a call that is plain (CPU, Python 3.12) ---
        owner = size = 0
        device = -2  # none; -1 is a CPU
        for value in args:
            if value.__class__ is torch.Tensor:
                size, device = value.numel().bit_length(), value.get_device()
                break
            if not owner and isinstance(value, torch.nn.Module):
                owner = id(value)
        key = owner, size, device, is_grad_enabled(), is_inference_mode_enabled()
        site = sites.get(key)
        if site is not None:
            contest = site.contest
            if contest is not None and contest.way == PLAIN and contest.left > 0 and measures():
                contest.left -= 1
                if not _lent:  # by another thread: then what comes of them has to become plain
                    if hooks.flushing is not None:
                        _state.counts.eager[name, aside(contest)] += 1
                    return function(*args, **kwargs)
        # --- otherwise ---
        if torch.compiler.is_compiling() or this_thread.depth or not config.enabled:
            return function(*args, **kwargs)
        if site is None:
            if len(sites) >= _MOST_SITES:
                sites.clear()
            site = sites.setdefault(key, Site())
            if owner:  # the next module may get its id, but not its site
                module = next(x for x in args if id(x) == owner)
                site.owner = ref(module, lambda _: sites.pop(key, None))
        return _called(function, args, kwargs, site)

    return call


def _called(function: Callable[..., Any], args: Any, kwargs: Any, site: Site) -> Any:
    """Call `function` in the way whose turn it is, or which is the better."""
    contest = site.contest
    if contest is None or not measures():
        result = call_fused(function, args, kwargs, site)
        if contest is None and site.device is not None:
            tensors = [x for x in flattened([result]) if isinstance(x, torch.Tensor)]
            if site.device.type == "cpu" and tensors:  # its host's time would not be all
                site.device = _main_device(tensors)
            site.contest = contest_for(site.device, any(x.requires_grad for x in tensors))
        return result
    before = begun = None
    way = contest.way
    if contest.left > 0:
        contest.left -= 1
    elif is_paused() or (site.device is not None and capturing(site.device)):
        way = FUSED  # a graph goes on with it, so that it is not left to what is just measured
    elif contest.costs is None and outstanding():
        way = PLAIN  # until kernels are there fused calls run op by op, and cost more
    else:
        before, begun = kernel_news(), contest.begin(_state.counts.backwards)
        way = contest.way
    if _lent:  # by another thread: then what comes of them has to become plain
        way = FUSED
    if way == FUSED:
        result = call_fused(function, args, kwargs, site)
    else:
        this_thread.depth += 1  # fused calls inside are plain, too
        try:
            result = function(*args, **kwargs)
        finally:
            this_thread.depth -= 1
    if before is not None:
        contest.end(begun, way, way == PLAIN or is_settled(before))
    if way == PLAIN and _holds_wrapped([result]) and not _holds_wrapped([args, kwargs]):
        contest.keep_fused()  # of what was wrapped elsewhere, which a fused call makes plain
        result = _Entry([]).leave(result)
    return result


def _holds_wrapped(values: list[Any]) -> bool:
    return any(x.__class__ is Tensor for x in flattened(values))


def _main_device(tensors: list[torch.Tensor]) -> torch.device:
    """The one that has work to do: scalars and lengths on the CPU come beside tensors of a GPU."""
    return next((x.device for x in tensors if x.device.type != "cpu"), tensors[0].device)


def call_fused(function: Callable[..., Any], args: Any, kwargs: Any, site: Site) -> Any:
    """Call `function` with its tensors wrapped; plain tensors come back."""
    entry, result = _Entry(site.places), None
    try:
        for value in (*args, *kwargs.values()):
            entry.enter(value)
        if site.device is None and entry.found:
            site.device = _main_device([tensor for tensor, _ in entry.found])
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
