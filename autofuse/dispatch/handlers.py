"""Handlers: what an operator, a method or a torch function of the table does with its operands.

Everyday operators and methods are defined on the class and go straight to recording. Every spelling
of every row is found by name and gets a handler.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import cache, partial
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import is_autocast_enabled, is_grad_enabled

from ..chain.meta import UNKNOWN, concrete_meta, likely_meta
from ..chain.shell import Tensor
from ..chain.state import this_thread
from ..ops import arithmetic, operators
from ..ops import row as rows
from ..ops.autocast import COMPOSITES
from ..ops.row import MAKING, OPS, PENDING, RETURNING, Op, Several
from ..record.numbers import follows
from ..record.origins import keep
from ..record.record import record, record_fresh, relieve, slot_in
from ..record.writes import flush_readers, record_write
from ..torch_private import autocast_is_on, dispatch_modes, looked_on
from .chosen import Choices, chosen_by, recorded, without
from .eager import OURS, Handler, Parameter, Plain, has_others, run_eager, run_short
from .in_place import in_place
from .protocol import HANDLERS, HOT, OPTIONS
from .unrecorded import TARGETS, known_of

# --- recorded at once, generated per op: the hot path ---------------------------------------

_UNARY = """
def handler(self, /, *more, **options):
    if self.__class__ is Tensor and not more and not options:
        node = self._af
        recorder = node.recorder or this_thread.current
        chain = recorder.chain if recorder is not None else None  # before `ident`, as in `record`
        if chain is not None and recorder.ident == get_ident():
            tip = chain.tip
            first = node.index
            fresh = False
            if first < 0:
                first = slot_in(chain, self)
                if first is None:
                    recorder.reading = fresh = True  # before the look at what it is
                    node = self._af
                    first = node if node is not UNKNOWN else concrete_meta(self, tip)
            nxt = tip.next.get((OP, first))
            if nxt is not None and recorder.grad is is_grad_enabled() and recorder.autocast is (
                autocast_is_on() and is_autocast_enabled(recorder.device.type)
            ):
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
    return shell if shell.__class__ is Tensor else run_eager(FUNC, (self,), None, shell)
"""

_BINARY = """
def handler(self, other=REST, /, *more, **options):
    if self.__class__ is Tensor and not more and not options:
        node = self._af
        recorder = node.recorder or this_thread.current
        chain = recorder.chain if recorder is not None else None  # before `ident`, as in `record`
        if chain is not None and recorder.ident == get_ident():
            tip = chain.tip
            first = node.index
            fresh = late = None  # new Inputs
            if first < 0:
                first = slot_in(chain, self)
                if first is None:
                    recorder.reading = True  # before the look at what it is
                    node = self._af
                    first = node if node is not UNKNOWN else concrete_meta(self, tip)
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
                    second = slot_in(chain, other)
                    if second is None and other is not self:
                        recorder.reading = True
                        state = other._af
                        second = state if state is not UNKNOWN else concrete_meta(other, tip)
                        late = other
                elif state.recorder is not recorder:
                    second = None
            else:
                second = slot_in(chain, other)
                if second is None and (cls is Plain or cls is Parameter):
                    recorder.reading = True
                    second = likely_meta(other, tip)
                    late = other
            nxt = tip.next.get((OP, first, second))
            if nxt is not None and recorder.grad is is_grad_enabled() and recorder.autocast is (
                autocast_is_on() and is_autocast_enabled(recorder.device.type)
            ):
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
    return shell if shell.__class__ is Tensor else run_eager(FUNC, (self, other), None, shell)
"""


# what the handlers' text names
_NAMES = {
    "__name__": __name__,
    "Tensor": Tensor, "Plain": Plain, "Parameter": Parameter, "UNKNOWN": UNKNOWN,
    "this_thread": this_thread, "get_ident": get_ident, "is_grad_enabled": is_grad_enabled,
    "autocast_is_on": autocast_is_on, "is_autocast_enabled": is_autocast_enabled,
    "concrete_meta": concrete_meta, "likely_meta": likely_meta, "follows": follows,
    "record": record, "record_fresh": record_fresh, "relieve": relieve, "run_short": run_short,
    "run_eager": run_eager, "slot_in": slot_in,
}  # fmt: skip


@cache
def _handler_code(template: str) -> CodeType:
    """Compiled once for all ops: 0.5 ms each at import."""
    return compile(template, "<autofuse handler>", "exec")


def _generate(row: Op, func: Handler, rest: Handler | None = None) -> Handler:
    """A handler for `func`, which computes `row`.

    rest: what knows calls with other arguments than the operands, and wrong ones; or eager PyTorch.
    """
    space = {**_NAMES, "OP": row, "FUNC": func, "REST": rest or eagerly(func)}
    exec(_handler_code(_UNARY if len(row.names) == 1 else _BINARY), space)
    handler = space["handler"]
    handler.__name__ = getattr(func, "__name__", row.name)
    HOT.append(("handler", handler, (func, known_of(func), row, len(row.names))))
    return handler


def _spelled(choose: Handler, func: Handler, method: bool = False) -> Handler:
    """A handler for torch functions with options, which decide what is recorded.

    Functions may have `out` and `inplace`; methods, which torch's parser does not check, have not.
    """

    targets: set[str] = set() if method else TARGETS if _has_inplace(func) else {"out"}

    def named(*args: Any, **kwargs: Any) -> Any:
        """What is chosen where nothing is written by these keywords."""
        given = not method and kwargs.get("out") is not None
        return None if given else choose(*args, **without(targets, kwargs))

    if choose in MAKING:
        MAKING.add(named)
    rest, written = passing(func), in_place(named, func) if "inplace" in targets else None
    known = known_of(func)
    choices = None if known.writes or choose in MAKING else Choices(named)

    def spelled(*args: Any, **kwargs: Any) -> Any:
        options = kwargs
        if kwargs and not method:
            options = without(targets, kwargs)
            out = kwargs.get("out")
            if kwargs.get("inplace"):
                in_its_place = written if args and written is not None else rest
                return in_its_place(*args, **kwargs)
            if out is not None:
                if id(out.__class__) in OURS and out._af.recorder is None:
                    keep(out)
                    if out.__class__ is not Tensor:
                        flush_readers(out, func.__name__, others=True)
                    chosen = chosen_by(choose, args, options)
                    if chosen.__class__ is tuple:  # whether it casts differs from op to op
                        done = record_write(chosen[0], out, chosen[1], cast=False)
                        if done is not True:
                            return run_eager(func, args, kwargs, done)
                        known.to_out = True  # torch has found that it takes one
                        return out
                return run_eager(func, args, kwargs)
        chosen = chosen_by(choose, args, options)
        if chosen.__class__ is tuple:
            shell = record(*chosen)
            if isinstance(shell, Tensor):
                return shell
            if shell is not None:
                return run_eager(func, args, kwargs, shell)
        elif chosen.__class__ is Several:
            return recorded(chosen, partial(run_eager, func, args, kwargs))
        elif chosen is not None and not has_others((*args, *kwargs.values())):
            return chosen
        if choices is not None:
            choices.meet((*args, *kwargs.values()))
        return rest(*args, **kwargs)

    if choices is not None:
        HOT.append(("spelling", spelled, (func, known, choices, written)))
    return spelled


def _has_inplace(func: Handler) -> bool:
    """Whether it is a function in Python with such an option, which passes its tensor on to C."""
    return isinstance(func, FunctionType) and "inplace" in func.__code__.co_varnames


def _composite(compose: Handler, func: Handler) -> Handler:
    """A handler for functions that PyTorch makes of other ones; what it passes on runs eagerly."""

    rest, listed = passing(func), getattr(func, "__name__", "") in COMPOSITES
    if compose in PENDING:
        rest = _of_pending(PENDING[compose], func, rest)

    def call(*args: Any, **kwargs: Any) -> Any:
        others = has_others((*args, *kwargs.values()))
        cast = listed and autocast_is_on()
        result = None if others or cast else chosen_by(compose, args, kwargs)
        return rest(*args, **kwargs) if result is None else result

    known = known_of(func)
    if compose in RETURNING and known.in_c and not known.writes:
        HOT.append(("returning", call, (func, known)))
    return call


def _of_pending(row: Op, func: Handler, rest: Handler) -> Handler:
    """A handler for `func`, of a pending value; of others, or with options, what `rest` does."""

    def call(*args: Any, **kwargs: Any) -> Any:
        is_alone = len(args) == 1 and kwargs in ({}, {"memory_format": torch.contiguous_format})
        pending = is_alone and args[0].__class__ is Tensor and args[0]._af.recorder is not None
        if not pending or this_thread.closed or looked_on():
            return rest(*args, **kwargs)
        shell = record(row, args)
        return shell if isinstance(shell, Tensor) else run_eager(func, args, kwargs, shell)

    return call


def eagerly(func: Handler) -> Handler:
    """`func` as eager PyTorch; as a method, without `__torch_function__` in between (0.8 us)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return run_eager(func, args, kwargs)

    return functools.wraps(func)(call)


def passing(func: Handler) -> Handler:
    """A handler for `func`, which is not recorded."""
    handler, known = eagerly(func), known_of(func)
    if known.in_c and not known.writes:
        HOT.append(("passing", handler, (func, known)))
    elif known.lends:
        HOT.append(("running", handler, (func, known)))
    return handler


def altering(func: Handler, returns: bool = False) -> Handler:
    """A handler for what changes what is known of a tensor, which nothing may read meanwhile.

    returns: whether it returns the tensor.
    """
    handler = eagerly(func)
    HOT.append(("altering", handler, (func, known_of(func), returns)))
    return handler


def deleting(attribute: Any) -> Handler | None:
    """A handler for `del x.attribute`; of some torch looks at what is not there, and dies of it."""
    crashes = attribute.__name__ in ("real", "imag", "names")
    return None if crashes else passing(attribute.__delete__)


def _reflected(tensor_row: str, scalar_row: str | None, func: Handler) -> Handler:
    """`other <operator> self`; without a row for scalars, as `torch.Tensor` defines it."""
    forward = getattr(torch, tensor_row)
    scalar = None if scalar_row is None else _generate(OPS[scalar_row], func)

    def reflected(self: Any, /, *args: Any, **options: Any) -> Any:
        if not _is_operand(args, options):
            return run_eager(func, (self, *args), options)
        (other,) = args
        if id(other.__class__) in OURS:
            shell = record(OPS[tensor_row], (other, self))
            if isinstance(shell, Tensor):
                return shell
            return run_eager(forward, (other, self), None, shell)
        if looked_on():
            return run_eager(func, (self, other))
        if scalar is not None:
            return scalar(self, other)
        if this_thread.closed:
            return run_eager(func, (self, other))
        return self.reciprocal() * other

    number_row = None if scalar_row is None else OPS[scalar_row]
    of_tensors = forward, known_of(forward), OPS[tensor_row]
    HOT.append(("reflected", reflected, (*of_tensors, func, known_of(func), number_row)))
    return reflected


def _is_operand(args: Any, options: Any) -> bool:
    """Whether the arguments of an operator are one operand that its handler knows."""
    return (
        len(args) == 1
        and not options
        and (id(args[0].__class__) in OURS or isinstance(args[0], (int, float, complex)))
    )


def _rpow(self: Any, /, *args: Any, **options: Any) -> Any:
    if this_thread.closed or not _is_operand(args, options) or looked_on():
        return run_eager(Plain.__rpow__, (self, *args), options)
    return torch.pow(args[0], self)


def _plain_choice(row: Op) -> Handler:
    if len(row.names) == 1:
        return lambda self: (row, (self,))
    return lambda self, other: (row, (self, other))


def _rmatmul(self: Any, /, *args: Any, **options: Any) -> Any:
    """`other @ self`, which Python asks first where `other` is plain: 2 us; torch's own took 20."""
    known = not options and len(args) == 1 and id(args[0].__class__) in OURS
    if not known or dispatch_modes():  # which shall meet plain tensors
        return run_eager(Plain.__rmatmul__, (self, *args), options)
    if this_thread.closed or looked_on():
        return run_eager(Plain.__matmul__, (*args, self))  # which eager asks
    return torch.matmul(args[0], self)


HOT += ("turning", _rmatmul, (torch.matmul, False)), ("turning", _rpow, (torch.pow, True))
PLACES = (torch, F, torch._C._nn, torch.special, torch._C._VariableFunctions)


def install_ops() -> None:
    """Find every torch spelling of every row, and put a handler in its place."""
    choices = {name: _plain_choice(row) for name, row in rows.PLAIN.items()} | rows.SPELLINGS
    for name, choose in choices.items():
        _install(name, choose)
        _install(name + "_", choose, inplace=True)
    for name, compose in rows.COMPOSITES.items():
        for place, func in unhandled(name):
            handle(place, name, _composite(compose, func))
    for name, row in (operators.BINARY_OPERATORS | operators.UNARY_OPERATORS).items():
        handle(Plain, name, _generate(OPS[row], getattr(Plain, name)))
    for name, row in operators.SPELLED_OPERATORS.items():
        handle(Plain, name, _spelled(rows.SPELLINGS[row], getattr(Plain, name), method=True))
    for name, row in operators.INPLACE_OPERATORS.items():
        if hasattr(Plain, name):
            handle(Plain, name, in_place(choices[row], getattr(Plain, name), rows.PLAIN.get(row)))
    for name, dtype in operators.CAST_METHODS.items():
        choose = partial(_cast, dtype, arithmetic.CASTS[dtype])
        handle(Plain, name, _spelled(choose, getattr(Plain, name), method=True))
    for name, (tensor_row, scalar_row) in operators.REFLECTED_OPERATORS.items():
        handle(Plain, name, _reflected(tensor_row, scalar_row, getattr(Plain, name)))
    handle(Plain, "__rpow__", _rpow)
    handle(Plain, "__rmatmul__", _rmatmul)


def _install(name: str, choose: Handler, inplace: bool = False) -> None:
    """Handlers for the functions and the method called `name`."""
    plain = rows.PLAIN.get(name.removesuffix("_") if inplace else name)
    for place, func in unhandled(name):
        if place is Plain:
            choose = rows.METHODS.get(name.rstrip("_"), choose)
        if inplace:
            handle(place, name, in_place(choose, func, plain))
            continue
        options = _spelled(choose, func, method=place is Plain)
        handler = options if plain is None else _generate(plain, func, options)
        handle(place, name, handler, options)


def unhandled(name: str) -> Iterator[tuple[Any, Handler]]:
    """Functions of torch called `name`, and the method, that have no handler, by their places."""
    for place in (*PLACES, Plain):
        func = getattr(place, name, None)
        if callable(func) and func not in HANDLERS and (place is F or name not in rows.FUNCTIONAL):
            yield place, func


def handle(place: Any, name: str, handler: Handler, options: Handler | None = None) -> None:
    """Have `handler` called in place of `place.name`; with keywords `options`, if given."""
    func = getattr(place, name)
    HANDLERS[func], OPTIONS[func] = handler, options or handler
    if place is Plain:
        setattr(Tensor, name, handler)


def _cast(dtype: torch.dtype, row: Op, input: torch.Tensor) -> Any:
    """The chooser of a method that casts: itself where it is of that dtype."""
    return input if input.dtype is dtype else (row, (input,))
