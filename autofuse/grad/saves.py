"""Saves: which tensors eager's node of an op saves, and in which order; torch itself is asked.

Hooks of saved tensors (`torch.autograd.graph.saved_tensors_hooks`) are functions of the program's,
which eager calls in the middle of every op that requires grad, once for each tensor that its node
saves. They can tell when they are called; so under them such ops run at once, as in eager, and only
what saves nothing is recorded (`AT_ONCE`).

Those of torch's own that only hold what they are given cannot tell (`LATER`): `save_on_cpu` and
both of `torch.utils.checkpoint`, which counts tensors in its two runs and takes what the second
saves for what the first has saved. Chains are recorded there. Their nodes save what eager's save,
op by op, dead values too, whatever runs them: a kernel that stores these, or eager ops. When the
flush is over the hook is told of them in eager's order (`record.flush`); what else is saved
meanwhile, by an op that is not recorded, is told after what was recorded before it
(`patches.modes`).

Of what a checkpoint's first run saves its hook reads shape, dtype and device (`UNREAD`). It is told
of bare tensors, and nothing is computed or kept for it. Views and joins save sizes; a chain ends
where another op saves a view, which is torch's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..chain.meta import Meta
from ..chain.state import Node
from ..inside import in_another_thread
from ..ops.reductions import Reduction
from ..ops.row import Op
from ..ops.views import JoinOp, ViewOp
from ..program.program import CONST, Ref
from ..supply.kernels import capturing
from ..torch_private import pop_hooks, push_hooks
from .uses import uses_of

_OUT = -1
# of an operand: its dtype, dimensions and whether it requires grad, or its class; which one is the
# same, if an earlier one is
_Kind = tuple[Any, ...]


def saved_by(node: Node) -> tuple[Ref, ...] | None:
    """What eager's node of `node` saves, in order.

    None where it saves something else than operands and result, or less than the op's rules read.
    """
    assert node.op is not None
    if isinstance(node.op, Reduction):  # whose node is torch's own
        return None
    if isinstance(node.op, (ViewOp, JoinOp)):  # sizes and strides
        return ()
    nodes = node.path()

    def meta_of(ref: Ref) -> Meta:
        meta = nodes[ref].meta if ref >= 0 else node.inputs[~ref]
        assert meta is not None
        return meta

    kinds: list[_Kind] = []
    for ref in node.args:
        if ref >= CONST:
            kinds.append((node.consts[ref - CONST],))
        else:
            meta = meta_of(ref)
            kinds.append((meta.dtype, meta.ndim, meta.requires_grad, node.args.index(ref)))
    device = node.recorder.device
    if capturing(device):
        return None  # what torch is asked would become part of the graph
    places = _asked(node.op, device, tuple(kinds))
    if places is None:
        return None
    saves = tuple(node.index if place == _OUT else node.args[place] for place in places)
    read = {ref for use in uses_of(node, meta_of) for ref in use.reads if ref < CONST}
    return saves if read <= {*saves} else None


@cache
def _asked(op: Op, device: torch.device, kinds: tuple[_Kind, ...]) -> tuple[int, ...] | None:
    """Which operands, by position, and _OUT eager's node of `op` saves; None for anything else.

    Asked in a thread of its own, where no mode is on and autograd numbers other nodes.
    """
    assert op.eager is not None
    told: list[torch.Tensor] = []
    operands: list[Any] = []

    def ask() -> Any:
        for k, kind in enumerate(kinds):
            if len(kind) == 1:
                operands.append(kind[0](1))
            elif kind[3] < k:
                operands.append(operands[kind[3]])
            else:
                dtype, ndim, requires_grad, _ = kind
                shape = (1,) * ndim
                x = torch.ones(shape, dtype=dtype, device=device, requires_grad=requires_grad)
                operands.append(x)
        try:
            push_hooks(told.append, _never)
            return op.eager(*operands)  # type: ignore[misc]
        finally:
            pop_hooks()

    try:
        out = in_another_thread(ask)
    except RuntimeError:  # which the program is going to meet, where it runs the op
        return None
    places = []
    for x in told:
        place = next((k for k, operand in enumerate(operands) if operand is x), None)
        if place is None and x is not out:
            return None
        places.append(_OUT if place is None else place)
    return tuple(places)


def _never(packed: Any) -> Any:
    raise AssertionError("the graph of a question is differentiated")
