"""`max`, `min`, `argmax` and `argmin`: the largest or smallest, and where the first of them lies.

Over a dimension torch gives both, of which autograd needs where: under grad that is left to it. An
element is found by its place in the row, which is a number in float32 of a tensor that is kept for
it: of places in a row no order of comparing decides which is the first.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import torch

from ..layout import Ints
from ..torch_private import InferenceMode
from .arithmetic import CASTS
from .reductions import (
    ABSENT,
    REDUCTIONS,
    Over,
    Reduction,
    components_of,
    every_axis,
    is_recordable,
    over_of,
)
from .row import SPELLINGS, Op, Several, registrar, spelled

_reduced = registrar(REDUCTIONS)
# where an element that is found lies, and what lies there; a NaN is larger and smaller than all
_PLACE = Op("place_of", "x m p", "p if x == m or x != x else inf")
_LARGEST = Op("largest_at", "x p i", "x if p == i else -inf")
_SMALLEST = Op("smallest_at", "x p i", "x if p == i else inf")


class _AskAgain(ValueError):
    """Torch does it, this time: what decides that is no part of what choosers are known by."""


_LONGEST = 1 << 16  # rows of which places are kept: of longer ones several blocks share one


@cache
def _of_all(name: str, ndim: int) -> Reduction:
    function, over = getattr(torch, name), Over(every_axis(ndim), of_all=True)
    components = components_of(f"a{name}(x)", over, {})
    return Reduction(name, "x", "", keeps="x out", components=components,
                     eager=lambda x: function(x), **over._asdict())  # fmt: skip


@cache
def _place(name: str, over: Over) -> Reduction:
    """Of the first one in each row."""
    function, dim, keepdim = getattr(torch, f"arg{name}"), over.named, over.keepdim
    components = components_of(
        f"v = wide(x); whole(amin(place_of(v, a{name}(v), p)))", over,
        {"wide": CASTS[torch.float32], "whole": CASTS[torch.int64], "place_of": _PLACE},
    )  # fmt: skip
    return Reduction(f"arg{name}", "x p", "", result=torch.int64, components=components,
                     eager=lambda x, p: function(x, dim, keepdim), **over._asdict())  # fmt: skip


@cache
def _first(name: str, over: Over, dtype: torch.dtype) -> Reduction:
    """The first one in each row: zeros have signs."""
    function, dim, keepdim = getattr(torch, name), over.named, over.keepdim
    components = components_of(
        f"v = wide(x); narrow(a{name}(at(v, p, amin(place_of(v, a{name}(v), p)))))", over,
        {"wide": CASTS[torch.float32], "narrow": CASTS[dtype], "place_of": _PLACE,
         "at": _LARGEST if name == "max" else _SMALLEST},
    )  # fmt: skip
    return Reduction(name, "x p", "", components=components,
                     eager=lambda x, p: function(x, dim, keepdim)[0], **over._asdict())  # fmt: skip


def _places(x: Any, over: Over) -> torch.Tensor:
    """A number for each place in a row of `x`, to be read with it."""
    shape = tuple(x.shape)
    if not over.of_all:
        axis = over.axes[0]
        shape = (shape[axis], *[1] * (-1 - axis))
    return _kept_places(shape, x.device)


@cache
def _all_places(device: torch.device) -> torch.Tensor:
    """For rows of any length; there for every stream when this returns, which waits for nothing but
    a copy."""
    with InferenceMode(False):
        places = torch.arange(_LONGEST, dtype=torch.float32, device="cpu")
        if device.type == "cpu":
            return places
        if torch.cuda.is_current_stream_capturing():
            raise _AskAgain
        apart = torch.cuda.Stream(device)
        with torch.cuda.stream(apart):
            places = places.to(device)
            apart.synchronize()
        return places


@lru_cache(256)
def _kept_places(shape: Ints, device: torch.device) -> torch.Tensor:
    places = _all_places(device)
    with InferenceMode(False):
        return places[: math.prod(shape)].view(shape)


def _is_found(x: Any, dim: Any, keepdim: Any) -> Over | None:
    """Over what, if it is recorded where the first one lies."""
    over = over_of(x, dim, keepdim)
    if over is None or (dim is not ABSENT and type(dim) is not int):
        return None
    count = x.numel() if over.of_all else x.shape[dim]
    contiguous = not over.of_all or x.is_contiguous()
    return over if 1 < count <= _LONGEST and contiguous else None


def _selecting(name: str) -> None:
    """`max` and `min`: of one tensor, of all its elements or over a dimension; of two, one each."""
    selection = SPELLINGS[name]

    @spelled(name)
    def choose(input: Any, *others: Any, **options: Any) -> Any:
        if not others and not options:
            return (_of_all(name, input.ndim), (input,)) if is_recordable(input) else None
        return selection(input, *others, **options) or over_dimension(input, *others, **options)

    def over_dimension(input: Any, dim: Any, keepdim: Any = False) -> Any:
        over = _is_found(input, dim, keepdim)
        if over is None or (torch.is_grad_enabled() and input.requires_grad):
            return None
        operands = input, _places(input, over)
        chosen = (_first(name, over, input.dtype), operands), (_place(name, over), operands)
        return Several(getattr(torch.return_types, name), chosen)


def _finding(name: str) -> None:
    @_reduced(f"arg{name}")
    def choose(
        input: Any, dim: Any = None, keepdim: bool = False
    ) -> tuple[Reduction, tuple[Any, ...]] | None:
        over = _is_found(input, ABSENT if dim is None else dim, keepdim)
        if over is not None:
            return _place(name, over), (input, _places(input, over))
        if is_recordable(input) and input.ndim > 1 and dim not in (-1, input.ndim - 1):
            raise _AskAgain
        return None


for _name in ("max", "min"):
    _selecting(_name)
    _finding(_name)
