"""Dispatch: what happens when torch or Python uses a wrapped tensor.

Everyday operators and methods are defined on the class and go straight to recording;
`__torch_function__` serves `torch.*`; `__torch_dispatch__` is the net below for what reaches a
pending shell in C++. An op that is not in the table runs on plain tensors, and what it returns
is wrapped again, so that the next chain is seen.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from threading import get_ident
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import is_grad_enabled

from ..chain.shell import (
    UNKNOWN,
    Held,
    Lost,
    Meta,
    NoTorchFunction,
    Tensor,
    concrete_meta,
    likely_meta,
    plain_meta,
)
from ..chain.trie import record_again
from ..errors import LostGradientError
from ..ops import arithmetic as ops
from ..ops import row as op
from ..ops.row import OPS, Op
from ..record.chain import (
    _local,
    announced,
    beside,
    counts,
    flush,
    flush_all,
    flush_readers,
    flush_tensor,
    flush_thread,
    follows,
    is_alone,
    pass_over,
    pending_version,
    record,
    record_fresh,
    record_inplace,
    record_write,
    relieve,
    writing,
)
from ..torch_private import peek
from .unrecorded import FEEDS, IN_C, Known, known_of

_Plain = torch.Tensor
_Parameter = torch.nn.Parameter
_set = _Plain.__setattr__
Handler = Callable[..., Any]

HANDLERS: dict[Any, Handler] = {}  # torch function -> what to call instead, arguments by position
OPTIONS: dict[Any, Handler] = {}  # the same for calls with keywords
# (function of `native`, the one here that it stands for, what it is given of that)
HOT: list[tuple[str, Handler, tuple[Any, ...]]] = []


# --- ops that autofuse does not record ------------------------------------------------------


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Wrapped tensors among arguments, inside the containers that torch functions take.

    One by one: who asks for the holders of a value would find a list of them.
    """
    for item in values:
        if item.__class__ is Tensor:
            yield item
        elif isinstance(item, (tuple, list)):
            yield from _tensors(item)
        elif isinstance(item, dict):
            yield from _tensors(item.values())


def _flat(values: Iterable[Any]) -> list[Any]:
    """Everything in arguments, in one list."""
    flat = []
    for item in values:
        if item.__class__ in SIMPLE or item.__class__ is Tensor:
            flat.append(item)
        elif isinstance(item, (tuple, list)):
            flat += _flat(item)
        elif isinstance(item, dict):
            flat += _flat(item.values())
        else:
            flat.append(item)
    return flat


SIMPLE = {int, float, bool, str, slice, type(None), type(...), torch.dtype, torch.device, _Plain,
           torch.nn.Parameter}  # fmt: skip
_OPERANDS = {int, float, bool, _Plain, torch.nn.Parameter}  # of ops in the table
_OURS = (Tensor, _Plain, _Parameter)  # classes of tensors that autofuse reads and writes
_TARGETS = {"out", "inplace"}  # keywords by which a function may write
_SIZES = {tuple, list, torch.Size}


def run_eager(func: Handler, args: Any, kwargs: Any = None) -> Any:
    """Run `func` as eager PyTorch on plain tensors, and wrap what it returns.

    Pending arguments become concrete. A Python function finds every wrapped argument to be an
    ordinary `torch.Tensor`, the same object, so that it meets nothing it does not know.
    """
    known = known_of(func)
    if known.writes or not known.in_c or (kwargs and not kwargs.keys().isdisjoint(_TARGETS)):
        return _run_any(func, known, args, kwargs)
    recorder, first = _local.current, None
    if recorder is not None and recorder.chain.tip.holds_grad:
        first = _keep_order(recorder, _flat((*args, *kwargs.values()) if kwargs else args))
    # --- hot path: the everyday op between two chains, budget 1 us ---
    for x in (*args, *kwargs.values()) if kwargs else args:
        if x.__class__ is Tensor:
            state = x._af
            if state.recorder is not None:
                flush(state.recorder, known.name)
                if x._af.recorder is not None:  # in the middle of the flush that makes it
                    return _run_any(func, known, args, kwargs)
            elif state.__class__ is not Meta and state is not UNKNOWN:
                return _run_any(func, known, args, kwargs)
        elif x.__class__ not in SIMPLE and not (
            x.__class__ in _SIZES and (not x or x[0].__class__ is int or _are_settled(x, known))
        ):
            return _run_any(func, known, args, kwargs)
    counts.eager[known.reason] += 1
    with NoTorchFunction():
        result = func(*args, **kwargs) if kwargs else func(*args)
    if first is not None:
        pass_over(first)
    if known.feeds:
        return _fed(result, known)
    return _lifted_split(result) if known.splits else _lifted(result)


def _are_settled(items: Any, known: Known) -> bool:
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
        elif x.__class__ not in SIMPLE:
            return False
    return True


def _fed(result: Any, known: Known) -> Any:
    """Wrap a fresh result that usually begins a chain."""
    if result.__class__ is _Plain:
        meta = likely_meta(result, known)
        result.__class__ = Tensor
        if meta is not None:
            result.__dict__["_af"] = meta
    return result


def run_short(func: Handler, node: Any, *operands: Any) -> Any:
    """Run an op of the table, on concrete operands, that the trie has found better off eager."""
    counts.eager[node.counted] += 1
    node.recorder.reading = False
    node.skips += 1
    if node.skips > 100 and node.returns is not None:
        record_again(node)
    with NoTorchFunction():
        result = func(*operands)
    result.__class__ = Tensor
    if node.meta is not None:
        result.__dict__["_af"] = node.meta
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
            flush(recorder, "order of gradients")
            return None
    return chain.first if peek() == chain.first + len(chain) else None


def _run_any(
    func: Handler, known: Known, args: Any, kwargs: Any, call: Handler | None = None
) -> Any:
    """`run_eager` for nested arguments, keywords, Python functions, other classes and writes.

    call: what to call with plain tensors in place of `func`.
    """
    name = known.name
    writes = known.writes or (kwargs and (kwargs.get("out") is not None or kwargs.get("inplace")))
    if writes and get_ident() not in writing:
        return announced(_run_any, func, known, args, kwargs)
    recorder = _local.current
    items = _flat((*args, *kwargs.values()) if kwargs else args)
    first = None
    if recorder is not None and recorder.chain.tip.holds_grad:
        first = _keep_order(recorder, items)
    others = _has_others(items)
    if others and func in _OPERATORS and args[0].__class__ is Tensor:
        call = _OPERATORS[func]
    in_c = known.in_c and call is None and not others
    wrapped = [item for item in items if item.__class__ is Tensor]
    del items  # who empties a list that it is given wants the memory
    for tensor in wrapped:
        if tensor._af.recorder is not None or isinstance(tensor._af, (Held, Lost)):
            flush_tensor(tensor, name)
    if writes:
        flush_thread(name) if is_alone() else flush_all(name)
        for tensor in wrapped:
            if not _is_apart(tensor):
                _set(tensor, "_af", UNKNOWN)
    if any(map(_is_apart, wrapped)):
        stood: dict[int, Tensor] = {}
        args, kwargs = _released(args, stood), _released(kwargs or {}, stood)
        return _handed_back(run_eager(func, args, kwargs), stood)
    if name in _COPIES:
        for tensor in wrapped:
            tensor.__dict__.pop("_af", None)  # what a copy takes along is the user's alone
    counts.eager[known.reason] += 1
    if in_c:
        with NoTorchFunction():
            result = func(*args, **kwargs) if kwargs else func(*args)
        if first is not None:
            pass_over(first)
        return _lifted(result)
    for tensor in wrapped:
        tensor.__dict__.pop("_af", None)  # it may have other contents afterwards
        _set(tensor, "__class__", _Plain)
    try:
        result = (call or func)(*args, **kwargs or {})
    finally:
        for tensor in wrapped:
            tensor.__class__ = Tensor
    if first is not None and known.own:
        pass_over(first)
    return _lifted(result)


def _has_others(items: Iterable[Any]) -> bool:
    """Whether one of these is of a class that may have a say about what wrapped tensors know."""
    others = [x for x in items if x.__class__ not in SIMPLE and x.__class__ is not Tensor]
    return any(isinstance(x, _Plain) for x in others) or _has_torch_function(others)


_has_torch_function = torch._C._has_torch_function


def _operators() -> dict[Handler, Handler]:
    """Python's operators by the methods that they call on a tensor.

    They ask another class first that is a subclass of a plain tensor's; of ours it is none.
    """
    found = {}
    names = {name for name in dir(_Plain) if name.startswith("__")}
    for name, call in vars(operator).items():
        if name in names and call.__class__ is type(len):
            found[getattr(_Plain, name)] = call if name.endswith("item__") else _asked(call)
        name = f"__r{name[2:]}"
        if name in names and name not in vars(operator):
            found[getattr(_Plain, name)] = _asked(lambda x, y, call=call: call(y, x))
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
    return _run_any(func, known_of(func), args, kw, call)


_COPIES = {"__reduce_ex__", "__deepcopy__", "__setstate__"}


def _is_apart(tensor: Tensor) -> bool:
    """Whether the value of `tensor` is beside it: C++ holds it, or the flush is not yet done."""
    return tensor._af.recorder is not None or isinstance(tensor._af, Held)


def _released(value: Any, stood: dict[int, Tensor]) -> Any:
    """`value` with tensors whose values are beside them replaced by those.

    stood: takes what each of these, by id, stands for.
    """
    if value.__class__ is Tensor:
        real = beside(value)
        if real is None:
            return value
        stood[id(real)] = value
        return real
    if value.__class__ in (tuple, list):
        return value.__class__([_released(item, stood) for item in value])
    if value.__class__ is dict:
        return {key: _released(item, stood) for key, item in value.items()}
    return value


def _handed_back(result: Any, stood: dict[int, Tensor]) -> Any:
    """The result of a function that returns an argument, such as an in-place one."""
    return stood.get(id(result), result)


def _lifted(result: Any) -> Any:
    """Wrap results that nobody else holds: the same objects, of the wrapped class."""
    if result.__class__ is _Plain:
        if sys.getrefcount(result) <= _LIFT_COUNT and result.layout is torch.strided:
            result.__class__ = Tensor
    elif isinstance(result, (tuple, list)):  # the container's, the loop's and the call's reference
        for item in result:
            if item.__class__ is _Plain and sys.getrefcount(item) <= _LIFT_COUNT:
                item.__class__ = Tensor
    return result


def _lifted_split(views: Any) -> Any:
    """`_lifted` for the views of one tensor, which mostly have one Meta."""
    meta, shape, stride = None, None, None
    for view in views:
        if view.__class__ is _Plain:
            if view.shape != shape or view.stride() != stride:  # 0.3 us against 1 us for a Meta
                meta, shape, stride = plain_meta(view), view.shape, view.stride()
            view.__class__ = Tensor
            if meta is not None:
                view.__dict__["_af"] = meta
    return views


def _calibrate() -> int:
    """The reference count that a fresh result shows inside `_lifted` at most."""

    def probe(result: object) -> int:
        return sys.getrefcount(result)

    def call() -> int:
        result = object()
        return probe(result)

    return call()


_LIFT_COUNT = _calibrate()


# --- __torch_function__ and __torch_dispatch__ -----------------------------------------------


def _torch_function(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if types != _ONLY and not all(cls in _OURS for cls in types):
        return _run_any(func, known_of(func), args, kwargs)  # another class has a say
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


def ask_overrides(public_api: Handler, relevant_args: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.overrides.handle_torch_function`, which torch's functions in Python call.

    3 us less where no other class and no mode has a say. Another class is asked as if wrapped
    tensors were plain ones.
    """
    if not _function_modes():
        for x in relevant_args:
            if x.__class__ not in _OURS and x is not None:  # an option that was not given
                break
        else:
            return _torch_function(public_api, _ONLY, args, kwargs)
        if any(x.__class__ is Tensor for x in relevant_args):
            return _run_any(public_api, known_of(public_api), args, kwargs)
    return _ask_overrides(public_api, relevant_args, *args, **kwargs)


_ask_overrides = torch.overrides.handle_torch_function
_function_modes = torch._C._len_torch_function_stack
_ONLY = (Tensor,)


# no gradient leads through these
_CONSTANT = {"detach", "_local_scalar_dense", "eq", "ne", "lt", "le", "gt", "ge", "equal"}


def _torch_dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A pending shell reached C++ below `__torch_function__`: compute it and go on."""
    args, kwargs = list(args), dict(kwargs or {})
    name = func.overloadpacket.__name__
    for tensor in _tensors((*args, *kwargs.values())):
        if tensor._af.recorder is not None:
            if tensor._af.meta.requires_grad and is_grad_enabled() and name not in _CONSTANT:
                raise LostGradientError(
                    f"C++ code calls {name} on a pending tensor that requires grad; call "
                    "autofuse.materialize(tensor) before handing it over"
                )
            flush_tensor(tensor, "C++")
    if func._schema.is_mutable:
        flush_thread("C++")
    counts.eager[name, "called from C++"] += 1
    with NoTorchFunction():
        return func(*_released(args, {}), **_released(kwargs, {}))


# torch asks whose method it is; an AttributeError that it has to clear costs 0.6 us per op
_torch_function.__self__ = None  # type: ignore[attr-defined]
Tensor.__torch_function__ = staticmethod(_torch_function)  # type: ignore[assignment]
Tensor.__torch_dispatch__ = staticmethod(_torch_dispatch)  # type: ignore[assignment]


# the names that the handlers' text uses besides those above
_HANDLER_NAMES = (
    _local,
    concrete_meta,
    follows,
    get_ident,
    is_grad_enabled,
    likely_meta,
    record_fresh,
    relieve,
)

# --- recording handlers, generated per op: the hot path ---------------------------------------

_UNARY = """
def handler(self, /, *more, **options):
    if self.__class__ is Tensor and not more and not options:
        node = self._af
        recorder = node.recorder or _local.current
        chain = recorder.chain if recorder is not None else None  # before `ident`, as in `record`
        if chain is not None and recorder.ident == get_ident():
            tip = chain.tip
            first = node.index
            fresh = False
            if first < 0:
                first = chain.slots.get(id(self))
                if first is None:
                    recorder.reading = fresh = True  # before the look at what it is
                    node = self._af
                    first = node if node is not UNKNOWN else concrete_meta(self)
            nxt = tip.next.get((OP, first))
            if nxt is not None and recorder.grad is is_grad_enabled():
                shell = nxt.shell
                if shell is not None and (not nxt.holds_grad or follows(chain)):
                    if fresh:
                        if record_fresh(recorder, chain, tip, nxt, shell, (self,), (first,), ()):
                            if chain.pinned > nxt.pinned_limit:
                                relieve(recorder, chain)
                            return shell
                    elif recorder.chain is chain and chain.tip is tip:
                        # no Python runs from here...
                        chain.tip = nxt
                        chain.append(shell)
                        # ...to here
                        return shell
                elif nxt.reason and not chain:
                    return run_short(FUNC, nxt, self)
    if more or options:
        return REST(self, *more, **options)
    shell = record(OP, (self,))
    return run_eager(FUNC, (self,)) if shell is None else shell
"""

_BINARY = """
def handler(self, other=REST, /, *more, **options):
    if self.__class__ is Tensor and not more and not options:
        node = self._af
        recorder = node.recorder or _local.current
        chain = recorder.chain if recorder is not None else None  # before `ident`, as in `record`
        if chain is not None and recorder.ident == get_ident():
            tip = chain.tip
            first = node.index
            fresh = late = None  # new Inputs
            if first < 0:
                first = chain.slots.get(id(self))
                if first is None:
                    recorder.reading = True  # before the look at what it is
                    node = self._af
                    first = node if node is not UNKNOWN else concrete_meta(self)
                    fresh = self
            cls = other.__class__
            consts = ()
            if cls is float:
                second = float
                consts = (other,)
            elif cls is Tensor:
                state = other._af
                second = state.index
                if second < 0:
                    second = chain.slots.get(id(other))
                    if second is None and other is not self:
                        recorder.reading = True
                        state = other._af
                        second = state if state is not UNKNOWN else concrete_meta(other)
                        late = other
                elif state.recorder is not recorder:
                    second = None
            else:
                second = chain.slots.get(id(other))
                if second is None and (cls is _Plain or cls is _Parameter):
                    recorder.reading = True
                    second = likely_meta(other, tip)
                    late = other
            nxt = tip.next.get((OP, first, second))
            if nxt is not None and recorder.grad is is_grad_enabled():
                shell = nxt.shell
                if shell is not None and (not nxt.holds_grad or follows(chain)):
                    if fresh is late is None:
                        if recorder.chain is chain and chain.tip is tip:
                            # no Python runs from here...
                            chain.consts += consts
                            chain.tip = nxt
                            chain.append(shell)
                            # ...to here
                            return shell
                    else:
                        if fresh is None:
                            xs, metas = (other,), (second,)
                        elif late is None:
                            xs, metas = (self,), (first,)
                        else:
                            xs, metas = (self, other), (first, second)
                        if record_fresh(recorder, chain, tip, nxt, shell, xs, metas, consts):
                            if chain.pinned > nxt.pinned_limit:
                                relieve(recorder, chain)
                            return shell
                elif nxt.reason and not chain:
                    return run_short(FUNC, nxt, self, other)
    if more or options or other is REST:
        return REST(self, *((other, *more) if other is not REST else more), **options)
    shell = record(OP, (self, other))
    return run_eager(FUNC, (self, other)) if shell is None else shell
"""


@cache
def _handler_code(template: str) -> CodeType:
    """Compiled once for all ops: 0.5 ms each at import."""
    return compile(template, "<autofuse handler>", "exec")


def _generate(template: str, row: Op, func: Handler, rest: Handler | None = None) -> Handler:
    """A handler for `func`, which computes `row`.

    rest: what knows calls with other arguments than the operands, and wrong ones; or eager PyTorch.
    """
    space = dict(globals(), OP=row, FUNC=func, REST=rest or _eager(func))
    exec(_handler_code(template), space)
    handler = space["handler"]
    handler.__name__ = getattr(func, "__name__", row.name)
    HOT.append(("handler", handler, (row, len(row.names), func)))
    return handler


# what choosers run into with arguments that they do not know
_UNKNOWN_ARGUMENTS = (TypeError, AttributeError, IndexError, ValueError, OverflowError)


def _chosen(choose: Handler, args: Any, kwargs: Any) -> Any:
    """What a chooser or a composite makes of a call; None where torch decides."""
    try:
        return choose(*args, **kwargs)
    except _UNKNOWN_ARGUMENTS:
        return None


def _spelled(choose: Handler, func: Handler, method: bool = False) -> Handler:
    """A handler for torch functions with options, which decide what is recorded.

    Functions may have `out` and `inplace`; methods, which torch's parser does not check, have not.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        options = kwargs
        if kwargs and not method:
            options = {key: value for key, value in kwargs.items() if key not in _TARGETS}
            out = kwargs.get("out")
            if kwargs.get("inplace"):
                if args and _write(_chosen(choose, args, options), args[0]):
                    return args[0]
                return run_eager(func, args, kwargs)
            if out is not None:
                if out.__class__ in _OURS and out._af.recorder is None:
                    if out.__class__ is not Tensor:
                        flush_readers(out, func.__name__, others=True)
                    chosen = _chosen(choose, args, options)
                    if chosen.__class__ is tuple:  # whether it casts differs from op to op
                        if record_write(chosen[0], out, chosen[1], cast=False):
                            return out
                return run_eager(func, args, kwargs)
        chosen = _chosen(choose, args, options)
        if chosen.__class__ is tuple:
            shell = record(*chosen)
            if shell is not None:
                return shell
        elif chosen is not None and not _has_others((*args, *kwargs.values())):
            return chosen
        return run_eager(func, args, kwargs)

    return call


def _write(chosen: Any, target: Any) -> bool:
    """Record what was chosen as a write to `target`, if that can be."""
    if chosen.__class__ is not tuple or target.__class__ not in _OURS:
        return False
    put = record_write if target._af.recorder is None else record_inplace
    return put(chosen[0], target, chosen[1])


def _composite(compose: Handler, func: Handler) -> Handler:
    """A handler for functions that PyTorch makes of other ones; what it passes on runs eagerly."""

    def call(*args: Any, **kwargs: Any) -> Any:
        others = _has_others((*args, *kwargs.values()))
        result = None if others else _chosen(compose, args, kwargs)
        return run_eager(func, args, kwargs) if result is None else result

    return call


def _inplace(choose: Handler, func: Handler, plain: Op | None = None) -> Handler:
    """The in-place form: recorded on a pending tensor, and with what is pending; else immediate.

    plain: the op that it is without options, if that is one and the same.
    """
    known = Known(func)
    known.reason = (known.name, "a write with nothing pending to fuse it with")

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        settled = _is_settled(self) if self.__class__ is Tensor else self.__class__ in _OURS
        if settled:
            for x in args if not kwargs else (*args, *kwargs.values()):
                if x.__class__ not in _OPERANDS and not (x.__class__ is Tensor and _is_settled(x)):
                    settled = False
                    break
        if settled:
            return _write_now(func, known, self, args, kwargs)
        return pending(self, *args, **kwargs)

    def pending(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if _write(_chosen(choose, (self, *args), kwargs), self):
            return self
        return run_eager(func, (self, *args), kwargs)

    arity = 0 if plain is None else len(plain.names)
    HOT.append(("writing", call, (func, known, plain, arity, pending)))
    return call


def _is_settled(x: Tensor) -> bool:
    state = x._af
    return state.__class__ is Meta or state is UNKNOWN


def _write_now(func: Handler, known: Known, target: Any, args: Any, kwargs: Any) -> Any:
    """Run an in-place op of the table on concrete operands, at once."""
    ident = get_ident()
    nested = ident in writing
    try:
        writing[ident] = True  # as `announced`
        if not is_alone():
            flush_readers(target, known.name, others=True)
        flush_thread(known.name)
        counts.eager[known.reason] += 1
        with NoTorchFunction():
            result = func(target, *args, **kwargs)
    finally:
        if not nested:
            writing.pop(ident, None)
    if result is NotImplemented:
        return result
    if target.__class__ is Tensor and is_grad_enabled():  # it may require grad now
        target.__dict__["_af"] = UNKNOWN
    return target


def _eager(func: Handler) -> Handler:
    """`func` as eager PyTorch; as a method, without `__torch_function__` in between (0.8 us)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return run_eager(func, args, kwargs)

    return functools.wraps(func)(call)


def _reflected(tensor_row: str, scalar_row: str | None, func: Handler) -> Handler:
    """`other <operator> self`; without a row for scalars, as `torch.Tensor` defines it."""
    forward = getattr(torch, tensor_row)
    scalar = None if scalar_row is None else _generate(_BINARY, OPS[scalar_row], func)

    def reflected(self: Any, /, *args: Any, **options: Any) -> Any:
        if not _is_operand(args, options):
            return run_eager(func, (self, *args), options)
        (other,) = args
        if other.__class__ in _OURS:
            shell = record(OPS[tensor_row], (other, self))
            return run_eager(forward, (other, self)) if shell is None else shell
        if scalar is not None:
            return scalar(self, other)
        return self.reciprocal() * other

    return reflected


def _is_operand(args: Any, options: Any) -> bool:
    """Whether the arguments of an operator are one operand that its handler knows."""
    return (
        len(args) == 1
        and not options
        and (args[0].__class__ in _OURS or isinstance(args[0], (int, float, complex)))
    )


def _rpow(self: Any, /, *args: Any, **options: Any) -> Any:
    if not _is_operand(args, options):
        return run_eager(_Plain.__rpow__, (self, *args), options)
    return torch.pow(args[0], self)


def _plain_choice(row: Op) -> Handler:
    if len(row.names) == 1:
        return lambda self: (row, (self,))
    return lambda self, other: (row, (self, other))


_PLACES = (torch, F, torch._C._nn, torch.special, torch._C._VariableFunctions)


def _install_ops() -> None:
    """Find every torch spelling of every row, and put a handler in its place."""
    choices = {name: _plain_choice(row) for name, row in op.PLAIN.items()} | op.SPELLINGS
    for name, choose in choices.items():
        _install(name, choose)
        _install(name + "_", choose, inplace=True)
    for name, compose in op.COMPOSITES.items():
        for place in (*_PLACES, _Plain):
            func = getattr(place, name, None)
            if callable(func) and func not in HANDLERS:
                HANDLERS[func] = OPTIONS[func] = handler = _composite(compose, func)
                if place is _Plain:
                    setattr(Tensor, name, handler)
    for table in (ops.BINARY_OPERATORS, ops.UNARY_OPERATORS):
        for name, row in table.items():
            template = _UNARY if len(OPS[row].names) == 1 else _BINARY
            _override(name, _generate(template, OPS[row], getattr(_Plain, name)))
    for name, row in ops.SPELLED_OPERATORS.items():
        _override(name, _spelled(op.SPELLINGS[row], getattr(_Plain, name), method=True))
    for name, row in ops.INPLACE_OPERATORS.items():
        if hasattr(_Plain, name):
            _override(name, _inplace(choices[row], getattr(_Plain, name), op.PLAIN.get(row)))
    for name, dtype in ops.CAST_METHODS.items():
        _override(name, _cast(dtype, getattr(_Plain, name)))
    for name, (tensor_row, scalar_row) in ops.REFLECTED_OPERATORS.items():
        _override(name, _reflected(tensor_row, scalar_row, getattr(_Plain, name)))
    _override("__rpow__", _rpow)
    _override("__hash__", _Plain.__hash__)


def _install(name: str, choose: Handler, inplace: bool = False) -> None:
    """Handlers for the functions and the method called `name`."""
    plain = op.PLAIN.get(name.removesuffix("_") if inplace else name)
    for place in (*_PLACES, _Plain):
        func = getattr(place, name, None)
        if not callable(func) or func in HANDLERS:
            continue
        choose = op.METHODS.get(name.rstrip("_"), choose) if place is _Plain else choose
        with_options = (
            _inplace(choose, func, plain) if inplace else _spelled(choose, func, place is _Plain)
        )
        handler = with_options
        if plain is not None and not inplace:
            template = _UNARY if len(plain.names) == 1 else _BINARY
            handler = _generate(template, plain, func, with_options)
        HANDLERS[func], OPTIONS[func] = handler, with_options
        if place is _Plain:
            setattr(Tensor, name, handler)


def _override(name: str, handler: Handler) -> None:
    func = getattr(_Plain, name)
    HANDLERS[func] = OPTIONS[func] = handler
    setattr(Tensor, name, handler)


def _cast(dtype: torch.dtype, func: Handler) -> Handler:
    row = ops.CASTS[dtype]

    def cast(self: Any, /, *args: Any, **options: Any) -> Any:
        if args or options:
            return run_eager(func, (self, *args), options)
        if self.__class__ is not Tensor or self.dtype is dtype:
            return self
        shell = record(row, (self,))
        return run_eager(func, (self,)) if shell is None else shell

    return cast


# --- metadata: answered by the shell itself, nothing runs -----------------------------------------

_PROPERTIES = (
    "shape dtype device layout ndim requires_grad is_leaf is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_nested is_mkldnn is_xpu is_mps is_sparse_csr itemsize nbytes names output_nr"
).split()
_METHODS = (
    "size stride dim numel nelement ndimension storage_offset is_contiguous element_size "
    "is_floating_point is_complex is_signed is_conj is_neg is_inference get_device dim_order "
    "is_same_size __len__"
).split()


def _install_metadata() -> None:
    for name in _PROPERTIES:
        base = getattr(_Plain, name, None)
        if base is None:
            continue
        getter = base.__get__
        setter = getattr(base, "__set__", None)

        def get(self: Any, getter: Handler = getter) -> Any:
            with NoTorchFunction():
                return getter(self)

        def set_(self: Any, value: Any, setter: Any = setter) -> None:
            run_eager(setter, (self, value))

        read = _from_meta(name, get) if name in ("dtype", "device") else get
        HANDLERS[getter] = read  # type: ignore[index]
        setattr(Tensor, name, property(read, set_ if setter is not None else None))
    for name in _METHODS:
        base = getattr(_Plain, name, None)
        if base is None:
            continue

        def method(self: Any, /, *args: Any, base: Handler = base, **kwargs: Any) -> Any:
            with NoTorchFunction():
                return base(self, *args, **kwargs)

        _override(name, method)
    for place_name in ("is_floating_point", "is_complex", "numel", "is_signed"):
        func = getattr(torch, place_name)
        HANDLERS[func] = OPTIONS[func] = getattr(Tensor, place_name)
    for name in ("requires_grad", "is_leaf"):
        base = Tensor.__dict__[name]
        pending = _pending_grad(name == "is_leaf", base.fget)
        setattr(Tensor, name, property(pending, base.fset))
        HANDLERS[getattr(_Plain, name).__get__] = pending
    Tensor._version = property(pending_version)  # type: ignore[assignment]
    HANDLERS[_Plain._version.__get__] = pending_version  # type: ignore[attr-defined]


def _from_meta(name: str, getter: Handler) -> Handler:
    """An attribute as the Meta has it: 0.2 us instead of 0.6; choosers ask for some."""
    read = operator.attrgetter(name)

    def get(self: Any) -> Any:
        state = self._af
        if state.__class__ is Meta:
            return read(state)
        return getter(self) if state.recorder is None else read(state.meta)

    return get


def _pending_grad(leaf: bool, concrete: Handler) -> Handler:
    """`requires_grad` or `is_leaf`: a shell's own answer would be that of a plain constant."""

    def get(self: Any) -> bool:
        state = self._af
        if state.recorder is not None and state.meta.requires_grad:
            return not leaf
        return concrete(self)

    return get


def _install_methods() -> None:
    """Every other C method of a tensor."""
    for place in (*_PLACES, _Plain):
        for name in FEEDS:
            func = getattr(place, name, None)
            if func is not None and func not in HANDLERS:
                HANDLERS[func] = call = _eager(func)
                HOT.append(("feeding", call, (func, known_of(func), _fed)))
                if place is _Plain:
                    setattr(Tensor, name, call)
    for name in dir(torch._C.TensorBase):
        func = getattr(_Plain, name)
        if name in ("__getitem__", "__matmul__", "__rmatmul__") or not name.startswith("_"):
            if func.__class__ in IN_C and name not in Tensor.__dict__:
                setattr(Tensor, name, _eager(func))
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


_install_ops()
_install_metadata()
_install_methods()
