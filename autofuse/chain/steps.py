"""Steps: from the nodes of a chain to the program that they are, as kernels get to see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..layout import contiguous
from ..ops.reductions import Reduction
from ..ops.row import Op
from ..ops.views import JoinOp, WriteOp
from ..program.program import (
    Join,
    Output,
    Program,
    Ref,
    Spec,
    Statistic,
    Step,
    View,
    kind_of,
)
from .meta import Meta, make_meta
from .state import Node


def program_of(tip: Node, outputs: tuple[Output, ...]) -> Program:
    """The program that ends at `tip`, of which `outputs` are wanted."""
    steps: list[Step] = []
    path = tip.path()
    for node in (*path, *statistics_of(path)):
        assert node.op is not None and node.meta is not None
        if node.of is not None:
            steps.append(Statistic(node.op, node.args, node.common, node.meta.spec, *node.of))
            continue
        if node.base >= 0:
            steps.append(View((node.base,), node.meta.spec, node.offset))
            continue
        if isinstance(node.op, JoinOp):
            steps.append(Join(node.args, node.meta.spec, node.op.parts))
            continue
        op = node.op.row if isinstance(node.op, WriteOp) else node.op
        assert op is not None
        steps.append(kind_of(op)(op, node.args, node.common, node.meta.spec))
    inputs = specs_of(path, tip.inputs)
    return Program(tuple(steps), inputs, tip.consts, outputs, tip.relaxed)


def statistics_of(path: list[Node]) -> list[Node]:
    """What is a step of the program of `path` besides, after it: nobody has recorded it.

    These are the statistics that autograd's nodes of its reductions save.
    """
    found: list[Node] = []
    for reduced in path:
        op, meta = reduced.op, reduced.meta
        if not isinstance(op, Reduction) or meta is None or not meta.requires_grad:
            continue
        shape, dtype = (*meta.shape[:-1], 1), torch.float32
        if op.outside is not None:  # one number, of torch's
            shape, dtype = (), meta.dtype
        if op.groups:
            shape, dtype = (meta.shape[0], op.groups), meta.dtype
        for which, statistic in enumerate(op.statistics):
            node = Node(reduced.recorder, None, statistic)
            node.index, node.of = len(path) + len(found), (reduced.index, which)
            node.args, node.common = reduced.args, reduced.common
            node.meta = make_meta(dtype, shape, contiguous(shape), meta.device)
            found.append(node)
    return found


def channels_of(path: Iterable[Node]) -> dict[Ref, int]:
    """The Inputs that ops of `path` read by channel, and how many dimensions of their first operand
    follow that of the channels; where none does, they are read as any other."""
    return {
        ref: node.meta.ndim - 2  # type: ignore[union-attr]
        for node in path
        if isinstance(node.op, Op) and node.op.by_channel and node.meta.ndim > 2  # type: ignore[union-attr]
        for ref, role in zip(node.args, node.op.roles, strict=True)
        if role == "channel"
    }


def specs_of(path: Iterable[Node], inputs: Sequence[Meta]) -> tuple[Spec, ...]:
    """`inputs` as the ops of `path` read them: by channel, they broadcast beside the others."""
    specs = [meta.spec for meta in inputs]
    for ref, more in channels_of(path).items():
        spec = specs[~ref]
        ones = (1,) * more
        specs[~ref] = Spec(spec.code, spec.shape + ones, spec.stride + ones)
    return tuple(specs)
