"""`fuse`: calling a function or a module with wrapped arguments, and giving plain results back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch.nn.utils.parametrize import is_parametrized

from . import hooks
from .chain import state as _state
from .chain.refusal import refusal_of
from .chain.shell import Tensor
from .chain.state import this_thread
from .dispatch.nested import SIMPLE, exchange, is_container, rebuilt, tensors_in, values_of
from .inside import whatever_interrupts
from .lending import (
    Lender,
    become_plain,
    holds_wrapped,
    is_lent,
    lend,
    lend_one,
    lenders,
    lending_codes,
    loans,
    others_lend,
    restore,
)
from .record.contest import FUSED, LOOKS, PLAIN, Contest, is_paused
from .record.flush import flush_thread
from .record.policy import ASIDE, aside, contest_for, is_settled, kernel_news, measures
from .settings.config import config
from .supply.kernels import capturing, outstanding
from .torch_private import NoModes, function_modes

is_compiling, is_dynamo_compiling = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
is_grad_enabled, is_inference_mode_enabled = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
)
Plain = torch.Tensor
_F = TypeVar("_F", bound=Callable[..., Any])
_M = TypeVar("_M", bound=torch.nn.Module)


def _would_record(args: Any, kwargs: Any) -> bool:
    """Whether a plain call would: inside a fused one, or of arguments that another thread lends."""
    return this_thread.depth > 0 or any(id(x) in loans for x in tensors_in([args, kwargs]))


# C calls them, so that Python 3.11 too runs their machine code
_lend_all, _restore_all = functools.partial(lend), functools.partial(restore)
_flush_all = functools.partial(flush_thread, "fuse")
_become_plain = functools.partial(become_plain)


class _Walk:
    """The walk through arguments that are containers, and through what comes back."""

    __slots__ = ("containers", "lent", "passes")

    def __init__(self, lent: list[torch.Tensor]) -> None:
        self.lent = lent  # tensors that were made wrapped ones, once for every time
        self.containers: dict[int, Any] = {}  # by id
        self.passes = False  # an argument was wrapped already: results stay wrapped

    def enter(self, others: list[Any]) -> None:
        """Lend the tensors in what is neither plain nor simple."""
        for value in others:
            if value.__class__ is Tensor:
                if is_lent(value):
                    lend_one(value, self.lent)
                else:
                    self.passes = True
            elif isinstance(value, tuple):
                self.enter(_lend_all(value, self.lent))
            elif id(value) not in self.containers and is_container(value):
                self.containers[id(value)] = value
                self.enter(_lend_all(values_of(value), self.lent))

    def leave_arguments(self) -> None:
        """Make plain what the function left in its containers."""
        for container in list(self.containers.values()):
            exchange(container, self.leave)

    def leave(self, value: Any) -> Any:
        """`value`, plain."""
        cls = value.__class__
        if cls is Tensor:
            return value if id(value) in loans else become_plain(value)
        if id(cls) in SIMPLE:
            return value
        if isinstance(value, tuple):
            for item in value:
                if id(item.__class__) not in SIMPLE:
                    return rebuilt(value, self.leave)
            return value
        if id(value) not in self.containers and is_container(value):
            self.containers[id(value)] = value
            exchange(value, self.leave)
        return value


class Site:
    """Where calls come by that cost about the same."""

    __slots__ = ("contest", "device")

    def __init__(self) -> None:
        self.device: torch.device | None = None  # of the tensors that entered, a GPU if one is
        self.contest: Contest | None = None


# by device and about the size of the first tensor, and inference mode, which decides what a check
# of torch's guards accepts
_Sites = dict[tuple[int, int, bool], Site]


class Owner:
    """A module whose forward is fused, which a class has one of for all, or none; in a grad mode.

    While the calls of all its sites go one way, the next few do, without a look at which site is
    theirs: that look takes 0.5 us, and 2 to 8 where others have used the caches since.
    """

    __slots__ = ("granted", "module", "sites")

    def __init__(self) -> None:
        self.sites: _Sites = {}
        self.granted: Site | None = None  # whose contest has granted these calls
        self.module: ref[torch.nn.Module] | None = None


calls: WeakSet[Callable[..., Any]] = WeakSet()  # what `fuse` has made; machine code stands before
_MOST_OWNERS, _MOST_SITES = 4096, 512  # of a function, of an owner
_FEW_SITES = 8  # that are looked at one by one


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    owners: dict[int, Owner] = {}  # by the first module's id, 0 for none; one more under grad
    name = getattr(function, "__qualname__", None) or type(function).__qualname__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        module = tensor = None
        for value in args:
            if value.__class__ is Plain:
                tensor = value
                break
            if module is None and isinstance(value, torch.nn.Module):
                module = value
        owner = owners.get((0 if module is None else id(module)) + is_grad_enabled())
        granted = None if owner is None else owner.granted
        if granted is not None:  # calls of any of its sites
            contest = granted.contest
            if contest is not None and contest.free > 0:
                if contest.way == FUSED:
                    if is_outermost() and not is_compiling():
                        contest.free -= 1
                        return call_fused(function, args, kwargs, granted)
                elif not loans and measures() and hooks.flushing is None:
                    contest.free -= 1
                    return _as_it_is(function, args, kwargs)
            assert owner is not None
            owner.granted = None
        if this_thread.closed:  # in torch.jit.trace sizes would be tensors
            return _as_it_is(function, args, kwargs)
        # --- hot path: plain: 1 us, 3.7 with cold caches, granted 1.9 (CPU, 3.11) ---
        if tensor is None:
            size, device = 0, -2  # -1 is a CPU
        elif function_modes():
            size, device = _size_and_device(tensor)
        else:
            size, device = tensor.numel().bit_length(), tensor.get_device()
        key = size, device, is_inference_mode_enabled()
        site = None if owner is None else owner.sites.get(key)
        contest, decided = None if site is None else site.contest, False
        if contest is not None and contest.left > 0:
            contest.left -= 1
            decided = True
            if contest.way == PLAIN and measures() and not (loans and _would_record(args, kwargs)):
                if hooks.flushing is not None:
                    refusal_of(name, ASIDE).count(aside(contest))
                elif not contest.left % LOOKS:
                    _grant(owner, site)
                return _as_it_is(function, args, kwargs, contest)
        # --- otherwise ---
        if is_compiling() or this_thread.depth:
            return function(*args, **kwargs)
        if not config.enabled:
            return _as_it_is(function, args, kwargs)
        if site is not None and contest is not None and (decided or not measures()):
            if decided and contest.way == FUSED and not contest.left % LOOKS:
                _grant(owner, site)
            return call_fused(function, args, kwargs, site)
        if site is None:
            _state.counts.in_use = True
            if owner is None:
                owner = _owner_of(module, owners)
            elif len(owner.sites) >= _MOST_SITES:
                owner.sites.clear()
            site = owner.sites.setdefault(key, Site())
        return _called(function, args, kwargs, site, contest)

    calls.add(call)
    hooks.fused(call)
    return call


def _owner_of(module: torch.nn.Module | None, owners: dict[int, Owner]) -> Owner:
    """What is to be known of a module, or of none, here."""
    if len(owners) >= _MOST_OWNERS:
        owners.clear()
    key = (0 if module is None else id(module)) + is_grad_enabled()
    owner = owners.setdefault(key, Owner())
    if module is not None:  # the next one may get its id, but not its sites
        # what is called when Python ends finds no globals
        owner.module = ref(module, functools.partial(_forget, owners, key))
    return owner


def _forget(owners: dict[int, Owner], key: int, module: ref[torch.nn.Module]) -> None:
    owner = owners.get(key)
    if owner is not None and owner.module is module:
        del owners[key]


def is_outermost() -> bool:
    """Whether a fused call that begins now is one, and records."""
    return not (this_thread.closed or this_thread.depth) and config.enabled


def _grant(owner: Owner | None, site: Site | None) -> None:
    """Let the next calls of all sites of `owner` go the way of `site`, if that is all of theirs."""
    contest = None if site is None else site.contest
    if owner is None or contest is None or len(owner.sites) > _FEW_SITES:
        return
    contests = [other.contest for other in list(owner.sites.values())]
    if all(x is not None and x.way == contest.way and x.left > 0 for x in contests):
        if contest.grant():
            owner.granted = site


def _size_and_device(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells sites apart, without a word to modes."""
    with NoModes():
        return tensor.numel().bit_length(), tensor.get_device()


def _called(
    function: Callable[..., Any], args: Any, kwargs: Any, site: Site, contest: Contest | None
) -> Any:
    """Call `function`, where it is not decided which way is the better.

    contest: the site's, as its caller has looked at it.
    """
    if contest is None:
        result = call_fused(function, args, kwargs, site)
        if site.contest is None and site.device is not None:
            tensors = tensors_in([result])
            with NoModes():
                if site.device.type == "cpu" and tensors:  # its host's time would not be all
                    site.device = _main_device(tensors)
                site.contest = contest_for(site.device, any(x.requires_grad for x in tensors))
        return result
    before = begun = None
    passes = holds_wrapped([*args, *kwargs.values()])  # before the function puts any there
    if is_paused() or (site.device is not None and capturing(site.device)):
        way = FUSED  # a graph goes on with it, so that it is not left to what is just measured
        contest.skip()
    elif contest.costs is None and outstanding():
        way = PLAIN  # until kernels are there fused calls run op by op, and cost more
        contest.skip()
    else:
        before = kernel_news()
        begun = contest.begin(_state.counts.backwards, before)
        way = contest.way
    if loans and _would_record(args, kwargs):
        way = FUSED
    if way == FUSED:
        result = call_fused(function, args, kwargs, site)
    else:
        result = call_plain(function, args, kwargs)
    if before is not None:
        contest.end(begun, way, lambda: is_settled(before) or way == PLAIN)
    return _left_plain(result, args, kwargs, contest, passes) if way == PLAIN else result


def _as_it_is(
    function: Callable[..., Any], args: Any, kwargs: Any, contest: Contest | None = None
) -> Any:
    """Call `function` plain; what comes of tensors that are wrapped elsewhere becomes plain.

    Other threads lend them, or a fused call has stored them, of this site or of another.
    """
    for value in (*args, *kwargs.values()) if kwargs else args:
        if id(value.__class__) not in SIMPLE and not isinstance(value, torch.nn.Module):
            passes = holds_wrapped([*args, *kwargs.values()])  # before any is put there
            result = function(*args, **kwargs)
            return _left_plain(result, args, kwargs, contest, passes)
    result = function(*args, **kwargs)
    cls = result.__class__
    if cls is Plain or id(cls) in SIMPLE:
        return result
    if cls is tuple or cls is list:
        for item in result:  # 1 us less than `holds_wrapped`
            if id(item.__class__) not in SIMPLE:
                break
        else:
            return result
    return _left_plain(result, args, kwargs, contest, False)


def left_plain(result: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What `_as_it_is` makes of a result that may hold tensors, of arguments that hold none."""
    return _left_plain(result, args, kwargs, None, False)


def _left_plain(result: Any, args: Any, kwargs: Any, contest: Contest | None, passes: bool) -> Any:
    """What a plain call leaves of tensors that are wrapped elsewhere, plain, as a fused one's.

    passes: an argument held one before the call: then results stay as they are.
    """
    if passes or not holds_wrapped([result, *args, *kwargs.values()]):
        return result
    if contest is not None and not others_lend():
        contest.keep_fused()  # they will be there again
    walk = _Walk([])
    for value in (*args, *kwargs.values()):
        walk.leave(value)
    return walk.leave(result)


def _main_device(tensors: list[torch.Tensor]) -> torch.device:
    """The one that has work to do: scalars and lengths on the CPU come beside tensors of a GPU."""
    return next((x.device for x in tensors if x.device.type != "cpu"), tensors[0].device)


def call_plain(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `function` as the plain way of a contest: fused calls inside are plain, too."""
    mine = this_thread.__dict__
    depth, plain = this_thread.depth, this_thread.plain
    try:
        mine["depth"], mine["plain"] = depth + 1, True
        return function(*args, **kwargs)
    finally:
        mine["depth"], mine["plain"] = depth, plain


def call_again(
    function: Callable[..., Any], args: Any, kwargs: Any, others: tuple[torch.Tensor, ...]
) -> Any:
    """Call `function` fused, as the part of a fused call that it was, which had `others` lent, too.

    Which call it is part of now does not matter.
    """
    mine, plain = this_thread.__dict__, this_thread.plain
    call = (lambda _, *args, **kwargs: function(*args, **kwargs)) if others else function
    try:
        mine["plain"] = False
        return call_fused(call, (others, *args) if others else args, kwargs, Site(), True)
    finally:
        mine["plain"] = plain


def call_fused(
    function: Callable[..., Any], args: Any, kwargs: Any, site: Site, again: bool = False
) -> Any:
    """Call `function` with its tensors wrapped; plain tensors come back.

    The tensors stay the objects they are, so that whatever the function does to them is done;
    other threads may hold them too, and the last call to end makes them plain.

    again: those that are plain are wrapped even where others are wrapped already.
    """
    # --- hot path: beside its ops a call with two tensors costs 1.5 us (CPU, Python 3.11) ---
    result: Any = None
    lent: list[torch.Tensor] = []
    walk: _Walk | None = None
    mine = this_thread.__dict__
    if "lender" not in mine:
        lender = Lender()
        lenders.add(lender)
        mine["lender"] = lender
    try:
        others = _lend_all((*args, *kwargs.values()) if kwargs else args, lent)
        if others:
            walk = _Walk(lent)
            walk.enter(others)
        if site.device is None and lent:
            with NoModes():
                site.device = _main_device(lent)
        if walk is None or not walk.passes or again:
            before = mine.get("depth", 0)
            if lent:  # with nothing wrapped, fused calls inside are outermost
                mine["depth"] = before + 1
            try:
                result = function(*args, **kwargs) if kwargs else function(*args)
            finally:
                mine["depth"] = before
                _flush_all()
    finally:
        try:
            _restore_all(lent)
        except BaseException:
            whatever_interrupts(functools.partial(restore, lent))
            raise
        if walk is not None and not walk.passes and walk.containers:
            walk.leave_arguments()
    cls = result.__class__
    if walk is not None and walk.passes:
        return result if again else function(*args, **kwargs)
    if cls is Tensor and not loans:
        return _become_plain(result)
    if id(cls) in SIMPLE:
        return result
    return (walk or _Walk(lent)).leave(result)


lending_codes.add(call_fused.__code__)


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
    if isinstance(target, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TypeError(
            f"autofuse.fuse takes no {type(target).__name__}: TorchScript runs its ops past "
            "Python, where nobody sees them; fuse what was scripted or traced instead"
        )
    if isinstance(target, torch.nn.Module):
        cls = type(target)
        if getattr(cls, "_autofuse_fused", False):
            return target
        if is_parametrized(target):  # a class of its own, whose properties torch takes away again
            cls.forward, cls._autofuse_fused = _fused(cls.forward), True  # type: ignore[method-assign, attr-defined]
        else:
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


# by the class that was there; its modules alone hold it
_fused_classes: WeakValueDictionary[type, type[torch.nn.Module]] = WeakValueDictionary()


def _fused_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of `cls` with a fused forward; instances pickle as `cls` made fused again."""
    known = _fused_classes.get(cls)
    if known is not None:
        return known

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _rebuild, (cls,), state

    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"forward": _fused(cls.forward), "__reduce_ex__": reduce, "_autofuse_fused": True}
    return _fused_classes.setdefault(cls, type(cls.__name__, (cls,), named | own))


def _rebuild(cls: type[torch.nn.Module]) -> torch.nn.Module:
    fused = _fused_class(cls)
    return fused.__new__(fused)
