"""`all` and `any`: of which no order decides the bits.

As reductions of the truth of elements in float32.
What makes a mask and asks whether it holds anywhere, as `torch.isnan(x).any()`, stores no mask.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .reductions import ABSENT, REDUCTIONS, Over, Reduction, components_of, over_of
from .row import Op, registrar

_TRUTH = Op("truth", "x", "0.0 if x == 0 else 1.0", result=torch.float32, accepts="fib")
_HOLDS = Op("holds", "x", "x != 0", result=torch.bool)
_EXTREMES = {"all": "amin", "any": "amax"}


@cache
def _truth(name: str, over: Over) -> Reduction:
    function, dim, keepdim = getattr(torch, name), over.named, over.keepdim
    eager = (lambda x: function(x)) if over.of_all else (lambda x: function(x, dim, keepdim))
    components = components_of(
        f"holds({_EXTREMES[name]}(truth(x)))", over, {"truth": _TRUTH, "holds": _HOLDS}
    )
    return Reduction(name, "x", "", result=torch.bool, components=components, eager=eager,
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


for _name in _EXTREMES:
    _plain(_name)
