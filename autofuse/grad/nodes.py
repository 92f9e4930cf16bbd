"""Nodes: torch's own autograd nodes of reductions, over values that a kernel has computed.

Those that no kernel differentiates, or that no other op shares a Segment with: torch's node costs
the host a fifth of a Python one.

Torch is called as eager calls it, so that what is saved, derivatives of every order, errors and
names are eager's; but where autograd has its op computed, a mode of `__torch_dispatch__` gives
what is known already.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..ops.reductions import NODES_OF_ALL, Reduction
from ..ops.row import Op
from ..torch_private import (
    pop_mode,
    push_mode,
    without_autocast,
)


class _Known(TorchDispatchMode):
    """Gives the results of one call of `op`; whatever else runs in the middle of it is computed.

    That is the call by `codes`, of who calls torch and of who calls that.
    """

    def __init__(self, op: Any, codes: tuple[CodeType, CodeType], results: Any) -> None:
        # nothing of the mode's own: it is pushed by C
        self.op, self.codes, self.results = op, codes, results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what torch wraps around the handler otherwise takes as long as all the rest

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.results is not None and func is self.op:
            caller = _getframe(1)
            if caller.f_back is not None and (caller.f_code, caller.f_back.f_code) == self.codes:
                results, self.results = self.results, None
                return results
        return func(*args, **(kwargs or {}))


def noder(reduction: Reduction) -> Callable[..., None]:
    """A function that hangs autograd's node of `reduction` on a value, in grad mode.

    It takes the operands, and what torch's op for it returns: the value, then statistics.
    """
    name, _, overload = reduction.aten.partition(".")
    op, call = getattr(getattr(torch.ops.aten, name), overload or "default"), reduction.eager
    assert call is not None

    def attach(operands: tuple[Any, ...], value: torch.Tensor, *statistics: torch.Tensor) -> None:
        known = _Known(op, codes, (value, *statistics) if statistics else value)
        try:
            push_mode(known)
            found = call(*operands)
        finally:
            pop_mode(None)
        if found is not value:
            raise RuntimeError(f"torch has another autograd node for {reduction.name}")

    codes = call.__code__, attach.__code__  # type: ignore[attr-defined]
    return without_autocast(attach)


# what torch calls the node of an op that does not bear the name of its function
_NAMES = {"square": "pow", "to": "to_copy", "concat": "cat", "concatenate": "cat",
          "special_xlogy": "xlogy", "round_before": "round", "round_to": "round"}  # fmt: skip
# which of its nodes of that name it is where all operands are tensors, and where one is a number:
# those of them that are not the first
_WHICH = {"clamp": (0, 1), "clamp_max": (1, 0), "clamp_min": (1, 0), "copysign": (0, 1),
          "div_floor": (2, 2), "div_trunc": (2, 2), "fmod": (1, 0), "lerp": (1, 0), "pow": (1, 0),
          "remainder": (1, 0), "round_before": (1, 1), "round_to": (1, 1), "rpow_scalar": (2, 2),
          "rsub": (0, 1)}  # fmt: skip


def node_name(op: Op, number: bool) -> str:
    """What eager's node of an op is called, in the spelling that most have.

    number: whether an operand is one.
    """
    if isinstance(op, Reduction):
        name = op.aten.partition(".")[0].removesuffix("_forward")
        # of torch's sums and means those over dims are the second to have a node
        which = int(op.name in NODES_OF_ALL and not op.of_all)
    else:
        name = getattr(getattr(op.eager, "func", op.eager), "__name__", op.name)
        name = op.name.removesuffix("_scaled") if name == "<lambda>" else name
        name, which = _NAMES.get(name, name), _WHICH.get(op.name, (0, 0))[number]
    return f"{name.title().replace('_', '')}Backward{which}"
