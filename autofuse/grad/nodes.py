"""Nodes: torch's own autograd nodes of reductions, over values that a kernel has computed.

Torch is called as eager calls it, so that what is saved, derivatives of every order, errors and
names are eager's; but where autograd has its op computed, a mode of `__torch_dispatch__` gives
what is known already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..ops.reductions import NODES, Reduction
from ..torch_private import (
    AUTOCASTS,
    ExcludedKey,
    above_autograd,
    autocast_is_on,
    is_below_autograd,
    key_is_excluded,
    pop_mode,
    push_mode,
)


class _Known(TorchDispatchMode):
    """Gives the results of one call of `op`; whatever else runs in the middle of it is computed."""

    def __init__(self, op: Any, operand: torch.Tensor, results: Any) -> None:
        # nothing of the mode's own: it is pushed by C
        self.op, self.operand, self.results = op, operand, results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what torch wraps around the handler otherwise takes as long as all the rest

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.results is None or func is not self.op or args[0] is not self.operand:
            return func(*args, **(kwargs or {}))
        results, self.results = self.results, None
        return results


def noder(reduction: Reduction) -> Callable[..., None]:
    """A function that hangs autograd's node of `reduction` on a value, in grad mode.

    It takes the operands, and what torch's op for it returns: the value, then statistics.
    """
    name, _, overload = NODES[reduction.name].partition(".")
    op, call = getattr(getattr(torch.ops.aten, name), overload or "default"), reduction.eager
    assert call is not None

    def attach(operands: tuple[Any, ...], value: torch.Tensor, *statistics: torch.Tensor) -> None:
        if is_below_autograd():
            with above_autograd():
                return attach(operands, value, *statistics)
        if autocast_is_on() and not all(map(key_is_excluded, AUTOCASTS)):
            with ExcludedKey(AUTOCASTS[0], True), ExcludedKey(AUTOCASTS[1], True):
                return attach(operands, value, *statistics)
        known = _Known(op, operands[0], (value, *statistics) if statistics else value)
        try:
            push_mode(known)
            found = call(*operands)
        finally:
            pop_mode(None)
        if found is not value:
            raise RuntimeError(f"torch has another autograd node for {reduction.name}")
        return None

    return attach
