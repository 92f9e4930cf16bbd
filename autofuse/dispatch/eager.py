"""Eager: running what autofuse does not record, on plain tensors, and wrapping what it returns.

So that the next chain is seen.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from typing import Any, Literal

import torch

from .. import hooks
from ..chain.claims import announced, in_use, loans, using, writing
from ..chain.meta import UNKNOWN, Meta, remember
from ..chain.refusal import Refusal, refusal_of
from ..chain.shell import Held, Lost, Tensor, set_class
from ..chain.state import is_alone, make_current, recorder_for, this_thread
from ..inside import others_waited, whatever_interrupts
from ..record.flush import beside, flush, flush_all, flush_tensor, flush_thread, write_first
from ..record.numbers import ORDER, is_next, pass_over
from ..record.origins import STAY, STAYS, Tried, ask, is_on_trial, keep
from ..record.policy import skipped
from ..record.seldom import SELDOM
from ..torch_private import (
    NoModes,
    dispatch_modes,
    function_modes,
    functions_off,
    has_torch_function,
    looked_on,
)
from .nested import SIMPLE, flattened, mapped
from .unrecorded import COPIES, Known, Plain, known_of

Parameter = torch.nn.Parameter
Handler = Callable[..., Any]
OURS = set(map(id, (Tensor, Plain, Parameter)))  # classes of tensors that are read and written
_MANY = set(map(id, (tuple, list)))


def run_eager(
    func: Handler, args: Any, kwargs: Any = None, refusal: Refusal | Literal[False] | None = None
) -> Any:
    """Run `func` as eager PyTorch on plain tensors, and wrap what it returns.

    Pending arguments become concrete. A Python function finds every wrapped argument to be an
    ordinary `torch.Tensor`, the same object, so that it meets nothing it does not know. Those of
    the table do not always come here: `F.leaky_relu` in place, or `F.hardswish` by `run_short`,
    finds wrapped ones, and only passes them on to C, with torch functions off.

    refusal: what it is counted under, if something has kept it from being recorded.
    """
    known = known_of(func)
    if function_modes() and known.asks and looked_on():
        return func(*args, **kwargs or {})  # it tells them, and whoever passes it on comes here
    if known.writes or not known.in_c or (kwargs and _has_target(known, kwargs)):
        return run_any(func, known, args, kwargs, None, refusal)
    if get_ident() not in using:
        return in_use(run_eager, func, args, kwargs, refusal)
    recorder, first = this_thread.current, None
    if this_thread.closed and dispatch_modes():  # they are told of classes too
        return run_any(func, known, args, kwargs, None, refusal)
    if recorder is None:
        begin(args)
    elif recorder.running is not None:
        write_first(recorder)
    if recorder is not None and recorder.chain.tip.holds_grad:
        first = _keep_order(recorder, flattened((*args, *kwargs.values()) if kwargs else args))
    sources: Any = ()
    # --- hot path: the everyday op between two chains, budget 1 us ---
    for x in (*args, *kwargs.values()) if kwargs else args:
        if x.__class__ is Tensor:
            state = x._af
            if state.recorder is not None:
                flush(state.recorder, known.name)
                if x._af.recorder is not None:  # in the middle of the flush that makes it
                    return run_any(func, known, args, kwargs, None, refusal)
            elif state.__class__ is not Meta and state is not UNKNOWN:
                if is_on_trial(state, x):
                    sources = (*sources, state)
                elif state.__class__ is not Tried:
                    return run_any(func, known, args, kwargs, None, refusal)
        elif id(x.__class__) not in SIMPLE and not (
            id(x.__class__) in _MANY
            and (not x or x[0].__class__ is int or _made_concrete(x, known))
        ):
            return run_any(func, known, args, kwargs, None, refusal)
    with functions_off():
        result = func(*args, **kwargs) if kwargs else func(*args)
    (refusal or known.refusal).count()
    if first is not None:
        pass_over(first)
    if not sources:
        return lifted(result, ask(result), known.name)
    items = flattened((*args, *kwargs.values()) if kwargs else args)
    mixed = len(sources) < sum([x.__class__ is Tensor for x in items])
    return lifted(result, ask(result, sources, mixed, _is_early(refusal)), known.name)


def _is_early(refusal: Refusal | Literal[False] | None) -> bool:
    """Whether an op was not recorded for its sizes, which may come often."""
    return bool(refusal) and refusal.reason == SELDOM


def begin(args: Any) -> None:
    """Give this thread its first recorder, by which machine code takes ops that only pass on."""
    tensor = next((x for x in args if x.__class__ is Tensor), None)
    if tensor is not None:
        with functions_off():
            make_current(recorder_for(tensor.device))


def _made_concrete(items: Any, known: Known) -> bool:
    """Make the tensors in a list concrete; False if `run_eager` does not know all of it."""
    for x in items:
        if x.__class__ is Tensor:
            state = x._af
            if state.recorder is not None:
                flush(state.recorder, known.name)
                if x._af.recorder is not None:
                    return False
            elif state.__class__ is not Meta and state is not UNKNOWN:
                return False
        elif id(x.__class__) not in SIMPLE:
            return False
    return True


def forget(tensor: Tensor, cls: type | None = None) -> bool:
    """Let nothing be known of a concrete tensor of ours; False where it is pending by now.

    cls: of which it is from now on.
    """
    its = tensor.__dict__
    # no Python runs from here...
    if "_af" in its:
        if its["_af"].recorder is not None:
            return False
        del its["_af"]
    if cls is not None:
        set_class(tensor, cls)  # ...to its end
    return True


def make_plain(tensor: Tensor, reason: str) -> None:
    """Let a tensor of ours, with its value, be of torch's own class: in its own memory."""
    while not forget(tensor, Plain):
        flush_tensor(tensor, reason)


def run_short(func: Handler, node: Any, *operands: Any) -> Any:
    """Run an op of the table, on concrete operands, that the trie has found better off eager."""
    if function_modes() and looked_on():
        return run_eager(func, operands)
    if get_ident() not in using:
        return in_use(run_short, func, node, *operands)
    node.recorder.reading = False
    skipped(node)
    with functions_off():
        result = func(*operands)
    node.refusal.count()
    told = ask(result)
    if told is not None:
        return lifted(result, told, node.op.name)
    result.__class__ = Tensor
    return result


def _keep_order(recorder: Any, args: Any) -> int | None:
    """Flush if an op that is not recorded reads an Input of the chain.

    The engine adds up the gradients of a tensor in the reverse order of its uses. Otherwise the
    chain may `pass_over` the op if nothing else stands between: then its first number.
    """
    chain = recorder.chain
    slots = chain.slots
    for x in args:
        if id(x) in slots or x.__class__ is Tensor and x._af.__class__ is Held:
            flush(recorder, ORDER)
            return None
    return chain.first if is_next(chain) else None


def run_any(
    func: Handler, known: Known, args: Any, kwargs: Any, call: Handler | None = None,
    refusal: Refusal | Literal[False] | None = None,
) -> Any:  # fmt: skip
    """`run_eager` for nested arguments, keywords, Python functions, other classes and writes.

    call: what to call with plain tensors in place of `func`.
    """
    if get_ident() not in using:
        return in_use(run_any, func, known, args, kwargs, call, refusal)
    name = known.name
    writes = known.writes or (kwargs and _has_target(known, kwargs))
    if writes and get_ident() not in writing:
        return announced(run_any, func, known, args, kwargs, call, refusal)
    recorder = this_thread.current
    if recorder is not None and recorder.running is not None:
        write_first(recorder)
    items = flattened((*args, *kwargs.values()) if kwargs else args)
    first = None
    if recorder is not None and recorder.chain.tip.holds_grad:
        first = _keep_order(recorder, items)
    others = has_others(items)
    if others and func in _OPERATORS and args[0].__class__ is Tensor:
        call = _OPERATORS[func]
    in_c = known.in_c and call is None and not others and not dispatch_modes()
    wrapped = [item for item in items if item.__class__ is Tensor]
    del items  # who empties a list that it is given wants the memory
    tried = [item for item in wrapped if item._af.__class__ is Tried]
    if tried and writes:  # in place it is seen of plain tensors too, but in foreign ops
        out = kwargs.get("out") if kwargs else None
        for tensor in flattened([out]) if known.own else wrapped:
            keep(tensor)
    sources = [state for item in tried if is_on_trial(state := item._af, item)]
    mixed = len(sources) < len(wrapped)
    for tensor in wrapped:
        if tensor._af.recorder is not None or isinstance(tensor._af, Lost):
            flush_tensor(tensor, name)
    if writes:
        flush_thread(name) if is_alone() else flush_all(name)
        for tensor in wrapped:
            if not _is_apart(tensor):
                remember(tensor, UNKNOWN)
    if any(map(_is_apart, wrapped)):
        stood: dict[int, Tensor] = {}
        args, kwargs = released(args, stood), released(kwargs or {}, stood)
        result = run_eager(func, args, kwargs, refusal)
        return stood.get(id(result), result)  # in-place functions return an argument
    if name in COPIES:
        for tensor in wrapped:
            forget(tensor)  # what a copy takes along is the user's alone
    if in_c:
        with functions_off():
            result = func(*args, **kwargs) if kwargs else func(*args)
        (refusal or known.refusal).count()
        if first is not None:
            pass_over(first)
        return lifted(result, ask(result, sources, mixed, _is_early(refusal)), known.name)
    whose = [whose_is(tensor, id(tensor)) for tensor in wrapped]
    try:
        for tensor, owner in zip(wrapped, whose, strict=True):
            if owner:
                make_plain(tensor, name)  # it may have other contents afterwards
        result = (call or func)(*args, **kwargs or {})
    finally:
        try:
            wrap_again(wrapped, whose)
        except BaseException:  # an interrupt
            whatever_interrupts(partial(wrap_again, wrapped, whose))
            raise
    (refusal or known.refusal).count()
    if first is not None and known.own:
        pass_over(first)
    return lifted(result, ask(result, sources, mixed, _is_early(refusal)), known.name)


def whose_is(tensor: torch.Tensor, key: int) -> str:
    """Who has wrapped it: its "user", or who has "lent" it; "" if somebody has made it plain by
    now. No Python runs while that is found out."""
    if key in loans:
        return "lent"
    return "user" if tensor.__class__ is Tensor else ""


def wrap_again(tensors: list[Any], whose: list[str]) -> None:
    """End what `make_plain` has begun; to be repeated after an interrupt.

    whose: of each, what `whose_is` said before. Of one that was lent only if it still is: its
    lenders may be gone, and others may have begun something with it while it was plain. Who has
    taken a user's for a plain one, and lends it, is not to make it plain in the end.
    """
    for tensor, owner in zip(tensors, whose, strict=True):
        key = id(tensor)
        if owner == "user":
            tensor.__class__ = Tensor
            if key in loans:
                del loans[key]
        elif owner and key in loans:
            tensor.__class__ = Tensor
            if key not in loans and tensor.__class__ is Tensor:
                make_plain(tensor, "fuse")
        others_waited.clear()


def _has_target(known: Known, kwargs: Any) -> bool:
    """Whether a keyword says that, or where, the function writes."""
    for key in known.targets:
        value = kwargs.get(key)
        if value is not None and value is not False:
            return True
    return False


def has_others(items: Iterable[Any]) -> bool:
    """Whether one of these is of a class that may have a say about what wrapped tensors know."""
    others = [x for x in items if id(x.__class__) not in SIMPLE and x.__class__ is not Tensor]
    if not others:
        return False
    return any(isinstance(x, Plain) for x in others) or has_torch_function(others)


def _operators() -> dict[Handler, Handler]:
    """Python's operators by the methods that they call on a tensor.

    They ask another class first that is a subclass of a plain tensor's; of ours it is none.
    """
    found = {}
    names = {name for name in dir(Plain) if name.startswith("__")}
    for name, call in vars(operator).items():
        if name in names and call.__class__ is type(len):
            found[getattr(Plain, name)] = call if name.endswith("item__") else _asked(call)
        name = f"__r{name[2:]}"
        if name in names and name not in vars(operator):
            found[getattr(Plain, name)] = _asked(lambda x, y, call=call: call(y, x))
    return found


def _asked(call: Handler) -> Handler:
    """An operator as the method that Python has called, which says NotImplemented."""

    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except TypeError:  # as torch's methods do; Python then says what it tells its caller
            return NotImplemented

    return run


_OPERATORS = _operators()


def run_default(default: Handler, cls: type, func: Handler, types: Any, args: Any, kw: Any) -> Any:
    """`torch.Tensor.__torch_function__` of another class, for which wrapped tensors are plain."""
    others = tuple(kind for kind in types if kind is not Tensor)
    call = lambda *args, **kwargs: default(cls, func, others, args, kwargs)  # noqa: E731
    return run_any(func, known_of(func), args, kw, call)


def _is_apart(tensor: Tensor) -> bool:
    """Whether the value of `tensor` is beside it: C++ holds it, or the flush is not yet done."""
    return tensor._af.recorder is not None or isinstance(tensor._af, Held)


def released(value: Any, stood: dict[int, Tensor]) -> Any:
    """`value` with tensors whose values are beside them replaced by those.

    stood: takes what each of these, by id, stands for.
    """

    def release(tensor: Any) -> Any:
        real = beside(tensor) if tensor.__class__ is Tensor else None
        if real is None:
            return tensor
        stood[id(real)] = tensor
        return real

    if value.__class__ is tuple:  # arguments, most of which nobody looks into: 6 us less
        return tuple([
            x if id(x.__class__) in SIMPLE
            else release(x) if x.__class__ is Tensor else released(x, stood)
            for x in value
        ])  # fmt: skip
    return mapped(value, release)


def lifted(result: Any, told: Any = None, name: str = "") -> Any:
    """Wrap results that nobody else holds: the same objects, of the wrapped class.

    told: what `origins.ask` says of them; name: the op's, for who looks on where they stay plain.
    """
    if told is STAY:
        if hooks.flushing is not None:
            refusal_of(name, STAYS).count()
    elif result.__class__ is Plain:
        count = sys.getrefcount(result)
        # a torch.compile that has failed leaves a hook for frames, and debuggers have one: calls
        # then hold their arguments once more
        if (count <= _LIFT_COUNT or count <= _calibrate()) and _is_strided(result):
            result.__class__ = Tensor
            if told is not None:
                result.__dict__["_af"] = Tried(told)
    elif isinstance(result, (tuple, list)):  # the container's, the loop's and the call's reference
        for item in result:
            if (
                item.__class__ is Plain
                and sys.getrefcount(item) <= _LIFT_COUNT
                and _is_strided(item)
            ):
                item.__class__ = Tensor
                if told is not None:
                    item.__dict__["_af"] = Tried(told)
    return result


def _is_strided(tensor: torch.Tensor) -> bool:
    if not function_modes():
        return tensor.layout is torch.strided
    with NoModes():  # or they would be told
        return tensor.layout is torch.strided


def _calibrate() -> int:
    """The reference count that a fresh result shows inside `lifted` at most."""

    def probe(result: object) -> int:
        return sys.getrefcount(result)

    def call() -> int:
        result = object()
        return probe(result)

    return call()


_LIFT_COUNT = _calibrate()
