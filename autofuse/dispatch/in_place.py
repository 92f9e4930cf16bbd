"""In-place functions and methods: recorded where that can be, or else a write at once."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from torch import is_grad_enabled

from ..chain.claims import writing
from ..chain.meta import UNKNOWN, Meta, remember
from ..chain.refusal import Refusal, refusal_of
from ..chain.shell import Tensor
from ..chain.state import is_alone, this_thread
from ..ops.row import MAKING, Op
from ..record.flush import flush_thread
from ..record.in_place import record_inplace, record_sole
from ..record.writes import flush_readers, record_write
from ..torch_private import dispatch_modes, functions_off, looked_on
from .chosen import Choices, chosen_by
from .eager import OURS, Handler, Parameter, Plain, begin, run_eager
from .protocol import HOT
from .unrecorded import Known

_OPERANDS = set(map(id, (int, float, bool, Plain, Parameter)))  # classes, of ops in the table


def eager_alone(*args: Any, **kwargs: Any) -> None:
    """A chooser for what is not recorded."""


def write_chosen(chosen: Any, target: Any) -> bool | Refusal:
    """Record what was chosen as a write to `target`, if that can be: as `record_write`."""
    if chosen.__class__ is not tuple or id(target.__class__) not in OURS:
        return False
    if target._af.recorder is not None:
        return record_inplace(chosen[0], target, chosen[1])
    done = False if target.__class__ is not Tensor else record_sole(chosen[0], target, chosen[1])
    if done is not True:
        done = record_write(chosen[0], target, chosen[1]) or done
    return done


def in_place(choose: Handler, func: Handler, plain: Op | None = None) -> Handler:
    """The in-place form: recorded on a pending tensor, and with what is pending; else immediate.

    plain: the op that it is without options, if that is one and the same.
    """
    known = Known(func)
    known.refusal = refusal_of(known.name, "a write with nothing pending to fuse it with")

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if looked_on() or dispatch_modes():
            return run_eager(func, (self, *args), kwargs)
        settled = _is_concrete(self) if self.__class__ is Tensor else id(self.__class__) in OURS
        if settled:
            for x in args if not kwargs else (*args, *kwargs.values()):
                if id(x.__class__) not in _OPERANDS and not (
                    x.__class__ is Tensor and _is_concrete(x)
                ):
                    settled = False
                    break
        if not settled:
            return pending(self, *args, **kwargs)
        why = known.refusal
        if self.__class__ is Tensor:
            chosen = chosen_by(choose, (self, *args), kwargs)
            done = record_sole(chosen[0], self, chosen[1]) if chosen.__class__ is tuple else None
            if done is True:
                return self
            why = done or why
        return _write_now(func, known, why, self, args, kwargs)

    def pending(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        done = write_chosen(chosen_by(choose, (self, *args), kwargs), self)
        return self if done is True else run_eager(func, (self, *args), kwargs, done)

    arity = 0 if plain is None else len(plain.names)
    choices = None if choose is eager_alone or choose in MAKING else Choices(choose)
    HOT.append(("writing", call, (func, known, plain, arity, choices, pending)))
    return call


def _is_concrete(x: Tensor) -> bool:
    state = x._af
    return state.__class__ is Meta or state is UNKNOWN


def _write_now(
    func: Handler, known: Known, why: Refusal, target: Any, args: Any, kwargs: Any
) -> Any:
    """Run an in-place op of the table on concrete operands, at once, and say why."""
    if this_thread.current is None:
        begin((target, *args))
    ident = get_ident()
    nested = ident in writing
    try:
        writing[ident] = True  # as `announced`
        if not is_alone():
            flush_readers(target, known.name, others=True)
        flush_thread(known.name)
        with functions_off():
            result = func(target, *args, **kwargs)
        why.count()
    finally:
        if not nested:
            writing.pop(ident, None)
    if result is NotImplemented:
        return result
    if target.__class__ is Tensor and is_grad_enabled():  # it may require grad now
        remember(target, UNKNOWN)
    return target
