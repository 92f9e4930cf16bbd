"""Costs: how many ops of eager's a chain is, and how many bytes it moves, eagerly and fused. Pure.

What these take stands in `policy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..chain.state import Node
from ..layout import Ints
from ..ops.reductions import Reduction
from ..ops.row import OPS, Op
from ..ops.views import JoinOp
from ..program.program import CONST

# torch takes as long for a bool that it counts as memory for 26 bytes (H200; bench/overhead.py)
_COUNTING = 16


def _eager(nodes: list[Node], first: int = 0) -> Iterator[Node]:
    """Those from `first` on that eager runs an op for: views cost the same either way, and what a
    join reads from memory is a step of its own here."""
    read = {ref for node in nodes if isinstance(node.op, JoinOp) for ref in node.args}
    for node in nodes[first:]:
        if node.base < 0 and not (node.index in read and node.op is OPS["clone"]):
            yield node


def ops_of(nodes: list[Node], first: int = 0) -> int:
    """How many ops of eager's these are from `first` on."""
    return sum(node.op.costs if isinstance(node.op, Op) else 1 for node in _eager(nodes, first))


def stored_of(nodes: list[Node], results: Sequence[int]) -> list[Node]:
    """Those of `results` that get memory."""
    return [node for node in nodes if node.index in results and node.base < 0]


def shapes_of(nodes: list[Node], stored: Sequence[Node]) -> set[Ints]:
    """The shapes of what is stored; a join is as many as its parts have."""
    shapes = set[Ints]()
    for node in stored:
        parts = [nodes[ref] for ref in node.args] if isinstance(node.op, JoinOp) else [node]
        shapes.update(part.meta.shape for part in parts)  # type: ignore[union-attr]
    return shapes


def traffic(nodes: list[Node], results: Sequence[int]) -> tuple[int, int]:
    """Bytes that eager ops move, and those of kernels that read all Inputs, and write `results`.

    There is one for each shape, but that rows of which each has one block are in one with what is
    found of them, and groups of channels have one more.
    """
    inputs, rows, every = nodes[-1].inputs, nodes[-1].rows, 0

    def size(ref: int) -> int:
        if ref >= CONST:
            return 0
        meta = nodes[ref].meta if ref >= 0 else inputs[~ref]
        return 0 if meta is None else meta.nbytes

    for node in _eager(nodes):
        every += size(node.index) + sum(map(size, node.args))
        counts = isinstance(node.op, Reduction) and node.op.name in ("sum", "count_nonzero")
        if counts and node.op.has_no_order:  # type: ignore[union-attr]
            every += _COUNTING * sum(map(size, node.args))
    stored = stored_of(nodes, results)
    kernels = max(1, len(shapes_of(nodes, stored)))
    if rows is not None and rows.blocks == 1:
        kernels = 1 + (rows.groups > 0)
    once = kernels * sum(meta.nbytes for meta in inputs)
    return every, once + sum(node.meta.nbytes for node in stored if node.meta is not None)
