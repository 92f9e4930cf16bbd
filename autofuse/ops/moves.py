"""`torch.roll` and `torch.flip`: elements of an operand that stand elsewhere, without a copy.

What is rolled has to be in memory, where it goes on from its beginning as a dimension ends; what is
flipped is read, or computed, from its end on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

import torch

from ..dtypes import EXACT
from ..layout import Ints
from .row import METHODS, Op, registrar, row, spelled

# of which each way to move elements is a copy; it stands for all of them in kernels, and runs as
# none
MOVED = row("moved", "x", "x", accepts="fib", copies="fib", grad="g", eager=torch.clone)


_MOST = 64  # ways to move, each a program: shifts that are others each time would have no end
_known: dict[tuple[Any, ...], Op] = {}


def _roll(shifts: Ints, dims: Ints, rolls: tuple[Ints, ...]) -> Op:
    return replace(
        MOVED, name="roll", rolls=rolls, contiguous="cpu cuda",
        eager=lambda x: torch.roll(x, shifts, dims),
    )  # fmt: skip


def _is_dims(dims: Any, ndim: int) -> TypeGuard[Ints]:
    """Whether these are dimensions of such a tensor, none of them twice."""
    if type(dims) is not tuple:
        return False
    for d in dims:
        if type(d) is not int or not -ndim <= d < ndim:
            return False
    return len(dims) == 1 or len({d % ndim for d in dims}) == len(dims)


@spelled()
def roll(input: Any, shifts: Any, dims: Any = None) -> tuple[Op, tuple[Any, ...]] | None:
    shifts, dims = ((x,) if type(x) is int else x for x in (shifts, dims))
    shifts, dims = (tuple(x) if type(x) is list else x for x in (shifts, dims))
    if dims is None and input.ndim == 1:
        dims = (0,)
    if type(shifts) is not tuple or not _is_dims(dims, input.ndim):
        return None
    if not 0 < len(dims) == len(shifts) or not all(type(x) is int for x in shifts):
        return None
    if not input.is_contiguous() or not input.numel() or max(map(abs, shifts)) > EXACT:
        return None
    moved = [(d % input.ndim, by % input.shape[d]) for d, by in zip(dims, shifts, strict=True)]
    rolls = tuple([(d, by) for d, by in moved if by])
    against = tuple([(d, input.shape[d] - by) for d, by in rolls])
    key = shifts, dims, rolls, against
    op = _known.get(key)
    if op is None:
        if len(_known) >= _MOST:
            return None
        # as torch's node does, whose dimensions come in the opposite order
        back = _roll(tuple([-by for by in shifts[::-1]]), dims[::-1], against)
        op = _known[key] = replace(_roll(shifts, dims, rolls), back=back)
    return op, (input,)


@spelled()
def flip(input: Any, dims: Any) -> tuple[Op, tuple[Any, ...]] | None:
    dims = tuple(dims) if type(dims) is list else dims
    if not _is_dims(dims, input.ndim):
        return None
    return _flipped(input, tuple([d % input.ndim for d in dims]))


@registrar(METHODS)("flip")
def _flip_method(input: Any, dims: Any, *more: Any) -> tuple[Op, tuple[Any, ...]] | None:
    return flip(input, (dims, *more) if type(dims) is int else None if more else dims)


@spelled()
def fliplr(input: Any) -> tuple[Op, tuple[Any, ...]] | None:
    return _flipped(input, (1,)) if input.ndim > 1 else None


@spelled()
def flipud(input: Any) -> tuple[Op, tuple[Any, ...]] | None:
    return _flipped(input, (0,)) if input.ndim else None


def _flipped(input: Any, dims: Ints) -> tuple[Op, tuple[Any, ...]] | None:
    op = _known.get(dims)
    if op is None:
        if len(_known) >= _MOST:
            return None
        made = replace(MOVED, name="flip", flips=dims, eager=lambda x: torch.flip(x, dims))
        op = _known[dims] = replace(made, back=made)
    return op, (input,)
