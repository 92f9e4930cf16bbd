"""Segments: what each autograd node of a flush differentiates through. Pure.

Every value that somebody can see gets an autograd node of its own, in the order of recording. A
Segment is what such a node differentiates through: the dead ops between its root and the tensors
that a graph of their own leads on from.

What is saved is what eager would save: of the values the rules read, the visible ones and the
Inputs; a dead one is computed again where it follows from these, and otherwise stored by the
forward kernel. A stored one is a further output of its segment's node, so that second derivatives
flow through it. Where hooks are told of what is saved (`saves`), that is what each op saves in
eager, dead or not, and as often; where these read no values, bare tensors stand for all of that.

A call that splits a value is a step of a Segment where nobody sees its parts and each of them is
used by one Segment: of those the first, of which the parts that others use are further outputs. So
is a slice that nobody sees and one Segment uses, where those of its base do not overlap (`strips`).
Any other view has the nodes that torch gives it, between Segments. So has a reduction that no
kernel differentiates, or alone; its node is given what the forward kernel has found (`nodes`).
Torch makes them of the value that they lie in or reduce, or, where no rule, no such node and nobody
else reads that or a view of it, of a *bare* tensor in its place, which has shape and gradient but
one element of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..chain.meta import Meta
from ..chain.state import LATER, Node
from ..chain.steps import statistics_of
from ..layout import Ints, is_dense
from ..ops.reductions import Reduction
from ..ops.views import COPYING, JoinOp
from ..program.program import CONST, Ref
from ..program.walk import needed, sources
from ..settings.config import config
from .owners import Owners, kept_by, owners_of
from .strips import Striping, striped_of
from .uses import Use, uses_of


def _saved(
    nodes: list[Node], uses: list[list[Use]], steps: list[int], memory: set[int],
    split: dict[int, int],
) -> list[Ref]:  # fmt: skip
    """The values that the backward of `steps` is given; the others it needs follow from them.

    split: what is saved in place of its parts.
    """
    args = [node.args for node in nodes]
    reads = {split.get(ref, ref) for index in steps for use in uses[index] for ref in use.reads}
    reads = {ref for ref in reads if ref < CONST}
    kept = {split.get(ref, ref) for index in steps for ref in kept_by(nodes[index])}
    kept = {ref for ref in kept if ref < 0 or ref in memory}
    if _from_inputs(nodes):
        computed = (sources(args, ref) for ref in reads if ref >= 0)
        return sorted({ref for ref in reads if ref < 0}.union(*computed))
    # no rule reduces again, and what one of a reduction reads is given to torch's ops...
    reduced = {x.index for x in nodes if isinstance(x.op, Reduction)}
    for index in reduced.intersection(steps):
        reduced.update(ref for use in uses[index] for ref in use.reads)
    saved = {ref for ref in reads if ref < 0 or ref in memory or ref in reduced}
    # ...or makes a view of torch's, or a join
    apart = (x for x in nodes if x.base >= 0 or isinstance(x.op, (JoinOp, Reduction)))
    given = memory.union(x.index for x in apart if x.index not in split)
    for ref in sorted(reads - saved):
        if not sources(args, ref, given | saved) <= saved:
            saved.add(ref)
    return sorted(saved | kept)


def _from_inputs(nodes: list[Node]) -> bool:
    """Whether backward computes all that it reads from the chain's Inputs.

    Not through reductions: these are under grad where it was another setting that recorded them.
    """
    return config.recompute == "inputs" and not any(
        isinstance(node.op, Reduction) and node.meta is not None and node.meta.requires_grad
        for node in nodes
    )


def _path(nodes: list[Node], uses: list[list[Use]], steps: list[int]) -> set[Ref]:
    """The values outside `steps` that its rules read, and those before them."""
    reads = {ref for index in steps for use in uses[index] for ref in use.reads}
    values = [ref for ref in reads if 0 <= ref < CONST]
    return {*needed([node.args for node in nodes], values)} - {*steps}


class Segment:
    """What one autograd node differentiates through; the same for every run of a program."""

    def __init__(
        self,
        nodes: list[Node],
        uses: list[list[Use]],
        steps: list[int],
        meta_of: Callable[[Ref], Meta],
        saved: list[Ref],
        extras: list[int],
        detours: bool,
        told: bool,
        statistics: Mapping[int, Mapping[str, Ref]],
        striped: Mapping[int, tuple[Striping, int]],
        spread: Mapping[tuple[Ref, int], Ints],
        parts: Sequence[int] = (),
    ) -> None:
        """statistics: of each reduction, by name. striped: of slices. spread: along which
        dimensions a step, which is the second of each key, has spread numbers of rows, whose
        gradients it adds up. parts: dead values, besides, whose gradients come from nodes of other
        segments.
        """
        self.detours = detours  # second derivatives would go past a live value's own node
        self.told = told  # hooks are, of all that is saved, and give it back as they like
        self.nodes, self.uses, self.meta_of = nodes, uses, meta_of
        self.statistics, self.striped, self.spread = statistics, striped, spread
        self.steps = steps  # node indices, ascending; the last is the root
        self.root = steps[-1]
        graphs = [index for index in extras if meta_of(index).requires_grad]
        normed = any(index in statistics for index in steps)  # torch's op is given a whole tensor
        self.pack = [] if told or normed else _pack(graphs, meta_of)
        packed = self.pack[1:]  # a pack is saved, and the node's output, by its first
        self.saved = [ref for ref in saved if ref not in packed]
        self.parts = parts
        self.outs = [self.root, *(index for index in graphs if index not in packed), *parts]
        self.inner = set(steps[:-1])
        self.merged = self._merged()
        outside = [
            (use.ref, meta_of(use.ref).shape == meta_of(index).shape)
            for index in reversed(steps) if index not in self.merged
            for use in uses[index] if use.ref not in self.inner
        ]  # fmt: skip
        # What gets a gradient, in the order of adding: one sink per use, so that the engine adds
        # them between those of uses elsewhere; to save memory, one per tensor.
        reduced = {ref for ref, same in outside if not same}
        self.summed: list[Ref] = []
        if _from_inputs(nodes):
            self.summed = list(dict.fromkeys(ref for ref, _ in outside if ref not in reduced))
        self.sinks = [ref for ref, _ in outside if ref not in self.summed] + self.summed
        self.frees = bool(saved) or any(
            ref >= CONST
            for index in steps
            for ref in (*kept_by(nodes[index]), *_numbers_read(nodes[index], uses[index]))
        )

    def _merged(self) -> set[int]:
        """The slices whose gradients go to the sink of others': next to them, of other strips.

        Whatever they are added to, each element meets one of them and zeros.
        """
        merged, strips = set[int](), dict[Ref, set[int]]()  # of the last sink of each value
        for index in reversed(self.steps):
            for use in self.uses[index]:
                if index not in self.striped:
                    strips.pop(use.ref, None)
                    continue
                _, k = self.striped[index]
                if use.ref not in self.inner and k not in strips.get(use.ref, {k}):
                    merged.add(index)
                    strips[use.ref].add(k)
                else:
                    strips[use.ref] = {k}
        return merged

    def named(self, index: int) -> dict[str, Ref]:
        """What the rules of a step read, by name."""
        return {**self.nodes[index].named(), **self.statistics.get(index, {})}


def _pack(indices: list[int], meta_of: Callable[[Ref], Meta]) -> list[int]:
    """`indices` if their values can lie in one tensor, which makes one output of a node of them.

    A further output costs 3 us: its allocation, its autograd state, its saved variable.
    """
    metas = {id(meta_of(index)) for index in indices}
    if len(indices) < 2 or len(metas) != 1:
        return []
    meta = meta_of(indices[0])
    whole = meta.nbytes and meta.nbytes % 16 == 0 and is_dense(tuple(meta.shape), meta.stride)
    return indices if whole else []


def _numbers_read(node: Node, uses: list[Use]) -> list[Ref]:
    """The Python numbers that rules read and eager has made operands, which it saves as tensors."""
    op = node.op
    assert op is not None
    operands = [
        ref for ref, role in zip(node.args, op.roles, strict=True)
        if role == "promote" and not op.scalars_apart
    ]  # fmt: skip
    return [ref for use in uses for ref in use.reads if ref >= CONST and ref in operands]


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """The segments of a flush, in order, and the dead values that its kernel stores for them."""

    segments: list[Segment]
    stored: tuple[int, ...]
    saved_bytes: int
    views: tuple[int, ...] = ()  # that torch makes, ascending
    bare: tuple[int, ...] = ()  # what nodes give that needs no memory
    # reductions with nodes of torch's, ascending: each with the statistics that its node saves
    reduced: tuple[tuple[int, ...], ...] = ()
    # what hooks are told of, in order: the value and its place among all that the segments save,
    # one after the other; -1 where nobody can see the result of the op that saves it
    told: tuple[tuple[Ref, int], ...] = ()


def outline_of(nodes: list[Node], inputs: tuple[Meta, ...], live: tuple[int, ...]) -> Outline:
    """The autograd side of a flush."""

    every = [*nodes, *statistics_of(nodes)]

    def meta_of(ref: Ref) -> Meta:
        meta = every[ref].meta if ref >= 0 else inputs[~ref]
        assert meta is not None
        return meta

    statistics: dict[int, dict[str, Ref]] = {}
    for node in every[len(nodes) :]:
        assert node.op is not None and node.of is not None
        statistics.setdefault(node.of[0], {})[node.op.name.partition("_")[0]] = node.index
    uses = [list(uses_of(node, meta_of, statistics.get(node.index, {})))
            if meta_of(node.index).requires_grad else [] for node in nodes]  # fmt: skip
    told = nodes[-1].told is LATER
    graphs = [index for index in live if meta_of(index).requires_grad]
    reduces = any(isinstance(node.op, Reduction) for node in nodes)
    dead = [node for node in nodes if node.index not in graphs]
    striped = {} if reduces else striped_of(dead, meta_of)  # row kernels read no index maps
    owners = owners_of(nodes, uses, meta_of, graphs, striped, every=told)
    uses = owners.uses
    roots = sorted(owners.roots)
    lent = owners.lent()
    members = Counter(owners.values())
    reduced = {index: [index, *statistics.get(index, {}).values()] for index in roots
               if isinstance(nodes[index].op, Reduction) and members[index] == 1}  # fmt: skip
    views, bare = _views(every, uses, owners, live, [*reduced])
    memory = {*live, *roots, *views} - bare
    memory.update(nodes[index].base for index in views if nodes[index].base not in bare)
    memory -= {index for index in views if nodes[index].base in bare}
    places: dict[tuple[int, int], int] = {}  # by op and which of the values that it saves
    saved_refs: set[Ref] = {ref for index in reduced for ref in kept_by(nodes[index])}
    saved_refs.update(index for group in reduced.values() for index in group[1:])
    memory.update(ref for ref in saved_refs if ref >= 0)
    segments = []
    for root in roots:
        if root in views or root in reduced:
            continue
        steps = [index for index in sorted(owners) if owners[index] == root]
        parts = [part for part in lent if owners[part] == root]
        bases = sorted(owners.bases_of(parts) - memory)
        memory.update(bases)
        if told:
            saved = [ref for index in steps for ref in nodes[index].saves]
            for index in steps:
                for k in range(len(nodes[index].saves)):
                    places[index, k] = len(places)
            detours = False
        else:
            saved = _saved(nodes, uses, steps, memory, owners.split)
            detours = _from_inputs(nodes) and bool(memory & _path(nodes, uses, steps))
        extras = [ref for ref in dict.fromkeys(saved) if ref >= 0 and ref not in memory]
        memory.update(extras)
        saved_refs.update(saved)
        parts += bases
        segments.append(Segment(
            nodes, uses, steps, meta_of, saved, extras, detours, told, statistics,
            owners.striped, owners.spread, parts,
        ))  # fmt: skip
    order = []
    for node in nodes if told else ():
        for k, ref in enumerate(node.saves):
            order.append((ref, places.get((node.index, k), -1)))
            memory.update([ref] if ref >= 0 else ())
    if told and nodes[-1].unread:  # what somebody sees is computed, and nothing is kept
        seen = {*live, *(nodes[index].base for index in live if nodes[index].base >= 0)}
        seen.update(nodes[index].base for index in views if nodes[index].op.name in COPYING)  # type: ignore[union-attr]
        bare.update(memory - seen - views)
        memory, saved_refs = seen, set()
    stored = tuple(sorted(memory - set(live) - views))
    nbytes = sum(meta_of(ref).nbytes for ref in saved_refs)
    bare.update(lent)
    return Outline(
        segments, stored, nbytes, (*sorted(views),), (*sorted(bare),),
        tuple(tuple(reduced[index]) for index in sorted(reduced)), tuple(order),
    )  # fmt: skip


def _views(
    nodes: list[Node], uses: list[list[Use]], owner: Owners, live: tuple[int, ...],
    reduced: Sequence[int],
) -> tuple[set[int], set[int]]:  # fmt: skip
    """The views that torch makes, and the values in place of which bare tensors do.

    These are what views lie in, what is reduced by a node of torch's, and what comes of that.
    """
    read = {ref for index in owner for use in uses[index] for ref in use.reads}
    read.update(ref for index in owner for ref in kept_by(nodes[index]))
    seen = {owner.split.get(ref, ref) for ref in read.union(live) if 0 <= ref < CONST}
    views: set[int] = set()
    for index in seen.union(owner) - owner.split.keys():
        while nodes[index].base >= 0:
            views.add(index)
            (index,) = nodes[index].args
    needed = seen | {nodes[index].base for index in seen}
    needed |= {nodes[index].base for index in views if nodes[index].op.name in COPYING}  # type: ignore[union-attr]
    replaced = {nodes[index].base for index in views}
    replaced.update(ref for index in reduced for ref in owner.edges(index) if ref >= 0)
    replaced.update(index for index in owner.roots if isinstance(nodes[index].op, Reduction))
    return views, replaced - needed
