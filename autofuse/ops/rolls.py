"""`torch.roll`: an operand in memory that is read elsewhere, without a copy.

Where a dimension ends it goes on from its beginning. Without a gradient: torch's node is eager's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ..layout import Ints
from .row import OPS, Op, row, spelled

ROLLED = row("rolled", "x", "x", accepts="fib", contiguous="cpu cuda", eager=torch.clone)


@lru_cache(1024)
def _roll(shifts: Ints, dims: Ints, rolls: tuple[Ints, ...]) -> Op:
    return replace(ROLLED, rolls=rolls, eager=lambda x: torch.roll(x, shifts, dims))


@spelled()
def roll(input: Any, shifts: Any, dims: Any = None) -> tuple[Op, tuple[Any, ...]] | None:
    shifts, dims = ((x,) if type(x) is int else x for x in (shifts, dims))
    if dims is None and input.ndim == 1:
        dims = (0,)
    if type(shifts) is not tuple or type(dims) is not tuple or len(shifts) != len(dims):
        return None
    if not all(type(x) is int for x in (*shifts, *dims)) or not input.is_contiguous():
        return None
    if not all(-input.ndim <= d < input.ndim for d in dims) or not input.numel():
        return None
    sizes = {d % input.ndim: input.shape[d] for d in dims}
    moved = [(d, shift % n) for (d, n), shift in zip(sizes.items(), shifts, strict=False)]
    rolls = tuple([(d, by) for d, by in moved if by])
    if len(sizes) < len(dims):
        return None
    return (_roll(shifts, dims, rolls) if rolls else OPS["clone_contiguous"]), (input,)
