"""`all`, `any` and how many hold: of which no order decides the bits.

As reductions of the truth of elements in float32, which counts up to `reductions.COUNTED`.
What makes a mask and asks whether it holds anywhere, as `torch.isnan(x).any()`, or how often, as
`(x > 0).sum()`, stores no mask.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .arithmetic import CASTS
from .reductions import ABSENT, REDUCTIONS, Over, Reduction, components_of, over_of
from .row import Op, registrar

_TRUTH = Op("truth", "x", "0.0 if x == 0 else 1.0", result=torch.float32, accepts="fib")
_HOLDS = Op("holds", "x", "x != 0", result=torch.bool)
_ROWS = {"truth": _TRUTH, "holds": _HOLDS, "whole": CASTS[torch.int64]}
_MADE_OF = {
    "all": "holds(amin(truth(x)))", "any": "holds(amax(truth(x)))", "sum": "whole(sum(truth(x)))",
    "count_nonzero": "whole(sum(truth(x)))",
}  # fmt: skip


@cache
def _truth(name: str, over: Over) -> Reduction:
    function, dim, keepdim = getattr(torch, name), over.named, over.keepdim
    if over.of_all:
        eager = lambda x: function(x)  # noqa: E731
    elif name == "count_nonzero":
        eager = lambda x: function(x, dim)  # noqa: E731
    else:
        eager = lambda x: function(x, dim, keepdim)  # noqa: E731
    components = components_of(_MADE_OF[name], over, _ROWS)
    result = torch.bool if name in ("all", "any") else torch.int64
    return Reduction(name, "x", "", result=result, components=components, eager=eager,
                     **over._asdict())  # fmt: skip


def _plain(name: str) -> None:
    @registrar(REDUCTIONS)(name)
    def choose(
        input: Any, dim: Any = ABSENT, keepdim: bool = False
    ) -> tuple[Reduction, tuple[Any, ...]] | None:
        over = over_of(input, dim, keepdim, torch.bool)
        if over is None or (over.of_all and keepdim):
            return None
        return _truth(name, over), (input,)


for _name in ("all", "any"):
    _plain(_name)
_sum_of_numbers = REDUCTIONS["sum"]


@registrar(REDUCTIONS)("sum")
def _sum(
    input: Any, dim: Any = ABSENT, keepdim: Any = ABSENT, *, dtype: Any = None
) -> tuple[Reduction, tuple[Any, ...]] | None:
    """Of bools, how many hold."""
    if input.dtype is not torch.bool:
        return _sum_of_numbers(input, dim, keepdim, dtype=dtype)
    if dtype not in (None, torch.int64) or (dim is ABSENT and keepdim is not ABSENT):
        return None
    over = over_of(input, dim, False if keepdim is ABSENT else keepdim, torch.bool)
    return None if over is None else (_truth("sum", over), (input,))


@registrar(REDUCTIONS)()
def count_nonzero(input: Any, dim: Any = None) -> tuple[Reduction, tuple[Any, ...]] | None:
    over = over_of(input, ABSENT if dim is None else dim, False, torch.bool)
    return None if over is None else (_truth("count_nonzero", over), (input,))
