"""`torch.roll`: an operand in memory that is read elsewhere, without a copy.

Where a dimension ends it goes on from its beginning. Without a gradient: torch's node is eager's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..dtypes import EXACT
from ..layout import Ints
from .row import OPS, Op, row, spelled

# of which each way to roll is a copy; it stands for all of them in kernels, and runs as none
ROLLED = row("rolled", "x", "x", accepts="fib", contiguous="cpu cuda", eager=torch.clone)


_MOST = 64  # ways to roll, each a program: shifts that are others each time would have no end
_known: dict[tuple[Ints, Ints, tuple[Ints, ...]], Op] = {}


def _roll(shifts: Ints, dims: Ints, rolls: tuple[Ints, ...]) -> Op | None:
    key = shifts, dims, rolls
    if key not in _known and len(_known) < _MOST:
        _known[key] = replace(ROLLED, rolls=rolls, eager=lambda x: torch.roll(x, shifts, dims))
    return _known.get(key)


@spelled()
def roll(input: Any, shifts: Any, dims: Any = None) -> tuple[Op, tuple[Any, ...]] | None:
    shifts, dims = ((x,) if type(x) is int else x for x in (shifts, dims))
    shifts, dims = (tuple(x) if type(x) is list else x for x in (shifts, dims))
    if dims is None and input.ndim == 1:
        dims = (0,)
    if type(shifts) is not tuple or type(dims) is not tuple or not 0 < len(dims) == len(shifts):
        return None
    if not all(type(x) is int for x in (*shifts, *dims)) or not input.is_contiguous():
        return None
    if not all(-input.ndim <= d < input.ndim for d in dims) or not input.numel():
        return None
    if len({d % input.ndim for d in dims}) < len(dims) or max(map(abs, shifts)) > EXACT:
        return None
    moved = [(d % input.ndim, by % input.shape[d]) for d, by in zip(dims, shifts, strict=True)]
    rolls = tuple([(d, by) for d, by in moved if by])
    op = _roll(shifts, dims, rolls) if rolls else OPS["clone_contiguous"]
    return None if op is None else (op, (input,))
