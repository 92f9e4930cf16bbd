"""Handlers of recorded ops that are not pointwise, and so no rows of the table.

These are reductions, views and joins.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..chain.meta import Meta
from ..chain.shell import Tensor
from ..chain.state import Node, this_thread
from ..chain.verified import wanted
from ..dtypes import EXACT
from ..ops.reductions import REDUCTIONS, ROW_COMPOSITES
from ..ops.row import METHODS
from ..ops.views import JOINS, VIEWS
from ..record.joins import record_join
from ..record.policy import takes_classes
from ..record.record import record
from ..record.views import record_view
from ..torch_private import looked_on
from .chosen import Choices, chosen_by
from .eager import Handler, run_eager
from .handlers import handle, passing, unhandled
from .protocol import HANDLERS, HOT
from .unrecorded import known_of

# torch functions and methods of the table; those here run mostly at once, and where a function in
# Python stands before one, `record.origins` finds its call at another instruction
RECORDING: list[Handler] = []


def install_shapes() -> None:
    """Put handlers in the place of these ops, once those of the table are there."""
    RECORDING.extend(HANDLERS)
    for name, choose in REDUCTIONS.items():
        for place, func in (*unhandled(name), *_of_linalg(name)):
            if place is torch._C._VariableFunctions and getattr(torch, name) is not func:
                continue  # a function in Python stands for it, whose node is another op's
            of_place = METHODS.get(name, choose) if place is torch.Tensor else choose
            handle(place, name, reducing(of_place, func))
    for name, compose in ROW_COMPOSITES.items():
        for place, func in unhandled(name):
            made = _of_classes(compose) if name == "cross_entropy" else compose
            handle(place, name, _row_composite(made, func))
    for name in VIEWS:
        for place, func in unhandled(name):
            handle(place, name, viewing(name, func))
    for place, func in unhandled("repeat_interleave"):
        handle(place, "repeat_interleave", _interleaving(func))
    for name in JOINS:
        for place, func in unhandled(name):
            handle(place, name, joining(name, func))


def _of_linalg(name: str) -> list[tuple[Any, Handler]]:
    func = getattr(torch._C._linalg, name, None)
    return [] if func is None else [(torch._C._linalg, func)]


def _row_composite(compose: Handler, func: Handler) -> Handler:
    """A handler for a function that torch makes of others, where these reduce rows."""

    def call(*args: Any, **kwargs: Any) -> Any:
        reduces = wanted and not looked_on() and not (args and is_never_reduced(args[0]))
        make = chosen_by(compose, args, kwargs) if reduces else None
        return rest(*args, **kwargs) if make is None else make()

    rest, handler, known = passing(func), functools.wraps(func)(call), known_of(func)
    if known.lends or (known.in_c and not known.writes):
        HOT.append(("composing", handler, (func, known)))
    return handler


def _of_classes(compose: Handler) -> Handler:
    """`compose`, of a loss of classes, where that pays."""

    def composed(input: Any, *args: Any, **kwargs: Any) -> Any:
        return compose(input, *args, **kwargs) if takes_classes(input.nbytes) else None

    return composed


def reducing(choose: Handler, func: Handler) -> Handler:
    """A handler for reductions, of which `choose` knows those that go into a chain."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not wanted or looked_on() or (args and is_never_reduced(args[0])):
            return run_eager(func, args, kwargs)
        chosen = chosen_by(choose, args, kwargs)
        shell = None if chosen is None else record(*chosen)
        return shell if isinstance(shell, Tensor) else run_eager(func, args, kwargs, shell)

    handler, known = functools.wraps(func)(call), known_of(func)
    if not known.writes:
        HOT.append(("reducing", handler, (func, known, Choices(choose))))
    return handler


def is_never_reduced(x: Any) -> bool:
    """Whether it is known at a glance that a reduction of `x` is not recorded."""
    if x.__class__ is not Tensor:
        return False
    meta = x._af
    if meta.__class__ is Node:
        meta = meta.meta
    return meta.__class__ is Meta and meta.device not in wanted


def viewing(name: str, func: Handler) -> Handler:
    """A handler for `func`, which gives views: of a pending value they are recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if args and args[0].__class__ is Tensor and args[0]._af.recorder is not None:
            views = record_view(name, func, call, args, kwargs)
            if views is not None:
                return views
        return run_eager(func, args, kwargs)

    handler, known = functools.wraps(func)(call), known_of(func)
    if (known.in_c and not known.writes) or known.lends:
        HOT.append(("viewing", handler, (func, known)))
    return handler


def _interleaving(func: Handler) -> Handler:
    """A handler for `repeat_interleave`: of a pending value, what torch makes it of."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 3 or kwargs or args[0].__class__ is not Tensor:
            return rest(*args, **kwargs)
        x, times, dim = args
        if x._af.recorder is None or this_thread.closed or looked_on():
            return rest(*args)
        if type(times) is not int or type(dim) is not int or not 0 < times <= EXACT:
            return rest(*args)
        if not -x.ndim <= dim < x.ndim:
            return rest(*args)
        dim %= x.ndim
        shape = [*x.shape[: dim + 1], times, *x.shape[dim + 1 :]]
        apart = torch.unsqueeze(x, dim + 1).expand(shape)
        return apart.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)

    rest = passing(func)
    return functools.wraps(func)(call)


def joining(name: str, func: Handler) -> Handler:
    """A handler for `func`, which puts tensors side by side: pending values, where they belong."""

    def call(*args: Any, **kwargs: Any) -> Any:
        joined = None
        if not kwargs or (len(args) == 1 and kwargs.keys() == {"dim"}):
            joined = record_join(name, *args, **kwargs) if 0 < len(args) < 3 else None
        return joined if isinstance(joined, Tensor) else run_eager(func, args, kwargs, joined)

    handler = functools.wraps(func)(call)
    HOT.append(("joining", handler, (func, known_of(func), name)))
    return handler
