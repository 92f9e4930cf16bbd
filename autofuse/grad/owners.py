"""Owners: which autograd node of a flush differentiates through which of its ops. Pure.

The engine adds up the gradients of a tensor in the reverse order of its uses, op after op; what it
runs here are nodes, each of which stands for several. Where these would add in another order, more
ops get nodes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ..chain.meta import Meta
from ..chain.rowwise import GradientRows, gradient_rows, rows_added_up
from ..chain.state import Node
from ..layout import Ints
from ..ops.reductions import Reduction
from ..ops.row import Op
from ..ops.views import JoinOp, ViewOp
from ..program.program import CONST, Ref
from .strips import Striping
from .uses import G, Use, is_handed_on


def owners_of(
    nodes: list[Node], uses: list[list[Use]], meta_of: Callable[[Ref], Meta], live: list[int],
    striped: Mapping[int, tuple[Striping, int]], *, every: bool,
) -> Owners:  # fmt: skip
    """Of the steps that the values of `live` are differentiated through, with few roots.

    every: where the engine would add in another order, all of them are.
    """
    # where there are reductions there are no strips
    for joined, spreads, inside in ((True, True, striped), (True, False, {}), (False, False, {})):
        owners = Owners(nodes, uses, meta_of, live, joined=joined, spreads=spreads, striped=inside)
        late = owners.late()
        if not late:
            return owners
    roots = {*live}
    while late:  # with all as roots none is
        roots |= {*owners} if every else late
        owners = Owners(nodes, uses, meta_of, sorted(roots))
        late = owners.late()
    return owners


def _is_split(node: Node) -> bool:
    return isinstance(node.op, ViewOp) and node.op.dim is not None


class Owners(dict[int, int]):
    """The root of the segment that each differentiated step belongs to; a view is its own.

    Beside the live values, a dead one is a root if two segments meet in it, if it is viewed, or
    broadcast otherwise than along rows that a kernel adds up: its gradient is complete only after
    both, after torch's nodes, or after a sum. So is a reduction whose gradients one kernel cannot
    compute with those of the segment.
    """

    def __init__(
        self, nodes: list[Node], uses: list[list[Use]], meta_of: Callable[[Ref], Meta],
        live: list[int], *, joined: bool = False, spreads: bool = False,
        striped: Mapping[int, tuple[Striping, int]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """joined: whether reductions may be steps of segments with others; spreads: numbers that
        are spread along rows, then. striped: of the slices that may be.
        """
        super().__init__((index, index) for index in live)
        # who has one of these can write to it
        self.shared = {nodes[index].base if nodes[index].base >= 0 else index for index in live}
        self.nodes, self.meta_of, self.striped = nodes, meta_of, striped
        self.uses = [*uses]  # which splits change, for these owners alone
        self.split: dict[int, int] = {}  # parts and slices inside of segments: whose
        self.users: dict[int, list[int]] = {}  # of each view
        self.rows: dict[int, GradientRows] = {}  # of segments whose backward adds over rows
        # row kernels read no index maps
        joined = joined and not any(isinstance(x.op, JoinOp) or _is_split(x) for x in nodes)
        self.spreads = spreads and joined
        self.handed: list[tuple[Ref, int]] = []  # sinks, and the steps that hand them gradients
        self.spread: dict[tuple[Ref, int], Ints] = {}  # by value and step: along which dimensions
        self.added = {
            node.index: gradient_rows(node.op, meta_of(node.args[0])) if joined else None
            for node in nodes if isinstance(node.op, Reduction)
        }  # fmt: skip
        for index in range(len(nodes) - 1, -1, -1):
            if index in self.users and index not in self:
                self._own_view(index)
            if index in self:
                if index in self.added:
                    self._own_reduction(index)
                for ref in self.edges(index):
                    self._own(ref, index)
        for ref, index in self.handed:  # if there is room beside all that is added up inside
            self._takes_up(ref, index)

    def edges(self, index: int) -> list[Ref]:
        """What a step hands gradients to, in order."""
        node = self.nodes[index]
        if isinstance(node.op, Reduction) and not node.op.grad:  # whose node is torch's
            operands = [ref for ref in node.args if ref < CONST]
            return [ref for ref in operands if self.meta_of(ref).requires_grad]
        inside = node.base < 0 or index in self.split
        return [use.ref for use in self.uses[index]] if inside else list(node.args)

    def _own(self, ref: Ref, index: int) -> None:
        """Let step `index`, which has an owner, hand a gradient to `ref`."""
        if ref < 0 or self.get(ref) == ref:
            self.handed.append((ref, index))
            return
        if self.nodes[ref].base >= 0:
            self.users.setdefault(ref, []).append(index)
            return
        alone = self.setdefault(ref, self[index]) == self[index]
        reshapes = index in self.split or isinstance(self.nodes[index].op, JoinOp)
        same = reshapes or self.meta_of(ref).shape == self.meta_of(index).shape
        apart = self.nodes[index].base >= 0 and index not in self.split
        if index in self.added:  # the gradient of a weight, which may be the rows too, is torch's
            (first, *others), op = self.nodes[index].args, self.nodes[index].op
            assert isinstance(op, Reduction)
            same = not op.whole or (ref == first and ref not in others)
            apart = self.added[index] is None
        if not alone or apart or not (same or self._takes_up(ref, index)):
            self[ref] = ref

    def _takes_up(self, ref: Ref, index: int) -> bool:
        """Whether step `index` has spread a value along its rows, and its kernel is to add the
        gradient up to that of `ref`, which is a number of each: it does then."""
        if not self.spreads or not self.added or self.nodes[index].op.__class__ is not Op:
            return False
        rows = rows_added_up(self.meta_of(index), self.meta_of(ref))
        handed = any(use.ref == ref and is_handed_on(use.rule) for use in self.uses[index])
        # a gradient that comes from elsewhere may lie in any way
        if rows is None or (handed and self[index] == index):
            return False
        if not self._takes_room(self[index], rows):  # of several operands that it is, each is a sum
            self.spread.pop((ref, index), None)
            return False
        self.spread[ref, index] = rows.axes
        return True

    def _takes_room(self, root: int, rows: GradientRows) -> bool:
        """Whether the kernel of a segment has room for these rows, over which it goes then."""
        both = rows.with_more(self.rows.get(root))
        if both is not None:
            self.rows[root] = both
        return both is not None

    def _own_reduction(self, index: int) -> None:
        """Let a reduction, which has an owner, be a root where one kernel cannot do both."""
        root, rows, op = self[index], self.added[index], self.nodes[index].op
        if root == index:  # what a number of the row is spread over is an Input of the backward
            if rows is not None and rows.sums:
                self.rows[root] = rows
            return
        assert isinstance(op, Reduction)
        # a row kernel makes no view of what it computes, such as numbers of rows as a column
        viewed = rows is not None and rows.sums > 0 and not (op.whole or op.keepdim)
        if rows is None or viewed or not self._takes_room(root, rows):
            self[index] = index
            self._own_reduction(index)

    def _own_view(self, index: int) -> None:
        if index in self.striped:
            parts = [] if self._is_named(index) else [index]
        else:
            parts = self._parts_until(index)
        owners = [{self[user] for user in self.users.get(part, ())} for part in parts]
        if parts and all(len(own) == 1 and part not in self
                         for own, part in zip(owners, parts, strict=True)):  # fmt: skip
            first = min(min(own) for own in owners)
            inner = [part for own, part in zip(owners, parts, strict=True) if first in own]
            same = all(
                isinstance(self.nodes[user].op, JoinOp)
                or self.meta_of(user).shape == self.meta_of(part).shape
                for part in inner for user in self.users[part]
            )  # fmt: skip
            # torch's own views of a part are made of it: of one with values, if these are needed
            viewed = any(
                self.nodes[user].base >= 0 and user not in self.split
                for part in parts for user in self.users[part]
            )  # fmt: skip
            if same and not viewed:
                (base,) = self.nodes[index].args
                self.update((part, first) for part in parts)
                self.split.update((part, base) for part in parts)
                self.uses[parts[0]] = [Use(base, G, frozenset(), 0)]
                return
        self[index] = index

    def _is_named(self, index: int) -> bool:
        """Whether an error may name it: saved, in memory that somebody can write to."""
        users = self.users.get(index, ())
        read = {ref for user in users for use in self.uses[user] for ref in use.reads}
        read.update(ref for user in users for ref in kept_by(self.nodes[user]))
        return self.nodes[index].base in self.shared and index in read

    def _parts_until(self, index: int) -> list[int]:
        """All parts of the value that is split where step `index` is the last; none if it is not.

        Views of views torch differentiates itself.
        """
        node = self.nodes[index]
        op = node.op
        assert isinstance(op, ViewOp)
        first = index - op.parts + 1
        if op.dim is None or first < 0 or self.nodes[node.args[0]].base >= 0:
            return []
        parts = self.nodes[first : index + 1]
        for k, part in enumerate(parts):
            other = part.op
            if not isinstance(other, ViewOp) or other.call is not op.call or other.part != k:
                return []
            if part.args != node.args:
                return []
        return [*range(first, index + 1)]

    @property
    def roots(self) -> set[int]:
        return {index for index, root in self.items() if index == root}

    def late(self) -> set[int]:
        """The steps that node after node adds to a gradient at another time than op after op."""
        roots = self.roots
        orders: list[dict[Ref, list[int]]] = []
        steps = sorted(self, reverse=True)
        for sequence in (steps, sorted(steps, key=self.__getitem__, reverse=True)):
            added: dict[Ref, list[int]] = {}
            for index in sequence:
                for ref in self.edges(index):
                    if ref < 0 or ref in roots:
                        added.setdefault(ref, []).append(index)
            orders.append(added)
        by_op, by_node = orders
        pairs = (pair for ref in by_op for pair in zip(by_op[ref], by_node[ref], strict=True))
        return {step for step, other in pairs if step != other}

    def lent(self) -> list[int]:
        """The parts that other segments use than the one that splits."""
        return [part for part in self.split
                if any(self[user] != self[part] for user in self.users[part])]  # fmt: skip

    def bases_of(self, parts: Sequence[int]) -> set[int]:
        """What those of `parts` that rules of their users read are parts of."""
        return {
            self.split[part] for part in parts for user in self.users[part]
            if any(part in use.reads for use in self.uses[user])
        }  # fmt: skip


def kept_by(node: Node) -> list[Ref]:
    """What eager's node saves whether a rule reads it or not: tensors, and numbers as tensors."""
    assert node.op is not None
    if not node.op.keeps:
        return []
    named = node.named()
    return [named[name] for name in node.op.keeps.split()]
